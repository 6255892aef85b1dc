"""The policies of a sweep, as plain values from which a worker process builds them, times them and runs an episode.

Every driver says its ``bundle``, what it needs to see (``observation``), whether it ``offloads`` to a server, what is
timed of it (``parts``: drivers and names of their calls; equal ones are timed once), and how its chunks are executed
(``execution``; None for a pair). Drivers of one process share their networks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from specact.execution.schedule import Execution
from specact.families.chunks.flow import FlowBundle, load_flow
from specact.families.chunks.policy import ChunkPolicy, Inpainting, chunk_contract
from specact.families.codes.pair import CodeParts, codes_of
from specact.families.codes.policy import CodeChunks, CodePolicy, OnnxPolicy
from specact.families.codes.sampling import CodeDistribution
from specact.gates.learned import HeadDraft, TargetHead
from specact.gates.settings import LEARNED, GateSettings
from specact.lab.data.folder import Row
from specact.lab.envs.robot import MovingWorld
from specact.lab.envs.task import Idle, Task
from specact.lab.evaluation.cost import decision
from specact.lab.rollout.episode import Episode, Pairing, run_episode, run_pair
from specact.lab.rollout.families import rollout_of
from specact.lab.rollout.methods import HYBRID
from specact.lab.rollout.rollout import episode_seed
from specact.lab.rollout.timed import Route
from specact.links.link import load_link
from specact.load import load_pair
from specact.observation import ObservationSpec, Window
from specact.pair import Pair, PairSource
from specact.rng import Role, StepAddress, stream
from specact.systems.flash import Check, Round, RoundRequest, Rounds
from specact.systems.flow import FULL, FlowParts
from specact.systems.freqcache import ReusingRounds
from specact.systems.staged import Precision, StagedFolder, load_staged, reader_of
from specact.types import Decision

PolicyRole = Literal["flow", "target", "head"]
FIRST, ALWAYS = StepAddress(0, 0, 0, 0), GateSettings("always")
# The link of a policy without a server.
ON_BOARD = "none"
OnDecision = Callable[[Decision, bool], None]


@dataclass(frozen=True)
class Setting:
    """A lever at one strength."""

    lever: str
    strength: float
    driver: Driver

    @property
    def label(self) -> str:
        """Lever and strength as text."""
        return f"{self.lever} {self.strength:g}"


@dataclass(frozen=True)
class Trial:
    """The settings of one episode; ``seed`` and ``episode`` determine the initial state, for all settings."""

    setting: Setting
    task: str
    pace: float
    idle: Idle  # the robot's behaviour while it waits, see MovingWorld
    hardware: str  # the profile's name
    kappa: float  # its factor on stored times; 0 where it has absolute ones
    link: str  # to the server; ON_BOARD for a policy on the robot
    latencies_s: tuple[float, ...]  # of the driver's parts on this hardware [s]
    episode: int
    seed: int
    fingerprint: str  # expected one of the driver's bundle

    @property
    def row(self) -> Row:
        """The row's columns of the setting."""
        names = ("task", "pace", "idle", "hardware", "kappa", "link", "episode")
        row = {"lever": self.setting.lever, "strength": self.setting.strength}
        row |= {name: getattr(self, name) for name in names}
        if (execution := self.setting.driver.execution) is None:
            return row | {"execution": "pair", "overlap": 0, "execute": 0}
        return row | {"execution": execution.kind, "overlap": execution.overlap, "execute": execution.execute}

    def address(self, task: Task) -> dict[str, int]:
        """The environment's seed, and the address of all random streams."""
        start = episode_seed(self.seed, self.episode, task)
        return {"start": start, "seed": self.seed, "episode": self.episode}


