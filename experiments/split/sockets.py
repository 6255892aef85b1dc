"""Placed and gated targets over real sockets, with a relay that replays a recorded link and a device that is slower."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from experiments.measure import connected, slowed, target_path
from experiments.split.forecast import load_forecast
from experiments.split.simulated import PERIOD_S, PLACED, StudyLink, bandwidths_of, chooser_of
from specact.execution.player import WAIT, LateVerdicts
from specact.families.codes.policy import CodeDrafter, CodePolicy
from specact.gates import Always
from specact.gates.settings import GateSettings, gate_settings
from specact.lab.envs import env_of
from specact.lab.evaluation.calibrate import decision_table, find_threshold
from specact.lab.rollout.processes import linked, serving
from specact.lab.rollout.steps import Table
from specact.observation import Window
from specact.pair import Pair, Verifier
from specact.policy import SpeculativePolicy
from specact.remote.target import remote_verifier
from specact.rng import Role, StepAddress, stream
from specact.systems.roboecc import SplitTarget, StageCosts
from specact.systems.staged import StagedFolder, reader_of, split_contract
from specact.types import Miss

UNSPLIT = ("hybrid", "adahi", "late")
GATED = (*UNSPLIT, "adahi_placed")
# Inferences in a row of one method, and how often each has its turn.
STRETCH, TURNS = 11, 5
DEADLINE_MS = 5_000.0
# An episode's number and an observation.
Seen = tuple[int, Window]


def target_windows(pair: Pair[Any], inferences: int, seed: int) -> list[Seen]:
    """The first observations in rollouts of the target."""
    path = target_path(pair, env_of(pair.env), count(), seed)
    return [(record.address.episode, record.proposal.window) for record in islice(path, inferences)]


@dataclass
class Robot:
    """A robot of one method, and what it has measured: ``infer(number, due)`` makes an inference due at a time [s]."""

    target: SplitTarget[Any] | None
    infer: Callable[[int, float], None] = lambda number, due: None
    missed: int = 0

    def __post_init__(self) -> None:
        self.latency_ms, self.cuts = list[float](), list[int]()

    def note(self, due: float, missed: bool = False, *cut: int) -> None:
        """Notes an inference that has just ended."""
        self.latency_ms.append(1e3 * (time.monotonic() - due))
        self.cuts += cut
        self.missed += missed

    def summary(self) -> dict[str, Any]:
        switches = None if self.target is None else self.target.counts["switches"]
        return {"latency_ms": self.latency_ms, "cuts": self.cuts, "missed": self.missed, "switches": switches}


@dataclass(frozen=True)
class Device:
    """A slower device on a recorded link: every method begins behind the part that the forecast was trained on.

    The costs of the target's stages and ``draft_s``, the time of the draft [s], are those there.
    """

    staged: StagedFolder
    bundle: Pair[Any]
    link: StudyLink
    forecast: Path
    costs: StageCosts
    draft_s: float
    gate: GateSettings
    seen: Sequence[Seen]
    seed: int

    def measure(self, methods: Sequence[str], stretch: int = STRETCH) -> dict[str, dict[str, Any]]:
        """Latency, cuts and misses of every inference, by method.

        All stay connected and take turns: each makes a stretch of inferences, in an order drawn anew for each stretch,
        so that what else the machine and the recording do falls on all alike.
        """
        order = stream(self.seed, Role.GATE)
        with ExitStack() as stack:
            ports = [stack.enter_context(serving(path)).port for path in (self.bundle.parts.path, self.staged.path)]
            robots = {name: self._robot(stack, name, ports[name not in UNSPLIT]) for name in methods}
            for first in range(0, len(self.seen), stretch):
                for name in order.permutation(list(methods)).tolist():
                    began = time.monotonic()
                    for inference in range(first, min(first + stretch, len(self.seen))):
                        time.sleep(max(0.0, began + (inference - first) * PERIOD_S - time.monotonic()))
                        robots[name].infer(inference, time.monotonic())
            return {name: robot.summary() for name, robot in robots.items()}

    def _robot(self, stack: ExitStack, method: str, server: int) -> Robot:
        """The robot of a method, connected to this port through a relay of its own."""
        remaining = [*np.cumsum(self.costs.device_s[::-1])[::-1].tolist(), 0.0]
        staged = copy(self.staged)
        vars(staged).update(
            run=slowed(staged.run, lambda windows: remaining[0]),
            finish=slowed(staged.finish, lambda activation, cut: remaining[cut]),
        )
        before, _ = bandwidths_of(self.link, self.costs)
        link = self.link.at(self.link.trained_s)
        port = stack.enter_context(linked(server, link, self.seed)).port
        if method in UNSPLIT:
            contract = self.bundle.exchange.contract
            client = stack.enter_context(connected(port, contract, method))
            return self._gated(method, remote_verifier(client, self.bundle, DEADLINE_MS), None)
        client = stack.enter_context(connected(port, split_contract(staged.spec, staged.fingerprint), "placed"))
        named = "smallest" if method == "adahi_placed" else method
        # No method here knows the bandwidth to come.
        learned = load_forecast(self.forecast).forecast
        chooser = chooser_of(named, self.costs, before, learned, learned, np.inf)
        target = SplitTarget(staged, reader_of(self.bundle, staged), client, chooser, DEADLINE_MS)
        return self._alone(target) if method in PLACED else self._gated(method, self.bundle.verifier(target), target)

    def _alone(self, target: SplitTarget[Any]) -> Robot:
        """The target without a draft; the robot waits for every answer."""
        robot = Robot(target)

        def infer(inference: int, due: float) -> None:
            answer = target.submit(self.seen[inference][1], StepAddress(self.seed, 0, 0, inference)).result()
            robot.note(due, isinstance(answer, Miss), target.cut)

        robot.infer = infer
        return robot

    def _gated(self, method: str, verifier: Verifier, target: SplitTarget[Any] | None) -> Robot:
        """A draft and a gated target."""
        draw = slowed(self.bundle.parts.draft.infer, lambda window: self.draft_s)
        draft = SimpleNamespace(infer=draw, infer_batch=lambda windows: [*map(draw, windows)])
        policy = SpeculativePolicy(
            self.bundle, self.gate.build(self.bundle) if method.startswith("adahi") else Always(),
            drafter=CodeDrafter(cast(CodePolicy, draft), self.bundle.parts.tokenizer), verifier=verifier,
            verdicts=LateVerdicts(np.inf) if method == "late" else WAIT, seed=self.seed,
        )  # fmt: skip
        robot, period_s = Robot(target), 1.0 / self.bundle.rate_hz

        def infer(inference: int, due: float) -> None:
            episode, window = self.seen[inference]
            if policy.record is None or policy.record.address.episode != episode:
                policy.reset(episode)
            policy.act_on(window)
            robot.note(due)
            # The rest of the chunk, each action when it is due: a late verdict replaces the remaining actions.
            for action in range(1, self.bundle.execute):
                time.sleep(max(0.0, due + action * period_s - time.monotonic()))
                if not policy.wants_inference:
                    policy.act_on(window)
            robot.missed = policy.counts["missed"]

        robot.infer = infer
        return robot


def calibrate_along(pair: Pair[Any], path: Sequence[tuple[int, Window]], rate: float, seed: int) -> GateSettings:
    """The deviation gate with its threshold for a rate along these observations, each with its episode's number.

    Every observation is inferred on; the rest of its chunk is executed without waiting.
    """

    def roll(tried: GateSettings, number: int) -> Table:
        policy, decisions = SpeculativePolicy(pair, tried.build(pair), seed=seed), []
        for episode, window in path:
            if policy.record is None or policy.record.address.episode != episode:
                policy.reset(episode)
            policy.act_on(window)
            assert policy.record is not None
            decisions.append(policy.record.decision)
            while not policy.wants_inference:
                policy.act_on(window)
        return decision_table(decisions)

    return find_threshold(gate_settings("adahi", pair), rate, 6, roll).settings
