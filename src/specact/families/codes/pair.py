"""A pair of policies of action codes, and its bundle.

What crosses the wire are the outputs of the target's network, or the server's verdict on the drafted codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from specact.bundle.bundle import Bundle, check_scale, open_bundle
from specact.bundle.network import CPU, Compute
from specact.errors import BundleError, ConfigError, WireError
from specact.families.codes.policy import (
    ActionTokenizer,
    CodeDrafter,
    CodeVerifier,
    OnnxPolicy,
    PolicySpec,
    distributions,
)
from specact.families.codes.sampling import CodeDistribution, Drafted, Verdict, code_outcome, verify
from specact.pair import Pair, PairSource
from specact.rng import Role, StepStreams
from specact.types import OffloadTimes, Outcome, Proposal
from specact.wire.arrays import Arrays, ArraySpec, Layout
from specact.wire.exchange import Contract, Kind, Request

PARTS = {"tokenizer": "tokenizer.safetensors", "draft": "draft.onnx", "target": "target.onnx"}


class CodeExchange:
    """See :class:`~specact.wire.exchange.VerifyingExchange`.

    Args:
        spec, tokenizer: of the bundle.
        name, fingerprint: of the bundle, and of its target.
        target: the target; called on a server only.
    """

    # The inference time does not depend on the request.
    steady = True

    def __init__(
        self, spec: PolicySpec, tokenizer: ActionTokenizer, name: str, fingerprint: str,
        target: Callable[[], OnnxPolicy],
    ) -> None:  # fmt: skip
        self.name, self._target = name, cache(target)
        self.contract = _contract(spec, tokenizer, fingerprint)
        self._tokenizer, self._streams = tokenizer, StepStreams()
        self._temperature, self._outputs = spec.temperature, ("logits", "offsets", "conditional")[: 2 + spec.sequential]

    def read(self, arrays: Arrays) -> CodeDistribution:
        return distributions([arrays[name][None] for name in self._outputs], self._temperature)[0]

    def request(self, proposal: Proposal) -> Arrays:
        drafted: Drafted = proposal.evidence
        draft = drafted.draft
        arrays = {"draft_probs": draft.probs, "codes": drafted.codes}
        return arrays if draft.conditional is None else arrays | {"draft_conditional": draft.conditional}

    def outcome(self, arrays: Arrays, times: OffloadTimes) -> Outcome:
        verdict = Verdict(arrays["codes"], arrays["accepted"], arrays["rejection"])
        return code_outcome(verdict, arrays["chunk"], times)

    def answer(self, kind: str, requests: Sequence[Request]) -> list[Arrays | WireError]:
        outputs = self._target().outputs([request.window for request in requests])
        if kind == "infer":
            return [dict(zip(self._outputs, row, strict=True)) for row in zip(*outputs, strict=True)]
        targets = distributions(outputs, self._temperature)
        return [self._verdict(request, target) for request, target in zip(requests, targets, strict=True)]

    def _verdict(self, request: Request, target: CodeDistribution) -> Arrays | WireError:
        arrays = request.arrays
        draft = CodeDistribution(arrays["draft_probs"], target.offsets, arrays.get("draft_conditional"))
        # Sampling from what is not finite could fail.
        if not np.isfinite(target.probs).all():
            return WireError("bad_message", "the target has no finite answer to this observation")
        verdict = verify(target, draft, arrays["codes"], self._streams(Role.VERIFY, request.address))
        return {
            "codes": verdict.codes,
            "accepted": verdict.accepted,
            "rejection": verdict.rejection,
            "chunk": self._tokenizer.decode(verdict.codes, target.offsets),
        }


def _contract(spec: PolicySpec, tokenizer: ActionTokenizer, fingerprint: str) -> Contract:
    rows, chunk = (spec.codebooks, spec.codes), (spec.chunk, spec.actions)
    probs = ArraySpec(rows, np.float64, distribution=True)
    conditional = ArraySpec((spec.codes, spec.codes), np.float64, distribution=True)
    codes = ArraySpec((spec.codebooks,), np.int64, 0, spec.codes - 1)
    logits = ArraySpec((1, spec.codes) if spec.sequential else rows, np.float32)
    answer = {"logits": logits, "offsets": ArraySpec((*rows, *chunk), np.float32)}
    draft = {"draft_probs": probs, "codes": codes}
    verdict = {
        "codes": codes,
        "accepted": ArraySpec((spec.codebooks,), np.bool_),
        "rejection": ArraySpec((spec.codebooks,), np.float64, 0, 1),
        "chunk": ArraySpec(chunk, np.float32),
    }
    if spec.sequential:
        answer["conditional"] = ArraySpec((spec.codes, spec.codes), np.float32)
        draft["draft_conditional"] = conditional
    shared = ("codebooks", "codes", "chunk", "actions", "temperature", "sequential")
    # Codes of different tokenizers decode to different actions.
    agreed = {"tokenizer": tokenizer.fingerprint, "observation": spec.target.describe()}
    agreed |= {name: getattr(spec, name) for name in shared}
    kinds = {"infer": Kind(Layout({}), Layout(answer)), "verify": Kind(Layout(draft), Layout(verdict))}
    return Contract("codes", agreed, spec.target, kinds, fingerprint=fingerprint)


@dataclass(frozen=True)
class CodeParts(Bundle[PolicySpec]):
    """A pair of action codes; ``local_target`` is None if the bundle was exported for a device."""

    tokenizer: ActionTokenizer
    draft: OnnxPolicy
    local_target: OnnxPolicy | None

    @property
    def target(self) -> OnnxPolicy:
        """The target; BundleError if the bundle was exported for a device."""
        if self.local_target is None:
            raise BundleError(
                f"the bundle {self.path} was exported without its target, which runs on the server. Connect to a "
                "server, as with specact run --server URL, or use the complete bundle"
            )
        return self.local_target

    def pair(self) -> Pair[CodeDistribution]:
        """As a pair; verification is exact speculative sampling."""
        spec, target = self.spec, self.manifest.fingerprints["target"]
        return Pair(
            name=self.name, observation=spec.observation, units=self.tokenizer, execute=spec.execute,
            rate_hz=spec.rate_hz, overlap=spec.overlap, env=self.env, fingerprint=self.fingerprint, path=self.path,
            drafter=lambda: CodeDrafter(self.draft, self.tokenizer),
            target=lambda: self.target,
            verifier=lambda target: CodeVerifier(target, self.tokenizer),
            exchange=CodeExchange(spec, self.tokenizer, self.name, target, lambda: self.target),
            source=PairSource(str(self.path)), recommended_gates=self.manifest.gates, parts=self,
        )  # fmt: skip


def codes_of(pair: Pair[Any], what: str) -> CodeParts:
    """The parts of a pair of action codes, which ``what`` needs; ConfigError for one of another family."""
    if not isinstance(pair.parts, CodeParts):
        raise ConfigError(f"{what} needs a pair of action codes, and {pair.name} is of another family")
    return pair.parts


def load_codes(name_or_path: str | Path, *, compute: Compute = CPU) -> CodeParts:
    """Loads a bundle of a pair, a folder or a name such as ``ball``, and refuses parts that do not fit together.

    Raises:
        BundleError, ConfigError: as :func:`~specact.bundle.bundle.open_bundle`; BundleError for parts that do not fit.
    """
    bundle = open_bundle(name_or_path, "pair", PolicySpec, PARTS)
    spec, files, manifest = bundle.spec, bundle.files, bundle.manifest
    units = (np.float32, (spec.actions,))
    table = (np.float32, (spec.codes**spec.codebooks, spec.chunk, spec.actions))
    tensors = bundle.tensors("tokenizer", {"table": table, "centre": units, "scale": units})
    check_scale(files["tokenizer"], tensors["centre"], tensors["scale"])
    tokenizer = ActionTokenizer(**tensors, fingerprint=manifest.fingerprints["tokenizer"], codes=spec.codes)

    def policy(part: str) -> OnnxPolicy:
        return OnnxPolicy(files[part], spec, getattr(spec, part), words=manifest.words, compute=compute)

    target = policy("target") if "target" in files else None
    return CodeParts(bundle.path, manifest, spec, files, tokenizer, policy("draft"), target)
