"""The head of a learned gate: a small network on the device, in a file of the pair's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnxruntime

from specact.errors import BundleError, ConfigError
from specact.families.codes.network import open_session
from specact.files import write_json, write_whole
from specact.pair import LoadedPair
from specact.runtime.manifest import fingerprint_of

HEAD = "gate.onnx"


def head_file(pair: LoadedPair[Any]) -> Path:
    """The file of the pair's head.

    Raises:
        ConfigError: if the pair has none.
    """
    file = None if pair.path is None else pair.path / HEAD
    if file is None or not file.is_file():
        raise ConfigError(
            f"{pair.name!r} has no learned gate; train one with: specact calibrate --bundle {pair.source} "
            "--gate learned, with --offline where there is no simulator"
        )
    return file


def head_fingerprint(pair: LoadedPair[Any]) -> str:
    """The fingerprint of the pair's head.

    Raises:
        ConfigError: if the pair has none.
    """
    return fingerprint_of(head_file(pair))


def check_calibrated_head(pair: LoadedPair[Any], weights: str) -> None:
    """Refuses a threshold that was calibrated for another head than the pair's.

    Raises:
        BundleError: if the fingerprint is not the head's.
        ConfigError: if the pair has none.
    """
    found = head_fingerprint(pair)
    if found != weights:
        raise BundleError(
            f"{head_file(pair)} has fingerprint {found}, but the gate was calibrated for {weights}; "
            f"calibrate again with: specact calibrate --bundle {pair.source} --gate learned"
        )


def open_head(path: Path, pair: str, inputs: Mapping[str, list[int]]) -> onnxruntime.InferenceSession:
    """A session for a head.

    Args:
        path: the file.
        pair: fingerprint of the pair that it must have been trained for, as stored in the file.
        inputs: required inputs: shapes without the batch, by name.

    Raises:
        BundleError: if the file is no ONNX model, has other inputs, or was trained for another pair.
    """
    session = open_session(path, "CPUExecutionProvider", threads=1)
    again = f"train it again with: specact calibrate --bundle {path.parent} --gate learned --retrain"
    made_for = session.get_modelmeta().custom_metadata_map.get("pair")
    if made_for != pair:
        raise BundleError(f"{path} was trained for the pair {made_for}, but the bundle beside it is {pair}; {again}")
    found = {entry.name: entry.shape[1:] for entry in session.get_inputs()}
    if found != dict(inputs):
        raise BundleError(
            f"{path} takes {found}, but the bundle's manifest says {dict(inputs)}: they do not match; {again}"
        )
    return session


def check_head(path: Path, manifest: Mapping[str, Any]) -> None:
    """Refuses a bundle with a head whose fingerprint is not in its manifest; a bundle may have no head.

    The head is not part of the pair's fingerprint: training one does not affect handshakes or calibrations of other
    gates.

    Raises:
        BundleError: if the fingerprint differs, or the manifest has none.
    """
    file, wanted = path / HEAD, manifest.get("head")
    if file.is_file() and (found := fingerprint_of(file)) != wanted:
        named = f"was written for {wanted}" if wanted else "names none"
        raise BundleError(
            f"{file} has fingerprint {found}, but the manifest {named}: copy the whole bundle again, or remove that "
            f"file and train it with: specact calibrate --bundle {path} --gate learned"
        )


def give_head(path: Path, head: Path) -> None:
    """Adds a head to a bundle's folder and its fingerprint to the manifest; a kill in between leaves no head."""
    file, manifest = path / "manifest.json", json.loads((path / "manifest.json").read_text())
    (path / HEAD).unlink(missing_ok=True)
    write_json(file, manifest | {"head": fingerprint_of(head)})
    write_whole(path / HEAD, head.read_bytes())
