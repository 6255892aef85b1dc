"""The head of a learned gate: a small network on the device, in a file of the pair's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime

from specact.errors import BundleError, ConfigError
from specact.families.codes.network import open_session
from specact.files import write_json, write_whole
from specact.pair import LoadedPair, Named
from specact.runtime.manifest import fingerprint_of

HEAD = "gate.onnx"
# Folder of a pair's folder in which heads are trained.
TRAINING = "gate"


def head_file(pair: LoadedPair[Any]) -> Path:
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


def calibrate_command(pair: LoadedPair[Any], gate: str = "learned") -> str:
    """The command that calibrates a gate of a pair, with the draft, target and decoding that it was loaded with."""
    return f"specact calibrate {pair.source}{Named.of(pair).words} --gate {gate}"


def head_fingerprint(pair: LoadedPair[Any]) -> str:
    """The fingerprint of the pair's head.

    Raises:
        ConfigError: if the pair has none.
    """
    return fingerprint_of(head_file(pair))


def has_fitting_head(pair: LoadedPair[Any]) -> bool:
    """Whether the pair has a head that was trained for it, as it was loaded."""
    file = None if pair.path is None else pair.path / HEAD
    return file is not None and file.is_file() and _trained_for(_session(file)) == TrainedFor.of(pair)


def check_calibrated_head(pair: LoadedPair[Any], weights: str) -> None:
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
    def of(cls, pair: LoadedPair[Any]) -> TrainedFor:
        """For a pair as it was loaded."""
        return cls(pair.fingerprint, Named.of(pair).decoding)


def _session(path: Path) -> onnxruntime.InferenceSession:
    return open_session(path, "CPUExecutionProvider", threads=1)


def _trained_for(session: onnxruntime.InferenceSession) -> TrainedFor:
    stored = session.get_modelmeta().custom_metadata_map
    return TrainedFor(stored.get("pair", ""), stored.get("decoding", ""))


def open_head(
    path: Path, wanted: TrainedFor, inputs: Mapping[str, list[int]], command: str
) -> onnxruntime.InferenceSession:
    """A session for a head.

    Args:
        path: the file.
        wanted: what it must have been trained for.
        inputs: required inputs: shapes without the batch, by name.
        command: trains another one.

    Raises:
        BundleError: if the file is no ONNX model, has other inputs, or was trained for another pair or decoding.
    """
    session = _session(path)
    again = f"train it again with: {command} --retrain"
    found = _trained_for(session)
    if found.pair != wanted.pair:
        raise BundleError(
            f"{path} was trained for the pair {found.pair}, but the bundle beside it is {wanted.pair}; {again}"
        )
    if found != wanted:
        trained, asked = (repr(one.decoding) if one.decoding else "of default" for one in (found, wanted))
        raise BundleError(f"{path} was trained on drafts of the decoding {trained}, not of {asked}; {again}")
    taken = {entry.name: entry.shape[1:] for entry in session.get_inputs()}
    if taken != dict(inputs):
        raise BundleError(
            f"{path} takes {taken}, but the bundle's manifest says {dict(inputs)}: they do not match; {again}"
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
            f"file and train it with: specact calibrate {path} --gate learned"
        )


def give_head(path: Path, head: Path) -> None:
    """Adds a head to a bundle's folder and its fingerprint to the manifest; a kill in between leaves no head."""
    file, manifest = path / "manifest.json", json.loads((path / "manifest.json").read_text())
    (path / HEAD).unlink(missing_ok=True)
    write_json(file, manifest | {"head": fingerprint_of(head)})
    write_whole(path / HEAD, head.read_bytes())
