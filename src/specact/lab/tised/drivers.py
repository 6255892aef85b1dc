"""The policies of a sweep, as plain values from which a worker process builds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np

from specact.clock import RealClock
from specact.families.chunks.bundle import FlowBundle, load_flow
from specact.families.chunks.codes import CodeChunks
from specact.families.chunks.policy import ChunkPolicy, Inpainting
from specact.families.codes.bundle import Bundle
from specact.families.codes.head import HeadDraft, load_head
from specact.families.codes.network import OnnxPolicy
from specact.families.codes.values import CodeDistribution
from specact.families.flash.check import Check
from specact.families.flash.pair import FlashPair, flash_pair
from specact.families.flash.rounds import Rounds
from specact.families.flash.verify import Round, RoundRequest
from specact.families.freqcache.cached import FreqCached, Reuse
from specact.families.load import AnyPair, load_named, of_codes
from specact.families.staged.stages import StagedFolder, load_staged
from specact.families.staged.wire import Precision, pack, reply_bytes, unpack
from specact.gates.settings import GateSettings
from specact.lab.rollout.rollout import check_weights
from specact.observation import ObservationSpec, Window
from specact.pair import AS_STORED, Named
from specact.placement.target import code_reader
from specact.rng import StepAddress
from specact.verification import LocalTarget


@dataclass(frozen=True)
class FlowDriver:
    """A flow policy.

    Attributes:
        bundle: path of a flow bundle.
        steps: Euler steps of an inference.
        parts: networks that replace the bundle's own, by part, see
            :func:`~specact.families.chunks.bundle.load_flow`.
    """

    bundle: str
    steps: int = 10
    parts: tuple[tuple[str, str], ...] = ()

    def build(self) -> ChunkPolicy:
        """The policy; drivers of one process share the networks."""
        return _flow(self.bundle, self.parts).policy(self.steps)


@dataclass(frozen=True)
class CodesDriver:
    """One policy of a pair, alone.

    Attributes:
        bundle: path of the pair.
        role: which of the two; or ``head``, the learned gate's head as the draft.
        file: of a network that replaces its own, or None.
        window: observation history of that network; None for the pair's.
    """

    bundle: str
    role: Literal["draft", "target", "head"] = "target"
    file: str | None = None
    window: int | None = None

    def build(self) -> ChunkPolicy:
        """The policy; drivers of one process share the network."""
        return _codes(self)


@dataclass(frozen=True)
class PairDriver:
    """A pair with a gate.

    Attributes:
        bundle: path of the pair, of whatever family.
        gate: calibrated, unless a rate is given.
        rate: for which a sweep calibrates the gate at every place; None for a calibrated gate.
        late: whether the draft's chunk runs at once and the late verdict corrects the rest.
        named: draft, target and decoding of the pair.
    """

    bundle: str
    gate: GateSettings
    rate: float | None = None
    late: bool = False
    named: Named = AS_STORED

    def load(self) -> AnyPair:
        """The pair; drivers of one process share it."""
        return _pair(self.bundle, self.named)


@dataclass(frozen=True)
class PairSide:
    """One side of a pair, for timing."""

    driver: PairDriver
    role: Literal["draft", "target"]

    def call(self) -> Callable[[], object]:
        """A proposal and the gate's decision, or the proposal's verification, on an observation of zeros."""
        pair, clock, address = self.driver.load(), RealClock(), StepAddress(0, 0, 0, 0)
        drafter, gate, rng = pair.drafter, self.driver.gate.build(pair), np.random.default_rng(0)
        window = pair.observation.zeros()
        proposal = drafter.propose(window, rng)
        verifier = pair.verifier(LocalTarget(pair.target, clock))
        if self.role == "draft":
            return lambda: gate.decide(drafter.propose(window, rng), rng)
        return lambda: verifier.submit(proposal, address).result()


@dataclass(frozen=True)
class SplitDriver:
    """A pair's target alone, its first stages on a server and the others on the device, see :mod:`specact.placement`.

    Attributes:
        bundle: path of the pair.
        stages: folder of the target's stages.
        cut: stages that run on the server.
        precision: of activations on the link.
    """

    bundle: str
    stages: str
    cut: int
    precision: Precision = "float16"

    def build(self) -> CodeChunks:
        """The policy, with activations quantised as on the link; drivers of one process share the networks."""
        pair, staged = _codes_pair(self.bundle), _staged(self.stages)
        return CodeChunks(_Split(pair, staged, self), pair.tokenizer, pair.spec, pair.spec.target)

    @property
    def crossing(self) -> tuple[int, int]:
        """Bytes up and down the link."""
        spec = _staged(self.stages).spec
        return spec.observation.nbytes, reply_bytes(spec, self.cut, self.precision)


class _Split:
    def __init__(self, pair: Bundle, staged: StagedFolder, driver: SplitDriver) -> None:
        self._read, self._staged, self._driver = code_reader(pair, staged), staged, driver

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
class SplitSide:
    """The stages on one side of a cut, for timing."""

    driver: SplitDriver
    side: Literal["device", "server"]

    def call(self) -> Callable[[], object]:
        """These stages on an observation of zeros."""
        staged, cut = _staged(self.driver.stages), self.driver.cut
        network, windows = staged.network, [staged.spec.observation.zeros()]
        if cut == (0 if self.side == "server" else staged.spec.stages):
            return lambda: None
        if cut in (0, staged.spec.stages):
            return lambda: network.run(windows)
        if self.side == "server":
            return lambda: network.begin(windows, cut)
        activation = network.begin(windows, cut)
        return lambda: network.finish(activation, cut)


RoundKind = Literal["full", "reused", "check", "failed"]


@dataclass(frozen=True)
class RoundsDriver:
    """A flow policy that checks its block's drafts, or reuses cached camera tokens.

    Attributes:
        bundle: path of a flow bundle, with the block or the refresh that the rounds need.
        rounds: see :mod:`specact.families.flash` and :mod:`specact.families.freqcache`.
    """

    bundle: str
    rounds: Rounds

    def load(self) -> FlashPair:
        """The pair; drivers of one process share its networks."""
        return replace(_rounds(self.bundle), rounds=self.rounds)

    @property
    def kinds(self) -> tuple[RoundKind, ...]:
        """The kinds of rounds that occur."""
        if self.rounds.reuse is not None:
            return "full", "reused"
        return ("full",) if self.rounds.proposes == "nothing" else ("full", "check", "failed")

    def round_duration(self, latencies_s: Sequence[float]) -> Callable[[Round, float], float]:
        """The duration of a round as a function of it and its reused share, given the time of each kind [s].

        For partial reuse the time is interpolated linearly in the share.
        """
        reuse, times = self.rounds.reuse, dict(zip(self.kinds, latencies_s, strict=True))

        def seconds(round_: Round, share: float) -> float:
            if reuse is not None and share > 0.0:
                return times["full"] + (times["reused"] - times["full"]) * share / reuse.most
            return times["full" if not round_.checked else "failed" if round_.full else "check"]

        return seconds


@dataclass(frozen=True)
class RoundCall:
    """A round of one kind, for timing: full, with reused tokens, with an accepting check, or with a failing one."""

    bundle: str
    kind: RoundKind
    reuse: Reuse | None = None

    def call(self) -> Callable[[], object]:
        """One such round on an observation of zeros."""
        pair = _rounds(self.bundle)
        target, parts = pair.target, None
        if self.kind == "reused":
            assert self.reuse is not None and pair.refresh is not None, "checked by the lever"
            # Motion estimates of a blank image have no confidence.
            parts = FreqCached(pair.policy.networks, pair.refresh, replace(self.reuse, confidence=0.0))
        check = Check(within=0.0 if self.kind == "failed" else 1e9, guarded=False)
        question = RoundRequest(self.kind in ("full", "reused"), check=check, parts=parts)
        answer = target.answer(target.policy.spec.observation.zeros(), StepAddress(0, 0, 0, 0))
        return lambda: answer.round(question)


Driver = FlowDriver | CodesDriver | PairDriver | SplitDriver | RoundsDriver


def observation_spec_of(driver: Driver) -> ObservationSpec:
    """The observations that a driver needs."""
    if isinstance(driver, PairDriver | RoundsDriver):
        return driver.load().observation
    return driver.build().spec.observation


def check_bundle(driver: Driver, fingerprint: str) -> None:
    """Checks the fingerprint of a driver's bundle.

    Raises:
        BundleError: if it is another one.
    """
    if isinstance(driver, PairDriver):
        actual = driver.load().fingerprint
    elif isinstance(driver, FlowDriver | RoundsDriver):
        actual = _flow(driver.bundle, ()).fingerprint
    else:
        actual = _pair(driver.bundle, AS_STORED).fingerprint
    check_weights(driver.bundle, actual, fingerprint)


def driver_of(bundle: Bundle | FlowBundle, steps: int = 10) -> FlowDriver | CodesDriver:
    """The policy of a bundle as it is: the flow, in so many Euler steps, or the pair's target."""
    path = str(bundle.path)
    return FlowDriver(path, steps) if isinstance(bundle, FlowBundle) else CodesDriver(path)