@dataclass(frozen=True)
class PolicyDriver:
    """One policy: a flow, or one of a pair of action codes.

    Attributes:
        role: ``flow``, or the ``target`` of a pair; ``head`` is the learned gate's head as the draft.
        steps: Euler steps of a flow's inference.
        files: networks that replace its own, by part.
        window: observation history of a target's file; None for the pair's.
    """

    bundle: str
    execution: Execution
    role: PolicyRole = "flow"
    steps: int = 10
    files: tuple[tuple[str, str], ...] = ()
    window: int | None = None
    offloads: bool = False
    rate = None

    def build(self) -> ChunkPolicy:
        """The policy."""
        if self.role == "flow":
            return _flow(self.bundle, self.files).policy(self.steps)
        return _code_policy(self.bundle, self.role, dict(self.files).get("target"), self.window)

    @property
    def observation(self) -> ObservationSpec:
        """What it needs to see."""
        return self.build().spec.observation

    @property
    def fingerprint(self) -> str:
        """Of its bundle."""
        return (_flow(self.bundle, ()) if self.role == "flow" else _codes_parts(self.bundle)).fingerprint

    @property
    def parts(self) -> tuple[tuple[Driver, str], ...]:
        """An inference; with inpainting guidance a flow policy computes a gradient."""
        part = "inpainting" if self.execution.kind == "rtc" else "inference"
        return ((replace(self, execution=Execution("synchronous", 1), offloads=False), part),)

    @property
    def crossing(self) -> tuple[int, int] | None:
        """Bytes up and down the link; None where nothing crosses it."""
        return chunk_contract(self.build().spec).array_bytes

    def key(self, part: str) -> str:
        """Name of a part among the bundle's stored times."""
        variants = sorted({Path(file).parent.name for _, file in self.files})
        policy = f"{self.steps} steps" if self.role == "flow" else self.role
        return ", ".join([policy, *variants, *([part] if part != "inference" else [])])

    def call(self, part: str) -> Callable[[], object]:
        """One of its parts on an observation of zeros, to be timed."""
        policy, rng, guidance = self.build(), np.random.default_rng(0), None
        if part == "inpainting":
            shape = policy.spec.chunk, policy.spec.actions
            guidance = Inpainting(np.zeros(shape, np.float32), np.ones(policy.spec.chunk, np.float32))
        window = policy.spec.observation.zeros()
        return lambda: policy.infer(window, rng, guidance)

    def run(self, world: MovingWorld, trial: Trial, on_decision: OnDecision | None = None) -> Episode:
        """An episode in a moving world."""
        inference_s = sum(trial.latencies_s)
        latency: Callable[[float], float] | float = inference_s
        if trial.link != ON_BOARD and (crossing := self.crossing) is not None:
            rng = stream(trial.seed, Role.LINK, episode=trial.episode)
            latency = Route(load_link(trial.link), *crossing, rng).latency(inference_s)
        return run_episode(world, self.build(), self.execution, latency, **trial.address(world.task))


@dataclass(frozen=True)
class SplitDriver(PolicyDriver):
    """A pair's target alone, its first stages on a server, the others on the device: :mod:`specact.systems.roboecc`.

    Attributes:
        stages: folder of the target's stages.
        cut: stages that run on the server.
        precision: of activations on the link.
    """

    role: PolicyRole = "target"
    offloads: bool = True
    stages: str = ""
    cut: int = 0
    precision: Precision = "float16"

    def build(self) -> CodeChunks:
        pair, staged = _codes_parts(self.bundle), _staged(Path(self.stages))
        return CodeChunks(_Split(pair, staged, self), pair.tokenizer, pair.spec, pair.spec.target)

    @property
    def parts(self) -> tuple[tuple[Driver, str], ...]:
        return (self, "device"), (self, "server")

    @property
    def crossing(self) -> tuple[int, int] | None:
        spec = _staged(Path(self.stages)).spec
        return (spec.observation.nbytes, spec.reply_bytes(self.cut, self.precision)) if self.cut else None

    def key(self, part: str) -> str:
        return f"cut {self.cut}, {part}"

    def call(self, part: str) -> Callable[[], object]:
        staged, cut = _staged(Path(self.stages)), self.cut
        windows, last = [staged.spec.observation.zeros()], staged.spec.stages
        if cut == (0 if part == "server" else last):
            return lambda: None
        if cut in (0, last):
            return lambda: staged.run(windows)
        if part == "server":
            return lambda: staged.begin(windows, cut)
        activation = staged.begin(windows, cut)
        return lambda: staged.finish(activation, cut)


class _Split(CodePolicy):
    """The target in two parts, with activations quantised as on the link."""

    def __init__(self, pair: CodeParts, staged: StagedFolder, driver: SplitDriver) -> None:
        self._read, self._staged, self._driver = reader_of(pair.pair(), staged), staged, driver

    def infer_batch(self, windows: Sequence[Window]) -> list[CodeDistribution]:
        cut, precision = self._driver.cut, self._driver.precision
        return [self._read(self._staged.through(window, cut, precision), window, FIRST) for window in windows]


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
        """What it needs to see."""
        return self.load().observation

    @property
    def fingerprint(self) -> str:
        """Of its bundle."""
        return self.load().fingerprint

    @property
    def parts(self) -> tuple[tuple[Driver, str], ...]:
        """Of the gates a learned one alone takes time that counts, and late verdicts take none."""
        plain = replace(self, gate=GateSettings("never"), rate=None, late=False)
        gated = [(replace(plain, gate=self.gate), "gate")] * (self.gate.name in LEARNED)
        return (plain, "draft"), *gated, (plain, "target")

    def key(self, part: str) -> str:
        """Name of a part among the bundle's stored times."""
        return f"{self.source.decoding} {self.gate.name if part == 'gate' else part}".strip()

    def call(self, part: str) -> Callable[[], object]:
        """One of its parts on an observation of zeros, to be timed."""
        if part == "gate":
            return decision(self.gate.build(self.load()), self.load())
        return rollout_of(self.load(), HYBRID).call("draft" if part == "draft" else "target")

    def run(self, world: MovingWorld, trial: Trial, on_decision: OnDecision | None = None) -> Episode:
        """An episode in a moving world."""
        address = trial.address(world.task)
        return run_pair(world, self.load(), self.pairing(trial), on_decision=on_decision, **address)[0]

    def pairing(self, trial: Trial) -> Pairing:
        """The composition of an episode, with its times."""
        link = load_link("loopback" if trial.link == ON_BOARD else trial.link)
        *device_s, target_s = trial.latencies_s
        return Pairing(self.gate, link, sum(device_s), target_s, late_for_s=inf if self.late else None)


