"""A bundle of a pair of action codes: tokenizer, draft, target."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from specact.bundle.bundle import Bundle as Folder
from specact.bundle.bundle import check_scale, open_bundle
from specact.bundle.network import CPU, Compute
from specact.bundle.words import Words
from specact.errors import BundleError
from specact.families.codes.network import OnnxPolicy
from specact.families.codes.spec import PolicySpec
from specact.families.codes.tokenizer import ActionTokenizer
from specact.families.codes.values import CodeDistribution
from specact.families.codes.verify import CodeDrafter, SpeculativeVerifier
from specact.families.codes.wire import CodeExchange
from specact.observation import ObservationSpec
from specact.units import ActionUnits
from specact.verification import Target

PARTS = {"tokenizer": "tokenizer.safetensors", "draft": "draft.onnx", "target": "target.onnx"}


@dataclass(frozen=True)
class Bundle(Folder[PolicySpec]):
    """A loaded bundle that holds a pair.

    Attributes:
        tokenizer, draft: parts.
        local_target: the target, or None if the bundle was exported for a device.
        words: vocabulary of its policies, if one follows an instruction.
    """

    tokenizer: ActionTokenizer
    draft: OnnxPolicy
    local_target: OnnxPolicy | None
    words: Words | None = None

    @property
    def source(self) -> str:
        """The path that it is loaded by."""
        return str(self.path)

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

    @cached_property
    def exchange(self) -> CodeExchange:
        """See :class:`~specact.pair.Pair`."""
        fingerprint = self.manifest.fingerprints["target"]
        return CodeExchange(self.spec, self.tokenizer, self.name, fingerprint, lambda: self.target)

    @property
    def recommended_gates(self) -> dict[str, Any]:
        """Recommended gate settings, see :class:`~specact.gates.settings.GateChoices`."""
        return dict(self.manifest.gates)


def load_bundle(name_or_path: str | Path, *, compute: Compute = CPU) -> Bundle:
    """Loads a bundle and refuses parts that do not fit together.

    Args:
        name_or_path: a folder, or the name of a bundle that comes with the package, such as ``ball``.
        compute: where its networks run.

    Raises:
        BundleError: if a part is missing, damaged, or does not match its fingerprint in the manifest.
        ConfigError: if there is no bundle of that name.
    """
    folder = open_bundle(name_or_path, "pair", PolicySpec, PARTS)
    spec, words, files = folder.spec, folder.manifest.words, folder.files

    def policy(part: str, observation: ObservationSpec) -> OnnxPolicy:
        return OnnxPolicy(files[part], spec, observation, words=words, compute=compute)

    return Bundle(
        folder.path,
        folder.manifest,
        spec,
        files,
        tokenizer=_read_tokenizer(folder),
        draft=policy("draft", spec.draft),
        local_target=policy("target", spec.target) if "target" in files else None,
        words=words,
    )


def _read_tokenizer(folder: Folder[PolicySpec]) -> ActionTokenizer:
    spec = folder.spec
    table = (spec.codes**spec.codebooks, spec.chunk, spec.actions)
    tensors = folder.tensors(
        "tokenizer",
        {"table": (np.float32, table)} | dict.fromkeys(("centre", "scale"), (np.float32, (spec.actions,))),
    )
    centre, scale = tensors["centre"], tensors["scale"]
    check_scale(folder.files["tokenizer"], centre, scale)
    return ActionTokenizer(centre, scale, tensors["table"], folder.manifest.fingerprints["tokenizer"], spec.codes)
