"""The target head: a small network on the device that estimates what the target would say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specact.errors import BundleError, ConfigError
from specact.families.codes.network import open_session
from specact.families.codes.spec import CodePolicy, PolicySpec
from specact.families.codes.values import CodeDistribution
from specact.files import write_json, write_whole
from specact.observation import Window
from specact.runtime.manifest import fingerprint_of
from specact.types import Floats

if TYPE_CHECKING:
    from specact.families.codes.bundle import Bundle

HEAD = "gate.onnx"


def head_fingerprint(bundle: Bundle) -> str:
    """Of the bundle's target head.

    Raises:
        ConfigError: if the bundle has none.
    """
    if not (bundle.path / HEAD).is_file():
        raise ConfigError(
            f"the bundle {bundle.name!r} has no learned gate; train one with: "
            f"specact calibrate --bundle {bundle.path} --gate learned"
        )
    return fingerprint_of(bundle.path / HEAD)


def load_head(bundle: Bundle) -> TargetHead:
    """The bundle's target head. Robots of one process share the session; it keeps no state.

    Raises:
        ConfigError: if the bundle has none.
        BundleError: if it does not fit the bundle.
    """
    return _load_head(bundle.path / HEAD, bundle.spec, bundle.fingerprint, head_fingerprint(bundle))


@cache
def _load_head(path: Path, spec: PolicySpec, pair: str, weights: str) -> TargetHead:
    """``weights`` tells two heads apart that were one after the other in the same file."""
    return TargetHead(path, spec, pair)


class TargetHead:
    """Estimates the target's distribution from the window and the draft's.

    Args:
        path: the ``.onnx`` file, next to the draft's.
        spec: of the bundle it belongs to; the file's inputs and output are checked against it.
        pair: fingerprint of that bundle; it is written in the file.

    Attributes:
        fingerprint: of the file.

    Raises:
        BundleError: if the file is no ONNX model, does not fit the spec, or was made for another pair.
    """

    def __init__(self, path: Path, spec: PolicySpec, pair: str) -> None:
        self._session = open_session(path, "CPUExecutionProvider", threads=1)
        self.fingerprint = fingerprint_of(path)
        self._observation = spec.draft.vectors
        made_for = self._session.get_modelmeta().custom_metadata_map.get("pair")
        if made_for != pair:
            raise BundleError(
                f"{path} was trained for the pair {made_for}, but the bundle beside it is {pair}; "
                f"train it again with: specact calibrate --bundle {path.parent} --gate learned --retrain"
            )
        seen = {} if self._observation is None else self._observation.shapes
        wanted = seen | {"draft_probs": [spec.codebooks, spec.codes]}
        found = {entry.name: entry.shape[1:] for entry in self._session.get_inputs()}
        if found != wanted:
            raise BundleError(
                f"{path} takes {found}, but the bundle's manifest says {wanted}: they do not match; train it again "
                f"with: specact calibrate --bundle {path.parent} --gate learned --retrain"
            )

    def estimate(self, window: Window, draft: CodeDistribution) -> Floats:
        """``p^``, ``[G, K]``."""
        estimate: Floats = self.estimate_batch([window], [draft])[0]
        return estimate

    def estimate_batch(self, windows: Sequence[Window], drafts: Sequence[CodeDistribution]) -> Floats:
        """``p^`` of several windows in one pass, ``[B, G, K]``."""
        inputs = {} if self._observation is None else self._observation.stack(windows)
        inputs["draft_probs"] = np.stack([draft.probs for draft in drafts]).astype(np.float32)
        return np.asarray(self._session.run(None, inputs)[0], dtype=np.float64)


class HeadDraft:
    """A :class:`~specact.families.codes.spec.CodePolicy` that proposes what the head expects of the target.

    Codes come from ``p^`` instead of ``q``, with the draft's offsets for them: what the head's capacity is worth
    without any gate. Verified with ``p^`` in the place of ``q``, they follow the target's distribution as exactly as
    any others.

    Args:
        draft: gives the offsets, and the distribution that the head sees.
        head: estimates the target's distribution; ``p^`` is a distribution for heads that were trained on it.
    """

    def __init__(self, draft: CodePolicy, head: TargetHead) -> None:
        self._draft, self._head = draft, head

    def infer(self, window: Window) -> CodeDistribution:
        return self.infer_batch([window])[0]

    def infer_batch(self, windows: Sequence[Window]) -> list[CodeDistribution]:
        drafts = self._draft.infer_batch(windows)
        estimates = self._head.estimate_batch(windows, drafts)
        # Networks answer in single precision: the rows sum to 1 only up to that.
        estimates /= estimates.sum(axis=-1, keepdims=True)
        return [CodeDistribution(probs, draft.offsets) for probs, draft in zip(estimates, drafts, strict=True)]


def check_head(path: Path, manifest: Mapping[str, Any]) -> None:
    """Refuses a bundle whose target head is not the one that its manifest names; it need not have one.

    The head is no part of the pair's fingerprint: what a server compares, and calibrations of other gates, stay as they
    are when a head is trained.

    Raises:
        BundleError: if the file is another, or the manifest names none.
    """
    file, wanted = path / HEAD, manifest.get("head")
    if file.is_file() and (found := fingerprint_of(file)) != wanted:
        named = f"was written for {wanted}" if wanted else "names none"
        raise BundleError(
            f"{file} has fingerprint {found}, but the manifest {named}: copy the whole bundle again, or remove that "
            f"file and train it with: specact calibrate --bundle {path} --gate learned"
        )


def give_head(path: Path, head: Path) -> None:
    """Puts a target head into a bundle's folder and names it in the manifest; a kill in between leaves none."""
    file, manifest = path / "manifest.json", json.loads((path / "manifest.json").read_text())
    (path / HEAD).unlink(missing_ok=True)
    write_json(file, manifest | {"head": fingerprint_of(head)})
    write_whole(path / HEAD, head.read_bytes())