@dataclass(frozen=True)
class RoundsDriver(PairDriver):
    """A flow policy alone that checks its block's drafts, or reuses cached camera tokens.

    Its bundle has the block or the refresh that the ``rounds`` need, see :mod:`specact.systems.flash` and
    :mod:`specact.systems.freqcache`.
    """

    gate: GateSettings = ALWAYS
    rounds: Rounds = FULL
    offloads = False

    def load(self) -> Pair[Any]:
        return super().load().composed(rounds=self.rounds)

    @property
    def fingerprint(self) -> str:
        return _flow(self.bundle, ()).fingerprint

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of rounds that occur: with reused tokens, with an accepting check, with a failing one."""
        if isinstance(self.rounds, ReusingRounds):
            return "full", "reused"
        return ("full",) if self.rounds.proposes == "nothing" else ("full", "check", "failed")

    @property
    def parts(self) -> tuple[tuple[Driver, str], ...]:
        plain = replace(self, rounds=FULL)
        return tuple((self if kind == "reused" else plain, kind) for kind in self.kinds)

    def key(self, part: str) -> str:
        share = f" {self.rounds.reuse.most:g}" if isinstance(self.rounds, ReusingRounds) and part == "reused" else ""
        return f"round, {part}{share}"

    def call(self, part: str) -> Callable[[], object]:
        flow: FlowParts = self.load().parts
        check = Check(within=0.0 if part == "failed" else 1e9, guarded=False)
        request = RoundRequest(part in ("full", "reused"), check=check)
        answer = flow.target().answer(flow.policy.spec.observation.zeros(), FIRST)
        if part != "reused":
            return lambda: answer.round(request)
        rounds = self.rounds
        assert isinstance(rounds, ReusingRounds) and flow.refresh is not None, "checked by the lever"
        # Motion estimates of a blank image have no confidence.
        certain = replace(rounds, reuse=replace(rounds.reuse, confidence=0.0))
        cached = certain.cached(flow.policy.networks, flow.refresh)
        return lambda: replace(answer, cache=cached.cache(answer.window)).round(request)

    def duration_s(self, latencies_s: Sequence[float]) -> Callable[[Round], float]:
        """The duration of a round as a function of it, given the time of each kind [s].

        For partial reuse the time is interpolated linearly in the share.
        """
        rounds, times = self.rounds, dict(zip(self.kinds, latencies_s, strict=True))

        def seconds(round_: Round) -> float:
            if isinstance(rounds, ReusingRounds) and round_.reused_share > 0.0:
                return times["full"] + (times["reused"] - times["full"]) * round_.reused_share / rounds.reuse.most
            return times["full" if not round_.checked else "failed" if round_.full else "check"]

        return seconds

    def pairing(self, trial: Trial) -> Pairing:
        return Pairing(self.gate, round_s=self.duration_s(trial.latencies_s))


if TYPE_CHECKING:
    Driver: TypeAlias = PolicyDriver | PairDriver | RoundsDriver
else:
    Driver = Any  # msgspec, which checks settings, knows no unions of dataclasses


@cache
def _flow(bundle: str, parts: tuple[tuple[str, str], ...]) -> FlowBundle:
    return load_flow(bundle, variants={part: Path(file) for part, file in parts})


_pair, _staged = cache(load_pair), cache(load_staged)


def _codes_parts(bundle: str) -> CodeParts:
    return codes_of(_pair(PairSource(bundle)), "one policy of a pair alone")


@cache
def _code_policy(bundle: str, role: str, file: str | None, window: int | None) -> CodeChunks:
    pair = _codes_parts(bundle)
    if role == "head":
        return CodeChunks(HeadDraft(pair.draft, TargetHead.of(pair.pair())), pair.tokenizer, pair.spec, pair.spec.draft)
    seen = pair.target.observation if window is None else pair.target.observation.shortened(window)
    policy = pair.target if file is None else OnnxPolicy(Path(file), pair.spec, seen, words=pair.manifest.words)
    return CodeChunks(policy, pair.tokenizer, pair.spec, seen)
