"""The target head: a small network on the device that estimates what the target would say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specact.errors import BundleError
from specact.policies.manifest import fingerprint_of
from specact.policies.onnx import open_session
from specact.policies.policy import PolicySpec
from specact.types import CodeDistribution, Floats, Window

HEAD = "gate.onnx"


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
        self._goal = spec.goal > 0
        made_for = self._session.get_modelmeta().custom_metadata_map.get("pair")
        if made_for != pair:
            raise BundleError(
                f"{path} was trained for the pair {made_for}, but the bundle beside it is {pair}; "
                f"train it again with: specact calibrate --bundle {path.parent} --gate learned --retrain"
            )
        wanted = {"state": [spec.window, spec.state], "draft_probs": [spec.codebooks, spec.codes]}
        if self._goal:
            wanted["goal"] = [spec.goal]
        found = {entry.name: entry.shape[1:] for entry in self._session.get_inputs()}
        if found != wanted:
            raise BundleError(f"{path} takes {found}, but the bundle's manifest says {wanted}: they do not fit")

    def estimate(self, window: Window, draft: CodeDistribution) -> Floats:
        """``p^``, ``[G, K]``."""
        inputs: dict[str, NDArray[np.float32]] = {
            "state": window.state[None],
            "draft_probs": draft.probs[None].astype(np.float32),
        }
        if self._goal and window.goal is not None:
            inputs["goal"] = window.goal[None]
        return np.asarray(self._session.run(None, inputs)[0][0], dtype=np.float64)
