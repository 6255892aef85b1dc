"""Heads of learned gates: small networks on the device, in a file of the pair's folder.

The head of a pair of action codes estimates the target's distribution; that of chunks, tokens and flows estimates how
far the target's actions are. A head knows the pair and the decoding that it was trained for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from specact.bundle.bundle import HEAD
from specact.bundle.manifest import fingerprint_of
from specact.bundle.network import Network, NetworkInputs, Shapes
from specact.errors import BundleError, ConfigError
from specact.families.codes.policy import CodePolicy, PolicySpec
from specact.families.codes.sampling import CodeDistribution
from specact.observation import ObservationSpec, Window
from specact.pair import Pair
from specact.types import Chunk, Floats

# Folder of a pair's folder in which heads are trained.
TRAINING = "gate"


def head_file(pair: Pair[Any]) -> Path:
    """The file of the pair's head.

    Raises:
        ConfigError: if the pair has none.
    """
    file = None if pair.path is None else pair.path / HEAD
    if file is None or not file.is_file():
        raise ConfigError(
            f"{pair.name!r} has no learned gate; train one with: {calibrate_command(pair)}, or with specact offline "
            "calibrate where there is no simulator"
        )
    return file


def calibrate_command(pair: Pair[Any], gate: str = "learned") -> str:
    """The command that calibrates a gate of a pair, with the draft, target and decoding that it was loaded with."""
    return f"specact calibrate {pair.source.cli_args} --gate {gate}"


def head_fingerprint(pair: Pair[Any]) -> str:
    """The fingerprint of the pair's head.

    Raises:
        ConfigError: if the pair has none.
    """
    return fingerprint_of(head_file(pair))


def has_fitting_head(pair: Pair[Any]) -> bool:
    """Whether the pair has a head that was trained for it, as it was loaded."""
    file = None if pair.path is None else pair.path / HEAD
    return file is not None and file.is_file() and _trained_for(Network(file)) == TrainedFor.of(pair)


def check_calibrated_head(pair: Pair[Any], weights: str) -> None:
    """Refuses a threshold that was calibrated for another head than the pair's.

    Raises:
        BundleError: if the fingerprint is not the head's.
        ConfigError: if the pair has none.
    """
    found = head_fingerprint(pair)
    if found != weights:
        raise BundleError(
            f"{head_file(pair)} has fingerprint {found}, but the gate was calibrated for {weights}; calibrate again "
            f"with: {calibrate_command(pair)}"
        )


@dataclass(frozen=True)
class TrainedFor:
    """What a head was trained for, as stored in its file.

    Attributes:
        pair: fingerprint of the pair.
        decoding: of a token or flow policy, whose drafts it judges; empty for the default.
    """

    pair: str
    decoding: str = ""

    @classmethod
    def of(cls, pair: Pair[Any]) -> TrainedFor:
        """For a pair as it was loaded."""
        return cls(pair.fingerprint, pair.source.decoding)


def _trained_for(network: Network) -> TrainedFor:
    return TrainedFor(network.metadata.get("pair", ""), network.metadata.get("decoding", ""))


def open_head(path: Path, wanted: TrainedFor, inputs: Shapes, outputs: Shapes, command: str) -> Network:
    """A head.

    Args:
        path: the file.
        wanted: what it must have been trained for.
        inputs, outputs: of the network.
        command: trains another one.

    Raises:
        BundleError: if the file is no ONNX model, has other inputs, or was trained for another pair or decoding.
    """
    again = f"train it again with: {command} --retrain"
    network = Network(path, inputs, outputs, repair=again)
    found = _trained_for(network)
    if found.pair != wanted.pair:
        raise BundleError(
            f"{path} was trained for the pair {found.pair}, but the bundle beside it is {wanted.pair}; {again}"
        )
    if found != wanted:
        trained, asked = (repr(one.decoding) if one.decoding else "of default" for one in (found, wanted))
        raise BundleError(f"{path} was trained on drafts of the decoding {trained}, not of {asked}; {again}")
    return network


H = TypeVar("H")


@cache
def _load(kind: Callable[..., H], file: Path, weights: str, *arguments: Any) -> H:
    """``weights`` is part of the cache key, since a file can be overwritten with another head."""
    return kind(file, *arguments)


def load_head(pair: Pair[Any]) -> TargetHead:
    """The head of a pair of action codes. Robots of one process share its session, which is stateless.

    Raises:
        ConfigError: if the pair has none.
        BundleError: if it does not fit the pair.
    """
    file, parts, made = head_file(pair), pair.parts, (TrainedFor.of(pair), calibrate_command(pair))
    head: TargetHead = _load(TargetHead, file, fingerprint_of(file), parts.spec, parts.draft.inputs, *made)
    return head


def load_distance_head(pair: Pair[Any]) -> DistanceHead:
    """The head of any other pair, see :func:`load_head`."""
    file, drafted = head_file(pair), (pair.execute, len(pair.units.centre))
    made = TrainedFor.of(pair), calibrate_command(pair)
    head: DistanceHead = _load(DistanceHead, file, fingerprint_of(file), head_observation(pair), drafted, *made)
    return head


class TargetHead:
    """Estimates the target's distribution from the window and the draft's.

    Args:
        path: the ``.onnx`` file, next to the draft's.
        spec: of the bundle it belongs to; the file's inputs and output are checked against it.
        seen: the draft's network inputs, which are also the head's.
        wanted, command: see :func:`open_head`.

    Attributes:
        fingerprint: of the file.

    Raises:
        BundleError: if the file is no ONNX model, does not fit the spec, or was made for another pair.
    """

    def __init__(self, path: Path, spec: PolicySpec, seen: NetworkInputs, wanted: TrainedFor, command: str) -> None:
        self._inputs = seen
        probs = ("batch", spec.codebooks, spec.codes)
        self._network = open_head(path, wanted, seen.shapes | {"draft_probs": probs}, {"target_probs": probs}, command)
        self.fingerprint = fingerprint_of(path)

    def estimate(self, window: Window, draft: CodeDistribution) -> Floats:
        """``p^``, ``[G, K]``."""
        estimate: Floats = self.estimate_batch([window], [draft])[0]
        return estimate

    def estimate_batch(self, windows: Sequence[Window], drafts: Sequence[CodeDistribution]) -> Floats:
        """``p^`` of several windows in one pass, ``[B, G, K]``."""
        inputs = self._inputs.stack(windows)
        inputs["draft_probs"] = np.stack([draft.probs for draft in drafts]).astype(np.float32)
        return np.asarray(self._network.run(inputs)[0], dtype=np.float64)


class HeadDraft:
    """A :class:`~specact.families.codes.policy.CodePolicy` that drafts from the head's estimate of the target.

    Codes are sampled from ``p^`` instead of ``q``, with the draft's offsets. It shows what the head contributes without
    a gate. Verified with ``p^`` in place of ``q``, the codes follow the target's distribution exactly.

    Args:
        draft: its offsets are used, and its distribution is an input of the head.
        head: estimates the target's distribution; ``p^`` is a distribution for heads that were trained on it.
    """

    def __init__(self, draft: CodePolicy, head: TargetHead) -> None:
        self._draft, self._head = draft, head

    def infer(self, window: Window) -> CodeDistribution:
        return self.infer_batch([window])[0]

    def infer_batch(self, windows: Sequence[Window]) -> list[CodeDistribution]:
        drafts = self._draft.infer_batch(windows)
        estimates = self._head.estimate_batch(windows, drafts)
        # Rows sum to 1 only up to single precision.
        estimates /= estimates.sum(axis=-1, keepdims=True)
        return [CodeDistribution(probs, draft.offsets) for probs, draft in zip(estimates, drafts, strict=True)]


def head_observation(pair: Pair[Any]) -> ObservationSpec | None:
    """What a head sees: the draft's observations without camera frames, without a draft the target's; None if none."""
    seeing = pair.parts.draft or pair.parts.policy
    vectors: ObservationSpec | None = seeing.spec.observation.vectors
    return vectors


class DistanceHead:
    """Estimates the distance between the drafted and the target's actions.

    Args:
        path: the ``.onnx`` file.
        observation: see :func:`head_observation`.
        drafted: shape of the drafted actions that it reads, the executed ones of a chunk.
        wanted, command: see :func:`open_head`.

    Raises:
        BundleError: if the file is no ONNX model, does not fit the pair, or was made for another one.
    """

    def __init__(
        self,
        path: Path,
        observation: ObservationSpec | None,
        drafted: tuple[int, int],
        wanted: TrainedFor,
        command: str,
    ) -> None:
        self._observation, self._execute = observation, drafted[0]
        seen = {} if observation is None else NetworkInputs(observation).shapes
        inputs = seen | {"drafted": ("batch", *drafted)}
        self._network = open_head(path, wanted, inputs, {"distance": ("batch",)}, command)

    def estimate(self, window: Window, actions: Chunk) -> float:
        """The expected root mean square over the action's dimensions, mean over the actions that are executed.

        Args:
            window: with at least the observations that the head sees.
            actions: drafted, ``[n, A]``, normalised.
        """
        inputs = {} if self._observation is None else self._observation.stack([window])
        inputs["drafted"] = np.ascontiguousarray(actions[None, : self._execute])
        return float(self._network.run(inputs)[0][0])
