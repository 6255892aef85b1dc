"""The policies of a sweep, as plain values from which a worker process builds them, times them and runs an episode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from specact.clock import RealClock
from specact.execution.strategy import Execution
from specact.families.chunks.flow import FlowBundle, load_flow
from specact.families.chunks.policy import ChunkPolicy, Inpainting
from specact.families.chunks.wire import ChunkExchange
from specact.families.codes.pair import CodeParts, codes_of
from specact.families.codes.policy import CodeChunks, OnnxPolicy
from specact.families.codes.sampling import CodeDistribution
from specact.gates.heads import HeadDraft, load_head
from specact.gates.settings import LEARNED, GateSettings
from specact.lab.envs.moving import MovingWorld
from specact.lab.rollout.episode import Episode, run_episode
from specact.lab.rollout.pair import Pairing, run_pair, run_rounds
from specact.lab.rollout.simulated_target import Route
from specact.links.link import load_link
from specact.load import load_pair
from specact.observation import ObservationSpec, Window
from specact.pair import Pair, PairSource
from specact.rng import Role, StepAddress, stream
from specact.systems.flash import Check, FlashParts, Round, RoundRequest, Rounds, load_flow_pair
from specact.systems.freqcache import FreqCached
from specact.systems.roboecc import Precision, StagedFolder, code_reader, load_staged, pack, unpack
from specact.types import Decision
from specact.verification import LocalTarget

# The link of a policy without a server.
ON_BOARD = "none"
OnDecision = Callable[[Decision, bool], None]
_ADDRESS = StepAddress(0, 0, 0, 0)


@dataclass(frozen=True)
class Circumstances:
    """What a driver meets in an episode.

    Attributes:
        link: to the server; :data:`ON_BOARD` for none.
        latencies_s: of its :attr:`Driver.parts` on this hardware [s].
        start: the environment's seed.
        seed, episode: address of all random streams.
        on_decision: called with a gate's decisions, see :func:`~specact.lab.rollout.pair.run_pair`.
    """

    link: str
    latencies_s: tuple[float, ...]
    start: int
    seed: int
    episode: int
    on_decision: OnDecision | None = None

    @property
    def address(self) -> dict[str, int]:
        """Of the episode."""
        return {"start": self.start, "seed": self.seed, "episode": self.episode}

    def route(self, up: int, down: int) -> Route:
        """To the server, for messages of these sizes."""
        return Route(load_link(self.link), up, down, stream(self.seed, Role.LINK, episode=self.episode))


class Driver(Protocol):
    """A policy of a sweep; drivers of one process share their networks."""

    @property
    def bundle(self) -> str:
        """Path of its bundle."""
        ...

    @property
    def execution(self) -> Execution | None:
        """How a chunk policy's chunks are executed; None for a pair."""
        ...

    @property
    def offloads(self) -> bool:
        """Whether it queries a server."""
        ...

    @property
    def observation(self) -> ObservationSpec:
        """What it needs to see."""
        ...

    @property
    def fingerprint(self) -> str:
        """Of its bundle."""
        ...

    @property
    def parts(self) -> tuple[tuple[Driver, str], ...]:
        """What is timed of it, as drivers and names of their calls; equal parts are timed once."""
        ...

    def call(self, part: str) -> Callable[[], object]:
        """One of its parts on an observation of zeros, to be timed."""
        ...

    def run(self, world: MovingWorld, at: Circumstances) -> Episode:
        """An episode in a moving world."""
        ...


@dataclass(frozen=True)
class PolicyDriver:
    """One policy: a flow, or one of a pair of action codes.

    Attributes:
        bundle: path of its bundle.
        execution: how its chunks are executed.
        role: ``flow``, or which one of a pair; ``head`` is the learned gate's head as the draft.
        steps: Euler steps of a flow's inference.
        files: networks that replace its own, by part.
        window: observation history of a target's file; None for the pair's.
        offloads: whether it runs on the server.
    """

    bundle: str
    execution: Execution
    role: Literal["flow", "draft", "target", "head"] = "flow"
    steps: int = 10
    files: tuple[tuple[str, str], ...] = ()
    window: int | None = None
    offloads: bool = False

    def build(self) -> ChunkPolicy:
        """The policy."""
        if self.role == "flow":
            return _flow(self.bundle, self.files).policy(self.steps)
        return _code_policy(self.bundle, self.role, dict(self.files).get("target"), self.window)

    @property
    def observation(self) -> ObservationSpec:
        """See :class:`Driver`, as all that follows."""
        return self.build().spec.observation

    @property
    def fingerprint(self) -> str:
        flow = self.role == "flow"
        return _flow(self.bundle, ()).fingerprint if flow else _codes_parts(self.bundle).fingerprint

    @property
    def parts(self) -> tuple[tuple[Driver, str], ...]:
        # Inpainting guidance of a flow policy computes a gradient.
        part = "inpainting" if self.execution.kind == "inpainting" else "inference"
        return ((replace(self, execution=Execution("synchronous", 1), offloads=False), part),)

    def call(self, part: str) -> Callable[[], object]:
        policy, rng, guidance = self.build(), np.random.default_rng(0), None
        if part == "inpainting":
            shape = policy.spec.chunk, policy.spec.actions
            guidance = Inpainting(np.zeros(shape, np.float32), np.ones(policy.spec.chunk, np.float32))
        window = policy.spec.observation.zeros()
        return lambda: policy.infer(window, rng, guidance)

    def run(self, world: MovingWorld, at: Circumstances) -> Episode:
        policy, latency = self.build(), sum(at.latencies_s)
        if at.link == ON_BOARD:
            return run_episode(world, policy, self.execution, latency, **at.address)
        rng = stream(at.seed, Role.LINK, episode=at.episode)
        route = Route.of(load_link(at.link), ChunkExchange(policy.spec).contract, rng)
        return run_episode(world, policy, self.execution, route.latency(latency), **at.address)


