"""Learned gates and their heads: small networks on the device, in a file of the pair's folder.

The head of a pair of action codes estimates the target's distribution; that of chunks, tokens and flows estimates how
far the target's actions are. A head knows the pair and the decoding that it was trained for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from specact.bundle.bundle import HEAD
from specact.bundle.manifest import fingerprint_of
from specact.bundle.network import Network, NetworkInputs, Shapes
from specact.errors import BundleError, ConfigError
from specact.families.codes.policy import CodePolicy
from specact.families.codes.sampling import CodeDistribution
from specact.gates.codes import RejectionGate
from specact.gates.gate import Gate
from specact.observation import ObservationSpec, Window
from specact.pair import Pair
from specact.types import Chunk, Floats, Proposal

# Folder of a pair's folder in which heads are trained.
TRAINING = "gate"


def head_file(pair: Pair[Any]) -> Path | None:
    """The file of the pair's head, if it has one."""
    file = None if pair.path is None else pair.path / HEAD
    return file if file is not None and file.is_file() else None


def calibrate_command(pair: Pair[Any], gate: str = "learned") -> str:
    """The command that calibrates a gate of a pair, with the draft, target and decoding that it was loaded with."""
    return f"specact calibrate {pair.source.cli_args} --gate {gate}"


def head_fingerprint(pair: Pair[Any]) -> str:
    """The fingerprint of the pair's head; ConfigError if it has none."""
    file = head_file(pair)
    if file is None:
        raise ConfigError(
            f"{pair.name!r} has no learned gate; train one with: {calibrate_command(pair)}, or with specact offline "
            "calibrate where there is no simulator"
        )
    return fingerprint_of(file)


def trained_for(pair: Pair[Any]) -> dict[str, str]:
    """What a head of a pair as it was loaded is trained for, the metadata of its file: ``pair``, ``decoding``.

    That is the fingerprint, and the decoding of a token or flow policy, empty for the default.
    """
    return {"pair": pair.fingerprint, "decoding": pair.source.decoding}


def has_fitting_head(pair: Pair[Any]) -> bool:
    """Whether the pair has a head that was trained for it, as it was loaded."""
    file, wanted = head_file(pair), trained_for(pair)
    return file is not None and wanted == {name: Network(file).metadata.get(name, "") for name in wanted}


class Head:
    """A head in a pair's folder.

    Raises:
        BundleError: if its file is no ONNX model, has other inputs or outputs, or was trained for another pair or
            decoding.
        ConfigError: if the pair has none.
    """

    _loaded: ClassVar[dict[tuple[Any, ...], Any]] = {}

    def __init__(self, pair: Pair[Any], inputs: Shapes, outputs: Shapes) -> None:
        file = Path(pair.path or ".") / HEAD
        repair = f"train it again with: {calibrate_command(pair)} --retrain"
        self._network = Network(file, inputs, outputs, repair=repair)
        for name, wanted in trained_for(pair).items():
            value = self._network.metadata.get(name, "")
            if value != wanted:
                raise BundleError(
                    f"{file} was trained for the {name} {value or 'default'!r}, but the bundle beside it was loaded "
                    f"with the {name} {wanted or 'default'!r}; {repair}"
                )

    @classmethod
    def of(cls, pair: Pair[Any], weights: str | None = None) -> Self:
        """The pair's head, whose fingerprint must be ``weights``; robots of one process share its stateless session.

        Raises:
            BundleError: as of the class, or if a threshold was calibrated for another head.
        """
        digest = head_fingerprint(pair)
        if weights not in (None, digest):
            raise BundleError(
                f"{head_file(pair)} has fingerprint {digest}, but the gate was calibrated for {weights}; calibrate "
                f"again with: {calibrate_command(pair)}"
            )
        # A file can be overwritten with another head.
        key = cls, pair.path, digest, *trained_for(pair).values(), pair.execute
        if key not in cls._loaded:
            cls._loaded[key] = cls(pair)  # type: ignore[call-arg]
        head: Self = cls._loaded[key]
        return head


