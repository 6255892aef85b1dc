"""The target head: a small network on the device that estimates what the target would say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import BundleError
from specact.files import write_json, write_whole
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
