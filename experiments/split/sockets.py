"""Placed and gated targets over real sockets, with a relay that replays a recorded link and a device that is slower."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from experiments.measure import slowed, target_path
from experiments.split.forecast import load_forecast
from experiments.split.simulated import PERIOD_S, PLACED, StudyLink, bandwidths_of, chooser_of, oracle_of
from specact.execution.player import WAIT, LateVerdicts
from specact.families.codes.policy import CodeDrafter, CodePolicy
from specact.gates import Always
from specact.gates.settings import GateSettings, gate_settings
from specact.lab.envs import env_of
from specact.lab.evaluation.calibrate import decided, find_threshold
from specact.lab.rollout.processes import linked, serving
from specact.lab.rollout.steps import Table
from specact.links.link import load_link
from specact.observation import Window
from specact.pair import Pair, Verifier
from specact.policy import SpeculativePolicy
from specact.remote.client import Client
from specact.remote.endpoint import Endpoint
from specact.remote.target import remote_verifier
from specact.rng import StepAddress
from specact.systems.roboecc import SplitTarget, StageCosts
from specact.systems.staged import StagedFolder, reader_of, split_contract
from specact.types import Miss

GATED = ("hybrid", "adahi", "late", "adahi_placed")
DEADLINE_MS, CONNECT_S = 5_000.0, 60.0
# An episode's number and an observation.
Seen = tuple[int, Window]


def target_windows(pair: Pair[Any], inferences: int, seed: int) -> list[Seen]:
    """The first observations in rollouts of the target."""
    path = target_path(pair, env_of(pair.env), count(), seed)
    return [(record.address.episode, record.proposal.window) for record in islice(path, inferences)]


def staged_client(staged: StagedFolder, port: int) -> Client:
    """A connected client of a server with these stages."""
    client = Client(Endpoint("ws", "127.0.0.1", port), split_contract(staged.spec, staged.fingerprint), "placed")
    try:
        client.connect(CONNECT_S)
    except BaseException:
        client.close()
        raise
    return client


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

    def measure(self, methods: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Latency, cuts and misses of every inference, by method."""
        with serving(self.staged.path) as placed, serving(self.bundle.parts.path) as gated:
            return {
                name: self._measure(name, gated.port if name in ("hybrid", "adahi", "late") else placed.port)
                for name in methods
            }

    def _measure(self, method: str, server: int) -> dict[str, Any]:
        remaining = [*np.cumsum(self.costs.device_s[::-1])[::-1].tolist(), 0.0]
        staged = copy(self.staged)
        vars(staged).update(
            run=slowed(staged.run, lambda windows: remaining[0]),
            finish=slowed(staged.finish, lambda activation, cut: remaining[cut]),
        )
        before, _ = bandwidths_of(self.link, self.costs)
        with ExitStack() as stack:
            link = self.link.at(self.link.trained_s)
            port = stack.enter_context(linked(server, link, self.seed)).port
            began = time.monotonic()
            up, down = int(self.costs.observation_bytes), int(self.costs.cut_bytes[-1])
            oracle = oracle_of(load_link(link), lambda: time.monotonic() - began, up, down)
            if method in ("hybrid", "adahi", "late"):
                client = stack.enter_context(
                    Client(Endpoint("ws", "127.0.0.1", port), self.bundle.exchange.contract, method)
                )
                client.connect(CONNECT_S)
                return self._gated(method, remote_verifier(client, self.bundle, DEADLINE_MS), None)
            client = stack.enter_context(staged_client(staged, port))
            named = "smallest" if method == "adahi_placed" else method
            chooser = chooser_of(named, self.costs, before, load_forecast(self.forecast).forecast, oracle, np.inf)
            target = SplitTarget(staged, reader_of(self.bundle, staged), client, chooser, DEADLINE_MS)
            if method in PLACED:
                return self._alone(target)
            return self._gated(method, self.bundle.verifier(target), target)

    def _alone(self, target: SplitTarget[Any]) -> dict[str, Any]:
        """The target without a draft; the robot waits for every answer."""
        latencies, cuts, missed = [], [], 0
        for inference, started in self._schedule():
            answer = target.submit(self.seen[inference][1], StepAddress(self.seed, 0, 0, inference)).result()
            latencies.append(1e3 * (time.monotonic() - started))
            missed += isinstance(answer, Miss)
            cuts.append(target.cut)
        return {"latency_ms": latencies, "cuts": cuts, "missed": missed, "switches": target.counts["switches"]}

    def _gated(self, method: str, verifier: Verifier, target: SplitTarget[Any] | None) -> dict[str, Any]:
        """A draft and a gated target."""
        infer = slowed(self.bundle.parts.draft.infer, lambda window: self.draft_s)
        draft = SimpleNamespace(infer=infer, infer_batch=lambda windows: [*map(infer, windows)])
        policy = SpeculativePolicy(
            self.bundle, self.gate.build(self.bundle) if method.startswith("adahi") else Always(),
            drafter=CodeDrafter(cast(CodePolicy, draft), self.bundle.parts.tokenizer), verifier=verifier,
            verdicts=LateVerdicts(np.inf) if method == "late" else WAIT, seed=self.seed,
        )  # fmt: skip
        latencies, period_s = [], 1.0 / self.bundle.rate_hz
        for inference, started in self._schedule():
            episode, window = self.seen[inference]
            if policy.record is None or policy.record.address.episode != episode:
                policy.reset(episode)
            policy.act_on(window)
            latencies.append(1e3 * (time.monotonic() - started))
            # The rest of the chunk, each action when it is due: a late verdict replaces the remaining actions.
            for action in range(1, self.bundle.execute):
                time.sleep(max(0.0, started + action * period_s - time.monotonic()))
                if not policy.wants_inference:
                    policy.act_on(window)
        switches = None if target is None else target.counts["switches"]
        return {"latency_ms": latencies, "cuts": [], "missed": policy.counts["missed"], "switches": switches}

    def _schedule(self) -> Iterator[tuple[int, float]]:
        """Each inference when it is due, and its time [s]."""
        first = time.monotonic()
        for inference in range(len(self.seen)):
            time.sleep(max(0.0, first + inference * PERIOD_S - time.monotonic()))
            yield inference, time.monotonic()


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
        return decided(decisions)

    return find_threshold(gate_settings("adahi", pair), rate, 6, roll).settings
