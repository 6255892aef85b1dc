"""A bundle's manifest: its kind, its spec and the fingerprints of its files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from specact.errors import BundleError
from specact.files import is_name, read_at_most, write_json

FORMAT = 2
# Maximum size of a bundle's JSON files, and of its other files: a protocol buffer's limit.
MAX_JSON_BYTES, MAX_PART_BYTES = 1 << 24, (1 << 31) - 1
Kind = Literal["pair", "flow", "regression", "tokens", "drafters", "flash", "freqcache", "chunks", "split"]
KINDS: dict[Kind, str] = {
    "pair": "a pair of draft and target, which load_bundle reads",
    "flow": "a flow policy, which load_flow reads",
    "regression": "a policy by regression, a draft for specact pair",
    "tokens": "a token policy, which load_tokens reads",
    "drafters": "drafters of a token policy, which load_drafters reads",
    "flash": "the drafting block of a flow policy, which load_flash reads",
    "freqcache": "the refresh of a flow policy's prefix, which load_refresh reads",
    "chunks": "a pair of chunk policies, which load_pair reads",
    "split": "a target in stages, which specact split writes and specact serve serves",
}
# The part that a device does not need whose server has it.
LEFT_OUT: dict[Kind, str] = {"pair": "target", "tokens": "decoder"}
# Types of the entries of a manifest.
_ENTRIES: dict[type, tuple[str, ...]] = {
    str: ("name", "kind", "env", "head"),
    dict: (
        "spec",
        "fingerprints",
        "gates",
        "recipe",
        "policies",
        "training",
        "parity",
        "parameters",
        "distilled",
        "words",
        "target",
    ),
}
_TYPE_NAMES: dict[type, str] = {str: "a text", dict: "an object"}


class Describable(Protocol):
    """A spec."""

    def describe(self) -> dict[str, Any]:
        """As plain values."""
        ...


@dataclasses.dataclass(frozen=True)
class BundleFolder:
    """The base class of loaded bundles.

    Attributes:
        path: its folder.
        manifest: the whole manifest: recipe, training metrics, parity, fingerprints.
    """

    path: Path
    manifest: dict[str, Any]

    @property
    def source(self) -> str:
        """The path that it is loaded by."""
        return str(self.path)

    @property
    def name(self) -> str:
        return str(self.manifest["name"])

    @property
    def env(self) -> str:
        """Name of the environment it was trained for; empty if there was none."""
        return str(self.manifest["env"])

    @property
    def fingerprint(self) -> str:
        """Joint fingerprint of all parts; a calibration is valid for this fingerprint alone."""
        return joint_fingerprint(*self.manifest["fingerprints"].values())


def read_manifest(path: Path, kind: Kind, parts: Mapping[str, str]) -> dict[str, Any]:
    """The manifest of a bundle, after checking that its parts exist and match their fingerprints.

    Args:
        path: the bundle's folder.
        kind: required kind.
        parts: its files, by the name of the part.

    Raises:
        BundleError: if a part is missing or does not match, the manifest cannot be read, or the kind is another one.
    """
    manifest, file = _parsed(path), path / "manifest.json"
    found = _kind(manifest)
    if found != kind:
        holds = KINDS.get(found, f"of a kind that this version does not know, {found!r}")
        raise BundleError(f"the bundle {path} is {holds}; this needs {KINDS[kind]}")
    fingerprints = manifest["fingerprints"]
    unknown = parts.keys() - fingerprints.keys()
    if unknown:
        raise BundleError(f"{file} has no fingerprint of {', '.join(sorted(unknown))}; export the bundle again")
    if manifest["format"] != FORMAT:
        raise BundleError(
            f"the bundle {path} has format {manifest['format']!r:.20}, this version of specact reads {FORMAT}; "
            "export it again with this version"
        )
    for part, name in parts.items():
        if part not in left_out(manifest):
            _check_part(path / name, part, fingerprints[part])
    return manifest


def check_weights(source: str, found: str, wanted: str) -> None:
    """Refuses a bundle that differs from the one of that name in another process.

    Args:
        source: name or path.
        found, wanted: fingerprints.

    Raises:
        BundleError: if they differ.
    """
    if found != wanted:
        raise BundleError(f"{source} has fingerprint {found} here, and {wanted} where the work was given out; copy it")


def left_out(manifest: Mapping[str, Any]) -> Sequence[str]:
    """The parts that are missing in this copy of a bundle; its fingerprints are those of the complete bundle."""
    found: Sequence[str] = manifest.get("left_out", ())
    return found


def write_manifest(path: Path, manifest: dict[str, Any], spec: Describable, parts: Mapping[str, str]) -> None:
    """Adds format, spec and the fingerprints of the parts in ``path`` to a manifest, and writes it."""
    complete = {
        "format": FORMAT,
        **manifest,
        "spec": spec.describe(),
        "fingerprints": {part: fingerprint_of(path / file) for part, file in parts.items()},
    }
    write_json(path / "manifest.json", complete)


def kind_of(path: Path) -> Kind:
    """The kind of a bundle, from its manifest.

    Raises:
        BundleError: if the manifest cannot be read.
    """
    return _kind(_parsed(path))


def fingerprint_of(path: Path) -> str:
    """First 16 hex digits of the SHA-256 of a file's content.

    Raises:
        BundleError: if it cannot be read, or is too large.
    """
    return hashlib.sha256(read_part(path)).hexdigest()[:16]


def joint_fingerprint(*fingerprints: str) -> str:
    """The joint fingerprint of several parts, in this order."""
    return hashlib.sha256("".join(fingerprints).encode()).hexdigest()[:16]


def read_part(path: Path, most: int = MAX_PART_BYTES) -> bytes:
    """The content of a bundle's file.

    Raises:
        BundleError: if it cannot be read, or is larger than ``most`` bytes.
    """
    try:
        return read_at_most(path, most)
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}; copy the whole folder again") from None


def _kind(manifest: dict[str, Any]) -> Kind:
    kind: Kind = manifest.get("kind", "pair")  # manifests of pairs have no kind
    return kind


def _check_part(file: Path, part: str, wanted: str) -> None:
    if not file.is_file():
        raise BundleError(f"the bundle {file.parent} has no {file.name}; copy the whole folder, or export it again")
    found = fingerprint_of(file)
    if found != wanted:
        raise BundleError(
            f"{file} has fingerprint {found}, but the manifest was written for {wanted}: "
            f"the {part} is damaged or belongs to another bundle; copy the whole folder again"
        )


def _parsed(path: Path) -> dict[str, Any]:
    file = path / "manifest.json"
    try:
        if not file.exists():
            raise BundleError(
                f"{path} is not a bundle: it has no manifest.json; name the bundle's own folder, as in RUN/bundles/NAME"
            )
        manifest = json.loads(read_part(file, MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:  # invalid text, JSON or number; or too deep
        raise BundleError(f"{file} is not valid JSON ({error}); copy the bundle again") from None
    if not isinstance(manifest, dict):
        raise BundleError(f"{file} holds no JSON object; copy the bundle again, or export it again")
    missing = [key for key in ("format", "name", "env", "spec", "fingerprints") if key not in manifest]
    if missing:
        raise BundleError(f"{file} lacks {', '.join(missing)}; copy the bundle again, or export it again")
    for kind, keys in _ENTRIES.items():
        for key in keys:
            if key in manifest and not isinstance(manifest[key], kind):
                raise _invalid(file, key, _TYPE_NAMES[kind], manifest[key])
    if not is_name(manifest["name"]):
        raise _invalid(file, "name", "1 to 64 of the characters A-Z a-z 0-9 . _ + -", manifest["name"])
    for part, fingerprint in manifest["fingerprints"].items():
        if not isinstance(fingerprint, str):
            raise _invalid(file, f"fingerprint of {part}", "a text", fingerprint)
    allowed = [[part] for part in LEFT_OUT.values()]
    if manifest.get("left_out", allowed[0]) not in allowed:
        raise _invalid(file, "left_out", " or ".join(map(json.dumps, allowed)), manifest["left_out"])
    return manifest


def _invalid(file: Path, key: str, wanted: str, found: object) -> BundleError:
    return BundleError(
        f"the {key} in {file} must be {wanted}, but is {found!r:.60}; copy the bundle again, or export it again"
    )
