"""The head of a learned gate: a small network on the device, in a file of the pair's folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specact.bundle.bundle import HEAD
from specact.bundle.manifest import fingerprint_of
from specact.bundle.network import Network, Shapes
from specact.errors import BundleError, ConfigError
from specact.pair import Pair

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
