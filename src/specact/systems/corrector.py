"""Corrector (after A2C2, arXiv 2509.23224): a small policy on the device brings a stale chunk up to date at every step.

The target answers an observation with a chunk c of H actions. At control step t the newest one, asked for at step s, is
k = t - s steps old: by the delay, and as no newer one was asked for. The device sees o_t, the target saw o_s::

    a_t = c[k] + b u,    u = f(o_t, c[k:], sin(2 pi k / H), cos(2 pi k / H)) in [-1, 1]^A      k < H
    a_t = g(o_t)         where there is no chunk: at the start, and in an outage longer than one
    score = rms(u) + w k / H,   ask if it is above the threshold                                gate ``staleness``

With f = 0 that is aligned execution, to the last bit. The bound b, by dimension, is how much the actions that were
learned from change within one step: it holds whatever the network says, so that no correction comes as a surprise.

A2C2 learns demonstrated actions on demonstrations, sees the action c[k] alone of the chunk, has no bound, and waits for
the first chunk. Ours learns what the target says *now*, in states that stale chunks lead to; f and g are one network,
from which the chunk was withheld in a share of the examples. The gate is ours. The controls are trained alike: the
draft g alone, an f whose observations are of other episodes, and one that knows the index k alone. Where the device
does not see what the target decides by, f guesses it, and can do harm; aligned execution is the control for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from specact.bundle.bundle import Bundle, open_bundle
from specact.bundle.manifest import joint_fingerprint
from specact.bundle.network import CPU, Compute, Network, NetworkInputs
from specact.errors import BundleError, ConfigError
from specact.families.chunks.pair import ChunkAnswers, Load
from specact.families.chunks.policy import FAMILY, ChunkExchange, ChunkPolicy, ChunkSpec, resized
from specact.families.chunks.sources import check_made_for, kind_of_source
from specact.gates.gate import Gate
from specact.observation import ObservationSpec, Window
from specact.pair import Answer, Follower, Pair, PairIdentity, PairSource, TargetVerifier
from specact.records import NotNegative, Positive, Record, check_fields, validated
from specact.rng import StepAddress
from specact.types import ActionUnits, Chunk, Origin, Outcome, Proposal, StepRecord, all_from, value

CORRECTOR_PARTS = {"corrector": "corrector.onnx"}


class CorrectorSpec(Record, frozen=True):
    """What a corrector was trained for.

    Attributes:
        target, chunks: fingerprint of the target, and its spec.
        observation: what the device sees.
        low, high: range of the target's actions, ``[A]``, in the environment's units; [-1, 1] in normalised ones.
        bound: b, ``[A]``, normalised.
        corrects, drafts: whether it has f, and whether it has g; without it the last action is held.
    """

    target: str
    chunks: ChunkSpec
    observation: ObservationSpec
    low: tuple[float, ...]
    high: tuple[float, ...]
    bound: tuple[Positive, ...]
    corrects: bool = True
    drafts: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if {len(self.low), len(self.high), len(self.bound)} != {self.chunks.actions}:
            raise ConfigError(f"low, high and bound must each have the {self.chunks.actions} numbers of an action")
        if not (self.corrects or self.drafts):
            raise ConfigError("a corrector corrects, drafts, or does both")


@value
class Correction:
    """How far an action is from the chunk's, rms(u) in [0, 1], and the chunk's age k / H; infinite without one."""

    size: float
    age: float


NO_CHUNK = Correction(math.inf, math.inf)


class CorrectorNetwork:
    """The module's f and g, ``[A]`` each; a network that does not fit the spec is a BundleError."""

    def __init__(self, file: Path, spec: CorrectorSpec, compute: Compute = CPU) -> None:
        chunk, actions = spec.chunks.chunk, spec.chunks.actions
        self._inputs = NetworkInputs(spec.observation)
        inputs = self._inputs.shapes | {"chunk": ("batch", chunk, actions), "index": ("batch", 3)}
        outputs = {"correction": ("batch", actions), "draft": ("batch", actions)}
        self._network = Network(file, inputs, outputs, compute)

    def run(self, window: Window, rest: Chunk, index: Chunk) -> tuple[Chunk, Chunk]:
        """From the newest window, :func:`rest_of` a chunk and its :func:`index_of`."""
        fed = self._inputs.stack([window]) | {"chunk": rest[None], "index": index[None]}
        correction, draft = self._network.run(fed)
        return correction[0], draft[0]


def rest_of(chunk: Chunk, age: int) -> Chunk:
    """``c[k:]``, the actions left of a chunk ``[H, A]``, as many rows by repeating the last one."""
    return resized(chunk[age:], len(chunk))


def index_of(age: int | None, length: int) -> Chunk:
    """``[1, sin(2 pi k / H), cos(2 pi k / H)]`` of the age k; zeros without a chunk."""
    if age is None:
        return np.zeros(3, np.float32)
    angle = 2.0 * math.pi * age / length
    return np.array([1.0, math.sin(angle), math.cos(angle)], np.float32)