class TargetHead(Head):
    """Estimates the target's distribution from the window and the draft's, for a pair of action codes."""

    def __init__(self, pair: Pair[Any]) -> None:
        spec, self._inputs = pair.parts.spec, pair.parts.draft.inputs
        probs = ("batch", spec.codebooks, spec.codes)
        super().__init__(pair, self._inputs.shapes | {"draft_probs": probs}, {"target_probs": probs})

    def estimate(self, window: Window, draft: CodeDistribution) -> Floats:
        """``p^``, ``[G, K]``."""
        estimate: Floats = self.estimate_batch([window], [draft])[0]
        return estimate

    def estimate_batch(self, windows: Sequence[Window], drafts: Sequence[CodeDistribution]) -> Floats:
        """``p^`` of several windows in one pass, ``[B, G, K]``."""
        inputs = self._inputs.stack(windows)
        inputs["draft_probs"] = np.stack([draft.probs for draft in drafts]).astype(np.float32)
        return np.asarray(self._network.run(inputs)[0], dtype=np.float64)


class HeadDraft(CodePolicy):
    """Drafts from a head's estimate ``p^`` of the target.

    Codes are sampled from ``p^`` instead of ``q``, with the draft's offsets. It shows what the head contributes without
    a gate. Verified with ``p^`` in place of ``q``, the codes follow the target's distribution exactly.
    """

    def __init__(self, draft: CodePolicy, head: TargetHead) -> None:
        self._draft, self._head = draft, head

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


class DistanceHead(Head):
    """Estimates the distance between the drafted and the target's actions, for any other pair."""

    def __init__(self, pair: Pair[Any]) -> None:
        self._observation, self._execute = head_observation(pair), pair.execute
        seen = {} if self._observation is None else NetworkInputs(self._observation).shapes
        drafted = ("batch", pair.execute, len(pair.units.centre))
        super().__init__(pair, seen | {"drafted": drafted}, {"distance": ("batch",)})

    def estimate(self, window: Window, actions: Chunk) -> float:
        """The expected root mean square over the action's dimensions, mean over the actions that are executed.

        The window has at least the observations that the head sees; the drafted actions are ``[n, A]``, normalised.
        """
        inputs = {} if self._observation is None else self._observation.stack([window])
        inputs["drafted"] = np.ascontiguousarray(actions[None, : self._execute])
        return float(self._network.run(inputs)[0][0])


class Learned(RejectionGate):
    """Asks where rejection is likely by a head's estimate ``p^`` of the target's distribution.

    ``R^(z) = 1 - prod_k min(1, p^_k(z_k) / q_k(z_k))``, which is exact if ``p^`` equals the target's distribution. For
    ``action_change`` the codes are decoded with the draft's offsets, since the target's are unknown.
    """

    def __init__(self, threshold: float, *, head: TargetHead, **settings: Any) -> None:
        super().__init__(threshold, **settings)
        self._head = head

    @classmethod
    def for_pair(cls, pair: Any, threshold: float, **settings: Any) -> Gate:
        return super().for_pair(pair, threshold, head=TargetHead.of(pair, settings.pop("weights")), **settings)

    def target(self, proposal: Proposal) -> CodeDistribution:
        draft = proposal.evidence.draft
        return CodeDistribution(self._head.estimate(proposal.window, draft), draft.offsets)


class LearnedDistance(Gate):
    """Transmits if a head estimates a large distance between the target's and the drafted actions."""

    family = "chunks"

    def __init__(self, threshold: float, *, head: DistanceHead, **limits: Any) -> None:
        super().__init__(threshold, **limits)
        self._head = head

    @classmethod
    def for_pair(cls, pair: Any, threshold: float, **settings: Any) -> Gate:
        return cls(threshold, head=DistanceHead.of(pair, settings.pop("weights")), **settings)

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        return self._head.estimate(proposal.window, proposal.actions)