def inference(driver: FlowDriver | CodesDriver, *, inpainting: bool = False) -> Callable[[], object]:
    """One inference at batch 1 on an observation of zeros, to be timed.

    Args:
        driver: its policy.
        inpainting: guide towards a chunk of zeros, which makes a flow policy compute a gradient.
    """
    policy = driver.build()
    spec, rng = policy.spec, np.random.default_rng(0)
    window = spec.observation.zeros()
    guidance = None
    if inpainting:
        guidance = Inpainting(np.zeros((spec.chunk, spec.actions), np.float32), np.ones(spec.chunk, np.float32))
    return lambda: policy.infer(window, rng, guidance)


@cache
def _flow(bundle: str, parts: tuple[tuple[str, str], ...]) -> FlowBundle:
    return load_flow(bundle, variants={part: Path(file) for part, file in parts})


@cache
def _staged(folder: str) -> StagedFolder:
    return load_staged(Path(folder))


@cache
def _rounds(bundle: str) -> FlashPair:
    return flash_pair(load_flow(bundle))


@cache
def _pair(bundle: str, named: Named) -> AnyPair:
    return load_named(bundle, named)


def _codes_pair(bundle: str) -> Bundle:
    return of_codes(_pair(bundle, AS_STORED), "one policy of a pair alone")


@cache
def _codes(driver: CodesDriver) -> CodeChunks:
    pair = _codes_pair(driver.bundle)
    if driver.role == "head":
        return CodeChunks(HeadDraft(pair.draft, load_head(pair)), pair.tokenizer, pair.spec, pair.spec.draft)
    network = pair.target if driver.role == "target" else pair.draft
    seen = network.observation if driver.window is None else network.observation.shortened(driver.window)
    policy = network if driver.file is None else OnnxPolicy(Path(driver.file), pair.spec, seen, words=pair.words)
    return CodeChunks(policy, pair.tokenizer, pair.spec, seen)