class Corrector(Follower):
    """The :class:`~specact.pair.Drafter` of one robot: proposes the action of this control step, see the module.

    A chunk ages with each inference, and so not in a control step without a usable observation.
    """

    def __init__(self, network: Callable[[Window, Chunk, Chunk], tuple[Chunk, Chunk]], spec: CorrectorSpec) -> None:
        self._network, self._spec, self._bound = network, spec, np.array(spec.bound, np.float32)
        self._none = np.zeros((spec.chunks.chunk, spec.chunks.actions), np.float32)
        self.reset()

    def reset(self) -> None:
        # The target's newest chunk, at which step it was asked for, this step, and the last action.
        self._chunk, self._asked, self._step, self._last = self._none, -len(self._none), 0, self._none[0]

    def propose(self, window: Window, rng: np.random.Generator) -> Proposal:
        """The drafted action ``[1, A]``; its evidence is a :class:`Correction`."""
        spec, length, age = self._spec, len(self._none), self._step - self._asked
        seen = spec.observation.select(window)
        if spec.corrects and age < length:
            correction, _ = self._network(seen, rest_of(self._chunk, age), index_of(age, length))
            u = np.clip(correction, -1.0, 1.0)
            action = self._chunk[age] + self._bound * u
            return Proposal(window, action[None], Correction(float(np.sqrt(np.square(u).mean())), age / length))
        action = self._network(seen, self._none, index_of(None, length))[1] if spec.drafts else self._last
        return Proposal(window, action[None], NO_CHUNK)

    def on_action(self, drafted: Chunk, executed: Chunk) -> None:
        self._last = executed

    def on_inference(self, record: StepRecord) -> None:
        self._step = record.address.step + 1

    def on_verified(self, record: StepRecord) -> None:
        if record.outcome is not None:
            self._chunk, self._asked = record.outcome.evidence, record.address.step


class CorrectorVerifier(TargetVerifier[Chunk]):
    """The target's chunk in place of the proposal, which is ``kept`` if it is within b of the chunk's first action."""

    def __init__(self, target: Any, units: ActionUnits, bound: Chunk) -> None:
        super().__init__(target)
        self._units, self._bound = units, bound

    def judge(self, answer: Answer[Chunk], proposal: Proposal, address: StepAddress) -> Outcome:
        wanted = self._units.from_environment(answer.value)
        within = bool((np.abs(wanted[0] - proposal.actions[0]) <= self._bound).all())
        origins = all_from(Origin.REPLACED, len(wanted))
        return Outcome(wanted, origins, 1, int(within), answer.times, wanted, float(within))


class Staleness(Gate):
    """Asks where the correction has grown, the chunk is old, or there is none; ``age_weight`` is w of the module."""

    family = FAMILY

    @validated
    def __init__(self, threshold: float, *, age_weight: NotNegative = 1.0, **limits: Any) -> None:
        super().__init__(threshold, **limits)
        self.age_weight = age_weight

    @classmethod
    def for_pair(cls, pair: Any, threshold: float, **settings: Any) -> Staleness:
        if not isinstance(pair.parts, CorrectorParts):
            raise ConfigError(f"the gate 'staleness' is for a corrector, and {pair.name} is none; choose adahi")
        return cls(threshold, **settings)

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        correction: Correction = proposal.evidence
        # Without a chunk it is the largest one, of a correction at its bound and a chunk at its end.
        return min(correction.size, 1.0) + self.age_weight * min(correction.age, 1.0)


@dataclass(frozen=True)
class CorrectorParts(PairIdentity):
    """A corrector and its target, which is loaded on first use; ``load_target`` is None if it is on a server."""

    network: CorrectorNetwork
    spec: CorrectorSpec
    load_target: Callable[[], ChunkPolicy] | None

    @cached_property
    def target(self) -> ChunkPolicy:
        """The target as a chunk policy; raises BundleError where it is only on a server."""
        if self.load_target is None:
            raise BundleError(f"the target of {self.name} is not here; name it with --target, or connect to its server")
        return self.load_target()

    def pair(self) -> Pair[Chunk]:
        """As a pair; every control step is an inference."""
        spec, chunks = self.spec, self.spec.chunks
        units = ActionUnits.of_range(np.array(spec.low, np.float32), np.array(spec.high, np.float32))
        return Pair(
            **self.identity, observation=spec.observation.union(chunks.observation), units=units, execute=1,
            rate_hz=chunks.rate_hz, corrects=chunks.chunk if spec.corrects else 0, parts=self,
            drafter=lambda: Corrector(self.network.run, spec), target=lambda: ChunkAnswers(self.target),
            verifier=lambda target: CorrectorVerifier(target, units, np.array(spec.bound, np.float32)),
            exchange=ChunkExchange(chunks, self.name, spec.target, lambda: self.target, units),
        )  # fmt: skip


def load_corrector(path: Path, load: Load, named: PairSource, compute: Compute = CPU) -> Pair[Chunk]:
    """Loads a corrector's bundle as a pair; ``named.target`` takes the place of the target in its manifest.

    Raises:
        BundleError: if it is damaged, its network does not fit, or, on first use, the target is another one.
    """
    bundle: Bundle[CorrectorSpec] = open_bundle(path, "corrector", CorrectorSpec, CORRECTOR_PARTS)
    stored = bundle.manifest.sources.get("target")
    # A manifest is not trusted: importing a module would run its code.
    if stored is not None and kind_of_source(stored) not in ("part", "folder"):
        raise BundleError(f"{path} may name a bundle as its target, and no code; name the target with --target")
    source = named.target or stored

    def load_target() -> ChunkPolicy:
        loaded = load(source, compute=compute)
        check_made_for(bundle, loaded, "take that target, or train a corrector for this one with specact train")
        return loaded.policy

    return CorrectorParts(
        bundle.name, CorrectorNetwork(bundle.files["corrector"], bundle.spec, compute), bundle.spec,
        None if source is None else load_target, env=bundle.env, path=path, source=named,
        fingerprint=joint_fingerprint(bundle.spec.target, bundle.fingerprint),
    ).pair()  # fmt: skip
