"""Corrector (after A2C2, arXiv 2509.23224): a small policy on the device brings a stale chunk up to date at every step.

The target answers an observation with a chunk c of H actions. At control step t the newest one, asked for at step s, is
k = t - s steps old: by the delay, and as no newer one was asked for. o is what the device sees, of now and of then::

    a_t = c[k] + b[k] u,   u = f(o_t, o_s, c, c[k], sin(2 pi k / H), cos(2 pi k / H)) in [-1, 1]^A      k < H
    a_t = g(o_t)           where there is no chunk: at the start, and in an outage longer than one
    score = rms(u) + w k / H,   ask if it is above the threshold                                gate ``staleness``

With f = 0 that is aligned execution, to the last bit. The bound b ``[H, A]`` is how much the target itself changed its
mind within k steps, in the rollouts that were learned from: it holds whatever the network says.

A2C2 learns demonstrated actions on demonstrations, sees o_t and c[k] alone, has no bound, and waits for the first
chunk. Ours learns what the target says *now*, in states that stale chunks lead to; f and g are one network, from which
the chunk was withheld in a share of the examples. o_s costs nothing: with c it tells where the target wanted to go,
also where the device cannot see that, and what has come otherwise since. The gate is ours. The controls are trained
alike: the draft g alone, and an f of the ``newest`` observation, without o_s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.bundle.bundle import Bundle, open_bundle
from specact.bundle.manifest import joint_fingerprint
from specact.bundle.network import CPU, Compute, Network, NetworkInputs
from specact.errors import BundleError, ConfigError
from specact.families.chunks.pair import ChunkAnswers, Load
from specact.families.chunks.policy import FAMILY, ChunkExchange, ChunkPolicy, ChunkSpec
from specact.families.chunks.sources import load_stored
from specact.gates.gate import Gate
from specact.observation import Field, ObservationSpec, Window
from specact.pair import Answer, Follower, Pair, PairIdentity, PairSource, TargetVerifier
from specact.records import NotNegative, Positive, Record, check_fields, validated
from specact.rng import StepAddress
from specact.types import ActionUnits, Chunk, Origin, Outcome, Proposal, StepRecord, all_from, value

CORRECTOR_PARTS = {"corrector": "corrector.onnx"}
Arrays = Mapping[str, NDArray[Any]]


class CorrectorSpec(Record, frozen=True):
    """What a corrector was trained for.

    Attributes:
        target, chunks: fingerprint of the target, and its spec.
        observation: what the device sees.
        low, high: range of the target's actions, ``[A]``, in the environment's units; [-1, 1] in normalised ones.
        bound: b, ``[H, A]``, normalised.
        corrects, drafts: whether it has f, and whether it has g; without it the last action is held.
    """

    target: str
    chunks: ChunkSpec
    observation: ObservationSpec
    low: tuple[float, ...]
    high: tuple[float, ...]
    bound: tuple[tuple[Positive, ...], ...]
    corrects: bool = True
    drafts: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        length, actions = self.chunks.chunk, self.chunks.actions
        if {len(self.low), len(self.high), *map(len, self.bound)} != {actions} or len(self.bound) != length:
            raise ConfigError(f"low, high and each of {length} bounds must have the {actions} numbers of an action")
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
        self._inputs = NetworkInputs(ObservationSpec(doubled(spec.observation.fields)))
        inputs = self._inputs.shapes | {"chunk": ("batch", 1 + chunk, actions), "index": ("batch", 3)}
        outputs = {"correction": ("batch", actions), "draft": ("batch", actions)}
        self._network = Network(file, inputs, outputs, compute)

    def run(self, windows: Window, chunk: Chunk, age: Chunk) -> tuple[Chunk, Chunk]:
        """``u`` and ``g``: from o_s and o_t, :func:`joined`, a :func:`base` and the :func:`age_features`."""
        inputs = self._inputs.stack([windows]) | {"chunk": chunk[None], "index": age[None]}
        correction, draft = self._network.run(inputs)
        return correction[0], draft[0]


def doubled(fields: Mapping[str, Field]) -> dict[str, Field]:
    """The fields of two windows that are :func:`joined`."""
    return {name: replace(field, history=2 * max(1, field.history)) for name, field in fields.items()}


def joined(earlier: Arrays, current: Arrays, fields: Mapping[str, Field]) -> dict[str, NDArray[Any]]:
    """Two windows as one, ``[..., 2 T, *shape]``, the earlier first; T is 1 for a field without a history."""
    windows = {}
    for name, field in fields.items():
        axis, pair = -1 - len(field.shape), (earlier[name], current[name])
        windows[name] = np.concatenate(pair, axis) if field.history else np.stack(pair, axis)
    return windows


def base(chunk: Chunk, age: int) -> Chunk:
    """``[c[k], c[0], ..., c[H - 1]]``: the action for now, before the whole chunk ``[H, A]``."""
    return np.concatenate([chunk[age : age + 1], chunk])


def age_features(age: int | None, length: int) -> Chunk:
    """``[1, sin(2 pi k / H), cos(2 pi k / H)]`` of the age k; zeros without a chunk."""
    if age is None:
        return np.zeros(3, np.float32)
    angle = 2.0 * math.pi * age / length
    return np.array([1.0, math.sin(angle), math.cos(angle)], np.float32)


Run = Callable[[Window, Chunk, Chunk], tuple[Chunk, Chunk]]


def corrected(
    run: Run, spec: CorrectorSpec, chunk: Chunk, age: int, earlier: Arrays, current: Arrays
) -> tuple[Chunk, Chunk]:
    """``a_t`` and ``u``, both ``[A]``, of a chunk ``[H, A]`` that is ``age < H`` steps old; all normalised."""
    windows = Window(joined(earlier, current, spec.observation.fields))
    correction, _ = run(windows, base(chunk, age), age_features(age, len(chunk)))
    u = np.clip(correction, -1.0, 1.0)
    return chunk[age] + np.array(spec.bound[age], np.float32) * u, u


class Corrector(Follower):
    """The :class:`~specact.pair.Drafter` of one robot: proposes the action of this control step, see the module.

    A chunk ages with each inference, and so not in a control step without a usable observation.
    """

    def __init__(self, network: Run, spec: CorrectorSpec) -> None:
        self._network, self._spec = network, spec
        self._zeros = np.zeros((spec.chunks.chunk, spec.chunks.actions), np.float32)
        self.reset()

    def reset(self) -> None:
        # This step t and the last action; the newest chunk c, the step s of its request and its observation o_s.
        self._step, self._last = 0, self._zeros[0]
        self._chunk, self._requested = self._zeros, -len(self._zeros)
        self._earlier: Arrays = {}

    def propose(self, window: Window, rng: np.random.Generator) -> Proposal:
        """The drafted action ``[1, A]``; its evidence is a :class:`Correction`."""
        spec, length, age = self._spec, len(self._zeros), self._step - self._requested
        current = spec.observation.select(window).arrays
        if spec.corrects and age < length:
            action, u = corrected(self._network, spec, self._chunk, age, self._earlier, current)
            return Proposal(window, action[None], Correction(float(np.sqrt(np.square(u).mean())), age / length))
        action = self._last
        if spec.drafts:
            windows = Window(joined(current, current, spec.observation.fields))
            _, action = self._network(windows, base(self._zeros, 0), age_features(None, length))
        return Proposal(window, action[None], NO_CHUNK)

    def on_action(self, drafted: Chunk, executed: Chunk) -> None:
        self._last = executed

    def on_inference(self, record: StepRecord) -> None:
        self._step = record.address.step + 1

    def on_verified(self, record: StepRecord) -> None:
        if record.outcome is not None:
            self._chunk, self._requested = record.outcome.evidence, record.address.step
            self._earlier = self._spec.observation.select(record.proposal.window).arrays


class CorrectorVerifier(TargetVerifier[Chunk]):
    """The target's chunk in place of the proposal, ``kept`` if its first action is within ``bound [A]`` of that."""

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
        tolerance = np.array(spec.bound[:2][-1], np.float32)  # of a chunk that is a step old
        return Pair(
            **self.identity, observation=spec.observation.union(chunks.observation), units=units, execute=1,
            rate_hz=chunks.rate_hz, corrects=chunks.chunk if spec.corrects else 0, parts=self,
            drafter=lambda: Corrector(self.network.run, spec), target=lambda: ChunkAnswers(self.target),
            verifier=lambda target: CorrectorVerifier(target, units, tolerance),
            exchange=ChunkExchange(chunks, self.name, spec.target, lambda: self.target, units),
        )  # fmt: skip


def load_corrector(path: Path, load: Load, named: PairSource, compute: Compute = CPU) -> Pair[Chunk]:
    """Loads a corrector's bundle as a pair; ``named.target`` takes the place of the target in its manifest.

    Raises:
        BundleError: if it is damaged, its network does not fit, or, on first use, the target is another one.
    """
    bundle: Bundle[CorrectorSpec] = open_bundle(path, "corrector", CorrectorSpec, CORRECTOR_PARTS)
    repair = "take that target, or train a corrector for this one with specact train"
    load_target = partial(
        load_stored, bundle, "target", named.target, load, bundle.spec.target, repair, compute=compute
    )
    known = named.target or bundle.manifest.sources.get("target")
    return CorrectorParts(
        bundle.name, CorrectorNetwork(bundle.files["corrector"], bundle.spec, compute), bundle.spec,
        load_target if known else None, env=bundle.env, path=path, source=named,
        fingerprint=joint_fingerprint(bundle.spec.target, bundle.fingerprint),
    ).pair()  # fmt: skip
