"""A bundle, the folder that is deployed: networks, tensors, calibrations, and a manifest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from specact.bundle.manifest import (
    KINDS,
    LEFT_OUT,
    MANIFEST,
    Kind,
    Manifest,
    digest_of,
    joint_fingerprint,
    read_manifest,
    weights_of,
)
from specact.bundle.network import Shape, fits
from specact.bundle.vetting import remember, try_out, vet
from specact.errors import BundleError, ConfigError, unknown_name
from specact.files import write_json, write_whole
from specact.records import read_record

S = TypeVar("S")

# File of a learned gate's head.
HEAD = "gate.onnx"
# Bundles that come with the package, and those of a source checkout.
_CHECKOUT = Path(__file__).parents[3] / "pretrained"
_SHELVES = (Path(__file__).parents[1] / "pretrained", _CHECKOUT)
_NOT_IN_CHECKOUT = _CHECKOUT / "absent.json"


@dataclass(frozen=True)
class Bundle(Generic[S]):
    """A bundle's folder, whose files are those that its manifest was written for, and the spec of its kind.

    ``files`` are those of each part that is here; a part that it shares lies in another bundle's folder.
    """

    path: Path
    manifest: Manifest
    spec: S
    files: Mapping[str, Path]

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def env(self) -> str:
        """Name of the environment it was made for; empty if there was none."""
        return self.manifest.env

    @property
    def fingerprint(self) -> str:
        """Joint fingerprint of all parts; a calibration is valid for this fingerprint alone."""
        return joint_fingerprint(*self.manifest.fingerprints.values())

    def tensors(self, part: str, wanted: Mapping[str, tuple[type[np.generic], Shape]]) -> dict[str, NDArray[Any]]:
        """The arrays of a part by name, of a dtype and shape; a named size is one number, wherever it stands.

        Raises:
            BundleError: if the file is damaged, or an array is missing, has another dtype or shape, or is not finite.
        """
        file, sizes = self.files[part], dict[str, int]()
        try:
            arrays: dict[str, NDArray[Any]] = load_file(file)
        except (SafetensorError, OSError, TypeError, KeyError) as error:  # the last two for dtypes that NumPy lacks
            raise BundleError(f"{file} is damaged ({error}); copy the bundle again") from None
        for name, (dtype, shape) in wanted.items():
            array = arrays.get(name)
            if array is None or array.dtype != dtype or not fits(array.shape, shape, sizes) or not array.size:
                held = "none" if array is None else f"{array.dtype} {list(array.shape)}"
                raise BundleError(
                    f"{file} must hold {name} as {np.dtype(dtype)} {list(shape)}, and holds {held}: it does not belong "
                    "to this bundle; copy the bundle again"
                )
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise BundleError(f"{file} holds {name} with NaN or infinite numbers; export the bundle again")
        return {name: arrays[name] for name in wanted}


def open_bundle(
    name_or_path: str | Path, kind: Kind, spec: type[S], parts: Mapping[str, str] | None = None
) -> Bundle[S]:
    """Reads a bundle's manifest with the spec of its kind, and checks the files of its parts.

    It is given by its folder, or by the name of a bundle that comes with the package, such as ``ball``. A part is in
    ``PART.onnx`` or, where there is only that, ``PART.safetensors``, unless ``parts`` name the files.

    Raises:
        BundleError: if the manifest is of another kind or not usable, a part is missing, damaged or does not match its
            fingerprint, or a network cannot be loaded within the limits of :mod:`specact.bundle.vetting`.
        ConfigError: if there is no bundle of that name.
    """
    path = find_bundle(name_or_path)
    manifest = read_manifest(path)
    if manifest.kind != kind:
        raise BundleError(f"the bundle {path} is {KINDS[manifest.kind]}; this needs {KINDS[kind]}")
    read = read_record(manifest.spec, spec, f"{path / MANIFEST}: spec", BundleError)
    files, networks = dict[str, Path](), dict[Path, str]()
    for part in manifest.fingerprints if parts is None else parts:
        if part in manifest.left_out:
            continue
        folder, source = _place_of(path, manifest, part)
        tensors = parts is None and not (folder / f"{part}.onnx").exists() and (folder / f"{part}.safetensors").exists()
        name = parts[part] if parts is not None else f"{part}.safetensors" if tensors else f"{part}.onnx"
        files[part] = folder / name
        # A part and, where it has any, the files of its weights.
        wanted = source.files or {name: source.fingerprints[part]}
        of_part = [name, *(weights for weights in weights_of(part) if weights in source.files and weights != name)]
        digests = [_checked(folder / file, part, wanted.get(file)) for file in of_part]
        if name.endswith(".onnx"):
            networks[folder / name] = "".join(digests)
    if (path / HEAD).is_file():
        # It is not part of the bundle's fingerprint, so that training one affects no handshake or other calibration.
        networks[path / HEAD] = _checked(path / HEAD, "learned gate's head", manifest.head)
    if not any(shelf in path.resolve().parents for shelf in _SHELVES):
        vet(networks)
    return Bundle(path, manifest, read, files)


def check_bundle(path: Path) -> dict[str, Any]:
    """Opens a bundle's folder and tries all of its networks, known or not, see :func:`.vetting.try_out`.

    Returns:
        ``bundle``, ``kind``, ``fingerprint``, and what is known of its ``networks``, by file.

    Raises:
        BundleError: as :func:`open_bundle` does.
    """
    kind = read_manifest(path).kind
    bundle = open_bundle(path, kind, dict, {} if kind == "chunks" else None)  # those have bundles in their folders
    networks = [file for file in (*bundle.files.values(), path / HEAD) if file.suffix == ".onnx" and file.is_file()]
    reports = dict(zip((file.name for file in networks), try_out(networks) if networks else (), strict=True))
    return {"bundle": str(path), "kind": kind, "fingerprint": bundle.fingerprint, "networks": reports}


def _place_of(path: Path, manifest: Manifest, part: str) -> tuple[Path, Manifest]:
    """The folder that holds a part, and that folder's manifest."""
    if part not in manifest.fingerprints:
        raise BundleError(f"{path / MANIFEST} has no fingerprint of {part}; export the bundle again")
    if part not in manifest.shared:
        return path, manifest
    folder = path.parent / manifest.shared[part]
    source = read_manifest(folder) if (folder / MANIFEST).is_file() else None
    if (
        source is None
        or source.fingerprints.get(part) != manifest.fingerprints[part]
        or part in (*source.shared, *source.left_out)
    ):
        raise BundleError(
            f"{path} shares the {part} of {folder}, which is not there or has another one; copy that bundle as well, "
            "or copy this one with specact export, which writes all of its parts"
        )
    return folder, source


