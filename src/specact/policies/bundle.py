"""A bundle: the folder that is deployed. Tokenizer, draft, target, calibrations, and a manifest that ties them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from specact.errors import BundleError, unknown_name
from specact.files import write_json
from specact.policies.onnx import OnnxPolicy
from specact.policies.policy import PolicySpec
from specact.policies.tokenizer import ActionTokenizer

FORMAT = 1
PARTS = {"tokenizer": "tokenizer.safetensors", "draft": "draft.onnx", "target": "target.onnx"}

# Bundles that come with the package, and those of a source checkout.
_SHELVES = (Path(__file__).parents[1] / "pretrained", Path(__file__).parents[3] / "pretrained")


@dataclass(frozen=True)
class Bundle:
    """A loaded bundle.

    Attributes:
        path: its folder.
        manifest: the whole manifest: recipe, training metrics, parity, fingerprints.
        spec: what its parts agree on.
        tokenizer, draft, target: the parts.
    """

    path: Path
    manifest: dict[str, Any]
    spec: PolicySpec
    tokenizer: ActionTokenizer
    draft: OnnxPolicy
    target: OnnxPolicy

    @property
    def name(self) -> str:
        return str(self.manifest["name"])

    @property
    def env(self) -> str:
        """Name of the environment the policies were trained for."""
        return str(self.manifest["env"])

    @property
    def recommended_gates(self) -> dict[str, Any]:
        """Choices for the gates that serve this pair well, see :class:`~specact.gates.settings.GateChoices`."""
        return dict(self.manifest.get("gates", {}))

    @property
    def fingerprint(self) -> str:
        """Of all three parts together: what a calibration has to have been made for."""
        return hashlib.sha256("".join(self.manifest["fingerprints"].values()).encode()).hexdigest()[:16]


def load_bundle(name_or_path: str | Path, *, provider: str = "CPUExecutionProvider", threads: int = 1) -> Bundle:
    """Loads a bundle and refuses parts that do not fit together.

    Args:
        name_or_path: a folder, or the name of a bundle that comes with the package, such as ``ball``.
        provider, threads: see :class:`~specact.policies.onnx.OnnxPolicy`.

    Raises:
        BundleError: if a part is missing, damaged, or not the one the manifest was written for.
        ConfigError: if there is no bundle of that name, or no such execution provider.
    """
    path = find_bundle(name_or_path)
    manifest = _read_manifest(path)
    for part, file in PARTS.items():
        if not (path / file).is_file():
            raise BundleError(f"the bundle {path} has no {file}; copy the whole folder, or export it again")
        found, wanted = fingerprint_of(path / file), manifest["fingerprints"][part]
        if found != wanted:
            raise BundleError(
                f"{path / file} has fingerprint {found}, but the manifest was written for {wanted}: "
                f"the {part} is damaged or belongs to another bundle; copy the whole folder again"
            )
    spec = _read_spec(path, manifest)
    return Bundle(
        path=path,
        manifest=manifest,
        spec=spec,
        tokenizer=_read_tokenizer(path, manifest, spec),
        draft=OnnxPolicy(path / PARTS["draft"], spec, provider=provider, threads=threads),
        target=OnnxPolicy(path / PARTS["target"], spec, provider=provider, threads=threads),
    )


def find_bundle(name_or_path: str | Path) -> Path:
    """The folder of a bundle given by path or by name.

    Raises:
        ConfigError: if there is none; the message names those that exist.
    """
    path = Path(name_or_path)
    if (path / "manifest.json").is_file() or path.is_dir():
        return path
    shelved = {found.name: found for shelf in _SHELVES if shelf.is_dir() for found in sorted(shelf.iterdir())}
    if str(name_or_path) in shelved:
        return shelved[str(name_or_path)]
    raise unknown_name("bundle", str(name_or_path), shelved)


def fingerprint_of(path: Path) -> str:
    """First 16 hex digits of the SHA-256 of a file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def write_manifest(path: Path, manifest: dict[str, Any], spec: PolicySpec) -> None:
    """Completes a manifest with format, spec and fingerprints of the parts in ``path`` and writes it."""
    complete = {
        "format": FORMAT,
        **manifest,
        "spec": dataclasses.asdict(spec),
        "fingerprints": {part: fingerprint_of(path / file) for part, file in PARTS.items()},
    }
    write_json(path / "manifest.json", complete)


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / "manifest.json"
    try:
        manifest = json.loads(file.read_text())
    except FileNotFoundError:
        raise BundleError(
            f"{path} is not a bundle: it has no manifest.json; name the bundle's own folder, as in RUN/bundles/NAME"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BundleError(f"{file} is not valid JSON ({error}); copy the bundle again") from None
    if not isinstance(manifest, dict):
        raise BundleError(f"{file} holds no JSON object; copy the bundle again, or export it again")
    missing = [key for key in ("format", "name", "env", "spec", "fingerprints") if key not in manifest]
    if missing:
        raise BundleError(f"{file} lacks {', '.join(missing)}; copy the bundle again, or export it again")
    unknown = PARTS.keys() - manifest["fingerprints"].keys() if isinstance(manifest["fingerprints"], dict) else PARTS
    if unknown:
        raise BundleError(f"{file} has no fingerprint of {', '.join(sorted(unknown))}; export the bundle again")
    if manifest["format"] != FORMAT:
        raise BundleError(
            f"the bundle {path} has format {manifest['format']}, this version of specact reads {FORMAT}; "
            "export it again with this version"
        )
    return dict(manifest)


def _read_spec(path: Path, manifest: dict[str, Any]) -> PolicySpec:
    try:
        return PolicySpec(**manifest["spec"] | {"image": tuple(manifest["spec"]["image"] or ()) or None})
    except (TypeError, KeyError) as error:
        raise BundleError(f"the manifest of {path} has no usable spec ({error}); export the bundle again") from None


def _read_tokenizer(path: Path, manifest: dict[str, Any], spec: PolicySpec) -> ActionTokenizer:
    file = path / PARTS["tokenizer"]
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise BundleError(f"{file} is damaged ({error}); copy the bundle again") from None
    shape = (spec.codes**spec.codebooks, spec.chunk, spec.actions)
    if "table" not in tensors or tensors["table"].shape != shape:
        raise BundleError(f"{file} holds no decoder table of shape {shape}: it does not belong to this bundle")
    return ActionTokenizer(
        tensors["table"].astype(np.float32),
        tensors["centre"],
        tensors["scale"],
        manifest["fingerprints"]["tokenizer"],
        spec.codes,
    )