@dataclass(frozen=True)
class PairDriver:
    """A pair with a gate.

    Attributes:
        source: the pair, of whatever family.
        gate: calibrated, unless a rate is given.
        rate: for which a sweep calibrates the gate at every place; None for a calibrated gate.
        late: whether the draft's chunk runs at once and the late verdict corrects the rest.
    """

    source: PairSource
    gate: GateSettings
    rate: float | None = None
    late: bool = False
    execution = None
    offloads = True

    @property
    def bundle(self) -> str:
        """Name or path of the pair."""
        return self.source.name_or_path

    def load(self) -> Pair[Any]:
        """The pair."""
        return _pair(self.source)

    @property
    def observation(self) -> ObservationSpec:
        """See :class:`Driver`, as all that follows."""
        return self.load().observation

    @property
    def fingerprint(self) -> str:
        return self.load().fingerprint

    @property
    def parts(self) -> tuple[tuple[Driver, str], ...]:
        # Of the gates a learned one alone takes time that counts, and late verdicts take none.
        ungated = replace(self, gate=GateSettings("never"), rate=None, late=False)
        gated = replace(ungated, gate=self.gate) if self.gate.name in LEARNED else ungated
        return (gated, "draft"), (ungated, "target")

    def call(self, part: str) -> Callable[[], object]:
        """A proposal and the gate's decision, or the proposal's verification."""
        pair, rng = self.load(), np.random.default_rng(0)
        drafter, gate, window = pair.drafter(), self.gate.build(pair), pair.observation.zeros()
        if part == "draft":
            return lambda: gate.decide(drafter.propose(window, rng), rng)
        verifier, proposal = pair.verifier(LocalTarget(pair.target(), RealClock())), drafter.propose(window, rng)
        return lambda: verifier.submit(proposal, _ADDRESS).result()

    def run(self, world: MovingWorld, at: Circumstances) -> Episode:
        link = load_link("loopback" if at.link == ON_BOARD else at.link)
        draft_s, target_s = at.latencies_s
        pairing = Pairing(self.gate, link, draft_s, target_s, late_for_s=inf if self.late else None)
        return run_pair(world, self.load(), pairing, on_decision=at.on_decision, **at.address)[0]


@dataclass(frozen=True)
class SplitDriver:
    """A pair's target alone, its first stages on a server, the others on the device: :mod:`specact.systems.roboecc`.

    Attributes:
        bundle: path of the pair.
        stages: folder of the target's stages.
        cut: stages that run on the server.
        execution: how its chunks are executed.
        precision: of activations on the link.
    """

    bundle: str
    stages: str
    cut: int
    execution: Execution
    precision: Precision = "float16"
    offloads = True

    def build(self) -> CodeChunks:
        """The policy, with activations quantised as on the link."""
        pair, staged = _codes_parts(self.bundle), _staged(self.stages)
        return CodeChunks(_Split(pair, staged, self), pair.tokenizer, pair.spec, pair.spec.target)

    @property
    def crossing(self) -> tuple[int, int]:
        """Bytes up and down the link."""
        spec = _staged(self.stages).spec
        return spec.observation.nbytes, spec.reply_bytes(self.cut, self.precision)

    @property
    def observation(self) -> ObservationSpec:
        """See :class:`Driver`, as all that follows."""
        return self.build().spec.observation

    @property
    def fingerprint(self) -> str:
        return _codes_parts(self.bundle).fingerprint

    @property
    def parts(self) -> tuple[tuple[Driver, str], ...]:
        return (self, "device"), (self, "server")

    def call(self, part: str) -> Callable[[], object]:
        """The stages on one side of the cut."""
        staged, cut = _staged(self.stages), self.cut
        network, windows, last = staged.network, [staged.spec.observation.zeros()], staged.spec.stages
        if cut == (0 if part == "server" else last):
            return lambda: None
        if cut in (0, last):
            return lambda: network.run(windows)
        if part == "server":
            return lambda: network.begin(windows, cut)
        activation = network.begin(windows, cut)
        return lambda: network.finish(activation, cut)

    def run(self, world: MovingWorld, at: Circumstances) -> Episode:
        inference_s = sum(at.latencies_s)
        latency = at.route(*self.crossing).latency(inference_s) if self.cut and at.link != ON_BOARD else inference_s
        return run_episode(world, self.build(), self.execution, latency, **at.address)