def _checked(file: Path, part: str, wanted: str | None) -> str:
    """The SHA-256 of a file, which must begin with the fingerprint in the manifest."""
    if not file.is_file():
        raise BundleError(f"the bundle {file.parent} has no {file.name}; copy the whole folder, or export it again")
    digest = digest_of(file)
    if digest[:16] != wanted:
        raise BundleError(
            f"{file} has fingerprint {digest[:16]}, but the manifest was written for {wanted or 'none'}: the {part} is "
            "damaged or belongs to another bundle; copy the whole folder again, or make the file again"
        )
    return digest


def named_bundles() -> dict[str, Path]:
    """The folders of the bundles that come with the package or a checkout, by name."""
    return {file.parent.name: file.parent for shelf in _SHELVES for file in sorted(shelf.glob(f"*/{MANIFEST}"))}


def find_bundle(name_or_path: str | Path) -> Path:
    """The folder of a bundle given by path or by name; ConfigError, which names those that exist, if there is none."""
    path = Path(name_or_path)
    if (path / MANIFEST).is_file():
        return path
    shelved = named_bundles()
    if str(name_or_path) in shelved:
        return shelved[str(name_or_path)]
    if path.is_dir():
        # The reader reports what is missing. A bundle's name takes precedence over a folder of data of that name.
        return path
    if _NOT_IN_CHECKOUT.is_file() and str(name_or_path) in json.loads(_NOT_IN_CHECKOUT.read_text()):
        raise ConfigError(
            f"the bundle {name_or_path} is not in this checkout; make it with scripts/make-pretrained {name_or_path}"
        )
    if len(path.parts) > 1:
        raise ConfigError(f"there is no folder {path}; give the path of a bundle, as in RUN/bundles/NAME, or a name")
    unknown = unknown_name("bundle", str(name_or_path), shelved)
    if _CHECKOUT.is_dir():
        raise unknown
    raise ConfigError(
        f"{unknown}. No other bundle comes with the package: the others are in the folder pretrained/ of a source "
        "checkout, where scripts/make-pretrained makes them; copy one from there and give its path"
    )


def copy_bundle(path: Path, out: Path, *, device: bool = False, ignore: Sequence[str] = ()) -> None:
    """Copies a bundle to a new folder, with the parts that it shares; for a device, without what a server has.

    Files and folders that match a pattern to ignore are not copied.

    Raises:
        BundleError: if the manifest cannot be read, a shared part is missing, or a file lies elsewhere.
    """
    manifest, inside = read_manifest(path), path.resolve()
    for file in path.rglob("*"):
        if not file.resolve().is_relative_to(inside) or not (file.is_file() or file.is_dir()):
            raise BundleError(f"{file} is no file, or a link out of the bundle's folder; put a copy in its place")
    left_out = [LEFT_OUT[manifest.kind]] if device else []
    patterns = shutil.ignore_patterns(*ignore, *(f"{part}.*" for part in left_out))
    shutil.copytree(path, out, ignore=patterns, dirs_exist_ok=True)
    values = json.loads((path / MANIFEST).read_text())
    for part in values.pop("shared", {}):
        folder, source = _place_of(path, manifest, part)
        for file in () if part in left_out else folder.glob(f"{part}.*"):
            shutil.copy2(file, out)
            if file.name in source.files:
                values["files"][file.name] = source.files[file.name]
    write_json(out / MANIFEST, values | ({"left_out": left_out} if device else {}))


def check_scale(file: Path, centre: NDArray[np.float32], scale: NDArray[np.float32]) -> None:
    """Refuses a normalisation by which a valid policy could return actions that are not finite.

    That is a BundleError where a scale is not positive, or its sum with the centre exceeds float32.
    """
    with np.errstate(over="ignore"):
        if not (np.isfinite(np.abs(centre) + scale) & (scale > 0.0)).all():
            raise BundleError(
                f"{file} holds a centre {centre.tolist()} and a scale {scale.tolist()}: every scale must be positive "
                "and their sum finite; train and export the bundle again"
            )


def give_head(path: Path, head: Path, parameters: int) -> None:
    """Adds a learned gate's head, an ``.onnx`` file, to a bundle's folder; a kill in between leaves no head."""
    manifest = json.loads((path / MANIFEST).read_text())
    sizes = manifest.get("parameters", {}) | {"head": parameters}
    (path / HEAD).unlink(missing_ok=True)
    digest = digest_of(head)
    write_json(path / MANIFEST, manifest | {"head": digest[:16], "parameters": sizes})
    write_whole(path / HEAD, head.read_bytes())
    remember([digest])
