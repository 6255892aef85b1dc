"""A bundle, the folder that is deployed: tokenizer, draft, target, calibrations, and a manifest."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from specact.errors import BundleError, ConfigError, unknown_name
from specact.families.codes.network import OnnxPolicy
from specact.families.codes.spec import PolicySpec
from specact.families.codes.tokenizer import ActionTokenizer
from specact.families.codes.values import CodeDistribution
from specact.families.codes.verify import CodeDrafter, SpeculativeVerifier
from specact.families.codes.wire import CodeCodec, CodeResponder
from specact.families.head import check_head
from specact.families.words import Words, read_words
from specact.observation import ObservationSpec, read_spec
from specact.runtime.manifest import BundleFolder, left_out, read_manifest
from specact.units import ActionUnits
from specact.verification import Target

PARTS = {"tokenizer": "tokenizer.safetensors", "draft": "draft.onnx", "target": "target.onnx"}

# Bundles that come with the package, and those of a source checkout.
_CHECKOUT = Path(__file__).parents[4] / "pretrained"
_BUNDLE_FOLDERS = (Path(__file__).parents[2] / "pretrained", _CHECKOUT)
_NOT_IN_CHECKOUT = _CHECKOUT / "absent.json"


@dataclass(frozen=True)
class Bundle(BundleFolder):
    """A loaded bundle that holds a pair.

    Attributes:
        spec: shared by its parts.
        tokenizer, draft: parts.
        local_target: the target, or None if the bundle was exported for a device.
        words: vocabulary of its policies, if one follows an instruction.
    """

    spec: PolicySpec
    tokenizer: ActionTokenizer
    draft: OnnxPolicy
    local_target: OnnxPolicy | None
    words: Words | None = None

    @property
    def target(self) -> OnnxPolicy:
        """The target.

        Raises:
            BundleError: if the bundle was exported for a device.
        """
        if self.local_target is None:
            raise BundleError(
                f"the bundle {self.path} was exported without its target, which runs on the server. Connect to a "
                "server, as with specact run --server URL, or use the complete bundle"
            )
        return self.local_target

    @property
    def observation(self) -> ObservationSpec:
        """See :class:`~specact.pair.Pair`."""
        return self.spec.observation

    @property
    def units(self) -> ActionUnits:
        """See :class:`~specact.pair.Pair`."""
        return self.tokenizer

    @property
    def execute(self) -> int:
        """See :class:`~specact.pair.Pair`."""
        return self.spec.execute

    @property
    def overlap(self) -> Literal["drop", "average"]:
        """See :class:`~specact.pair.Pair`."""
        return self.spec.overlap

    @property
    def rate_hz(self) -> float:
        """See :class:`~specact.pair.Pair`."""
        return self.spec.rate_hz

    @property
    def drafter(self) -> CodeDrafter:
        """See :class:`~specact.pair.Pair`."""
        return CodeDrafter(self.draft, self.tokenizer)

    def verifier(self, target: Target[CodeDistribution]) -> SpeculativeVerifier:
        """See :class:`~specact.pair.Pair`; exact speculative sampling."""
        return SpeculativeVerifier(target, self.tokenizer)

    @property
    def codec(self) -> CodeCodec:
        """See :class:`~specact.pair.Pair`."""
        return CodeCodec(self.spec, self.tokenizer)

    @property
    def responder(self) -> CodeResponder:
        """What a server does with requests."""
        fingerprint = self.manifest["fingerprints"]["target"]
        return CodeResponder(self.target, self.tokenizer, self.codec.dialect, self.name, fingerprint)

    @property
    def recommended_gates(self) -> dict[str, Any]:
        """Recommended gate settings, see :class:`~specact.gates.settings.GateChoices`."""
        return dict(self.manifest.get("gates", {}))


def load_bundle(name_or_path: str | Path, *, provider: str = "CPUExecutionProvider", threads: int = 1) -> Bundle:
    """Loads a bundle and refuses parts that do not fit together.

    Args:
        name_or_path: a folder, or the name of a bundle that comes with the package, such as ``ball``.
        provider, threads: see :class:`~specact.families.codes.network.OnnxPolicy`.

    Raises:
        BundleError: if a part is missing, damaged, does not match its fingerprint in the manifest, or is not allowed in
            a bundle, see :mod:`specact.runtime.graph`.
        ConfigError: if there is no bundle of that name, or no such execution provider.
    """
    path = find_bundle(name_or_path)
    manifest = read_manifest(path, "pair", PARTS)
    check_head(path, manifest)
    spec, words = _read_spec(path, manifest), read_words(manifest)

    def policy(part: str, observation: ObservationSpec) -> OnnxPolicy:
        return OnnxPolicy(path / PARTS[part], spec, observation, words=words, provider=provider, threads=threads)

    return Bundle(
        path=path,
        manifest=manifest,
        spec=spec,
        tokenizer=_read_tokenizer(path, manifest, spec),
        draft=policy("draft", spec.draft),
        local_target=None if "target" in left_out(manifest) else policy("target", spec.target),
        words=words,
    )


def find_bundle(name_or_path: str | Path) -> Path:
    """The folder of a bundle given by path or by name.

    Raises:
        ConfigError: if there is none; the message names those that exist.
    """
    path = Path(name_or_path)
    if (path / "manifest.json").is_file():
        return path
    shelved = {
        found.parent.name: found.parent for shelf in _BUNDLE_FOLDERS for found in sorted(shelf.glob("*/manifest.json"))
    }
    if str(name_or_path) in shelved:
        return shelved[str(name_or_path)]
    if path.is_dir():
        # The reader reports what is missing. A bundle's name takes precedence over a folder of data of that name.
        return path
    if _NOT_IN_CHECKOUT.is_file() and str(name_or_path) in json.loads(_NOT_IN_CHECKOUT.read_text()):
        raise ConfigError(
            f"the bundle {name_or_path} is not in this checkout; make it with scripts/make-pretrained {name_or_path}"
        )
    unknown = unknown_name("bundle", str(name_or_path), shelved)
    if _CHECKOUT.is_dir():
        raise unknown
    raise ConfigError(
        f"{unknown}. No other bundle comes with the package: the others are in the folder pretrained/ of a source "
        "checkout, where scripts/make-pretrained makes them; copy one from there and give its path"
    )


def check_units(file: Path, tensors: dict[str, NDArray[Any]], actions: int) -> None:
    """Refuses a normalisation by which a valid policy could return actions that are not finite.

    Raises:
        BundleError: if ``centre`` or ``scale`` is not float32 ``[A]`` or not finite, a scale is not positive, or their
            sum exceeds float32.
    """
    for name in ("centre", "scale"):
        found = tensors.get(name)
        if found is None or found.shape != (actions,) or found.dtype != np.float32:
            raise BundleError(f"{file} holds no {name} of {actions} actions in float32; export the bundle again")
    centre, scale = tensors["centre"], tensors["scale"]
    with np.errstate(over="ignore", invalid="ignore"):
        if not (np.isfinite(np.abs(centre) + scale) & (scale > 0.0)).all():
            raise BundleError(
                f"{file} holds a centre {centre.tolist()} and a scale {scale.tolist()}: all of them must be finite and "
                "every scale positive; train and export the bundle again"
            )


def _read_spec(path: Path, manifest: dict[str, Any]) -> PolicySpec:
    try:
        raw = dict(manifest["spec"])
        return PolicySpec(draft=read_spec(raw.pop("draft")), target=read_spec(raw.pop("target")), **raw)
    except (TypeError, KeyError, BundleError) as error:
        raise BundleError(f"the manifest of {path} has no usable spec ({error}); export the bundle again") from None


def _read_tokenizer(path: Path, manifest: dict[str, Any], spec: PolicySpec) -> ActionTokenizer:
    file = path / PARTS["tokenizer"]
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError, TypeError, KeyError) as error:  # the last two for dtypes that NumPy lacks
        raise BundleError(f"{file} is damaged ({error}); copy the bundle again") from None
    shape = (spec.codes**spec.codebooks, spec.chunk, spec.actions)
    if "table" not in tensors or tensors["table"].shape != shape or tensors["table"].dtype.kind != "f":
        table = f"of {spec.codes}^{spec.codebooks} chunks [{spec.chunk}, {spec.actions}]"
        raise BundleError(
            f"{file} holds no decoder table {table}, as floating-point numbers: it does not belong to this bundle; "
            "copy the bundle again"
        )
    check_units(file, tensors, spec.actions)
    if not np.isfinite(tensors["table"]).all():
        raise BundleError(f"{file} holds a table with NaN or infinite numbers; export the bundle again")
    return ActionTokenizer(
        tensors["centre"],
        tensors["scale"],
        tensors["table"].astype(np.float32),
        manifest["fingerprints"]["tokenizer"],
        spec.codes,
    )