class _Split:
    def __init__(self, pair: CodeParts, staged: StagedFolder, driver: SplitDriver) -> None:
        self._read, self._staged, self._driver = code_reader(pair.pair(), staged), staged, driver

    def infer_batch(self, windows: Sequence[Window]) -> list[CodeDistribution]:
        return list(map(self.infer, windows))

    def infer(self, window: Window) -> CodeDistribution:
        network, cut = self._staged.network, self._driver.cut
        if cut in (0, self._staged.spec.stages):
            return self._read(network.run([window]))
        shape = self._staged.spec.activations[cut - 1]
        received = unpack(pack(network.begin([window], cut)[0], self._driver.precision), shape)
        return self._read(network.finish(received, cut))


@dataclass(frozen=True)
class RoundsDriver:
    """A flow policy that checks its block's drafts, or reuses cached camera tokens.

    Attributes:
        bundle: path of a flow bundle, with the block or the refresh that the rounds need.
        rounds: see :mod:`specact.systems.flash` and :mod:`specact.systems.freqcache`.
    """

    bundle: str
    rounds: Rounds
    execution = None
    offloads = False

    def load(self) -> Pair[Any]:
        """The pair."""
        return _rounds(self.bundle).composed(rounds=self.rounds)

    @property
    def observation(self) -> ObservationSpec:
        """See :class:`Driver`, as all that follows."""
        return self.load().observation

    @property
    def fingerprint(self) -> str:
        return _flow(self.bundle, ()).fingerprint

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of rounds that occur: with reused tokens, with an accepting check, with a failing one."""
        if self.rounds.reuse is not None:
            return "full", "reused"
        return ("full",) if self.rounds.proposes == "nothing" else ("full", "check", "failed")

    @property
    def parts(self) -> tuple[tuple[Driver, str], ...]:
        plain = RoundsDriver(self.bundle, Rounds(""))
        return tuple((self if kind == "reused" else plain, kind) for kind in self.kinds)

    def call(self, part: str) -> Callable[[], object]:
        """A round of one kind."""
        flow: FlashParts = self.load().parts
        target, parts = flow.target(), None
        if part == "reused":
            assert self.rounds.reuse is not None and flow.refresh is not None, "checked by the lever"
            # Motion estimates of a blank image have no confidence.
            parts = FreqCached(flow.policy.networks, flow.refresh, replace(self.rounds.reuse, confidence=0.0))
        check = Check(within=0.0 if part == "failed" else 1e9, guarded=False)
        request = RoundRequest(part in ("full", "reused"), check=check, parts=parts)
        answer = target.answer(target.policy.spec.observation.zeros(), _ADDRESS)
        return lambda: answer.round(request)

    def duration_s(self, latencies_s: Sequence[float]) -> Callable[[Round, float], float]:
        """The duration of a round as a function of it and its reused share, given the time of each kind [s].

        For partial reuse the time is interpolated linearly in the share.
        """
        reuse, times = self.rounds.reuse, dict(zip(self.kinds, latencies_s, strict=True))

        def seconds(round_: Round, share: float) -> float:
            if reuse is not None and share > 0.0:
                return times["full"] + (times["reused"] - times["full"]) * share / reuse.most
            return times["full" if not round_.checked else "failed" if round_.full else "check"]

        return seconds

    def run(self, world: MovingWorld, at: Circumstances) -> Episode:
        return run_rounds(world, self.load(), self.duration_s(at.latencies_s), **at.address)


@cache
def _flow(bundle: str, parts: tuple[tuple[str, str], ...]) -> FlowBundle:
    return load_flow(bundle, variants={part: Path(file) for part, file in parts})


@cache
def _staged(folder: str) -> StagedFolder:
    return load_staged(Path(folder))


@cache
def _rounds(bundle: str) -> Pair[Any]:
    return load_flow_pair(load_flow(bundle))


@cache
def _pair(source: PairSource) -> Pair[Any]:
    return load_pair(source)


def _codes_parts(bundle: str) -> CodeParts:
    return codes_of(_pair(PairSource(bundle)), "one policy of a pair alone")


@cache
def _code_policy(bundle: str, role: str, file: str | None, window: int | None) -> CodeChunks:
    pair = _codes_parts(bundle)
    if role == "head":
        return CodeChunks(HeadDraft(pair.draft, load_head(pair.pair())), pair.tokenizer, pair.spec, pair.spec.draft)
    network: Any = pair.target if role == "target" else pair.draft
    seen = network.observation if window is None else network.observation.shortened(window)
    policy = network if file is None else OnnxPolicy(Path(file), pair.spec, seen, words=pair.manifest.words)
    return CodeChunks(policy, pair.tokenizer, pair.spec, seen)
