"""Who drives a robot in the moving world, in plain values from which a worker process builds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np

from specact.families.chunks.bundle import FlowBundle, load_flow
from specact.families.chunks.codes import CodeChunks
from specact.families.chunks.policy import ChunkPolicy, Inpainting
from specact.families.codes.bundle import Bundle, load_bundle
from specact.families.codes.head import HeadDraft, load_head
from specact.families.codes.network import OnnxPolicy
from specact.families.flash.check import Check
from specact.families.flash.pair import FlashPair, flash_pair
from specact.families.flash.rounds import ROUNDS
from specact.families.flash.verify import Question
from specact.gates.settings import GateSettings
from specact.observation import ObservationSpec
from specact.rng import StepAddress
from specact.runtime.manifest import check_weights


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
        window: observations that network looks at; None for as many as the pair.
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
        bundle: path of the pair.
        gate: calibrated, unless a rate is given.
        rate: what a sweep calibrates the gate for, at every place where it runs; None for a gate that is ready.
        late: whether the draft's chunk runs at once and the verdict corrects the rest when it arrives.
    """

    bundle: str
    gate: GateSettings
    rate: float | None = None
    late: bool = False

    def load(self) -> Bundle:
        """The pair; drivers of one process share it."""
        return _pair(self.bundle)


@dataclass(frozen=True)
class RoundsDriver:
    """A flow policy that checks what its block drafts, see :mod:`specact.families.flash`.

    Attributes:
        bundle: path of a flow bundle that has a block.
        within: delta of the check, at the share of noise that was fitted to the target; 0 for full rounds alone.
    """

    bundle: str
    within: float

    def load(self) -> FlashPair:
        """The pair; drivers of one process share its networks."""
        rounds = replace(ROUNDS["flash_fitted"], within=self.within) if self.within else ROUNDS["full"]
        return replace(_rounds(self.bundle), rounds=rounds)


@dataclass(frozen=True)
class RoundOfKind:
    """What a round of one kind is measured with: a full one, a check that accepts, or one that fails."""

    bundle: str
    kind: Literal["full", "check", "failed"]

    def call(self) -> Callable[[], object]:
        """One such round on an observation of zeros."""
        target = _rounds(self.bundle).target
        check = Check(within=0.0 if self.kind == "failed" else 1e9, guarded=False)
        question = Question(self.kind == "full", check=check)
        asked = target.answer(target.policy.spec.observation.zeros(), StepAddress(0, 0, 0, 0))
        return lambda: asked.round(question)


Driver = FlowDriver | CodesDriver | PairDriver | RoundsDriver


def looks_at(driver: Driver) -> ObservationSpec:
    """The observations of what drives."""
    if isinstance(driver, PairDriver | RoundsDriver):
        return driver.load().observation
    return driver.build().spec.observation


def check_bundle(driver: Driver, fingerprint: str) -> None:
    """Refuses a driver's bundle where another one is meant.

    Raises:
        BundleError: if it has another fingerprint.
    """
    flows = isinstance(driver, FlowDriver | RoundsDriver)
    bundle = _flow(driver.bundle, ()) if flows else _pair(driver.bundle)
    check_weights(driver.bundle, bundle.fingerprint, fingerprint)


def driver_of(bundle: Bundle | FlowBundle, steps: int = 10) -> FlowDriver | CodesDriver:
    """The policy of a bundle as it is: the flow, in so many Euler steps, or the pair's target."""
    path = str(bundle.path)
    return FlowDriver(path, steps) if isinstance(bundle, FlowBundle) else CodesDriver(path)


def inference(driver: FlowDriver | CodesDriver, *, inpainting: bool = False) -> Callable[[], object]:
    """One inference at batch 1 on an observation of zeros, to be timed.

    Args:
        driver: whose.
        inpainting: guided towards a chunk of zeros, which costs a flow policy its gradient.
    """
    policy = driver.build()
    spec, rng = policy.spec, np.random.default_rng(0)
    window = spec.observation.zeros()
    given = None
    if inpainting:
        given = Inpainting(np.zeros((spec.chunk, spec.actions), np.float32), np.ones(spec.chunk, np.float32))
    return lambda: policy.infer(window, rng, given)


@cache
def _flow(bundle: str, parts: tuple[tuple[str, str], ...]) -> FlowBundle:
    return load_flow(bundle, variants={part: Path(file) for part, file in parts})


@cache
def _rounds(bundle: str) -> FlashPair:
    return flash_pair(load_flow(bundle))


@cache
def _pair(bundle: str) -> Bundle:
    return load_bundle(bundle)


@cache
def _codes(driver: CodesDriver) -> CodeChunks:
    pair = _pair(driver.bundle)
    if driver.role == "head":
        return CodeChunks(HeadDraft(pair.draft, load_head(pair)), pair.tokenizer, pair.spec, pair.spec.draft)
    own = pair.target if driver.role == "target" else pair.draft
    seen = own.observation if driver.window is None else own.observation.shortened(driver.window)
    policy = own if driver.file is None else OnnxPolicy(Path(driver.file), pair.spec, seen, words=pair.words)
    return CodeChunks(policy, pair.tokenizer, pair.spec, seen)
