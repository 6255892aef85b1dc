"""What crosses the wire for action codes: the target's distribution, or the server's verdict on the drafted codes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from specact.errors import WireError
from specact.families.codes.policy import ActionTokenizer, CodePolicy, PolicySpec
from specact.families.codes.sampling import CodeDistribution, Drafted, Verdict, code_outcome, verify
from specact.rng import Role, StepStreams
from specact.types import OffloadTimes, Outcome, Proposal
from specact.wire.arrays import Arrays, ArraySpec, Layout
from specact.wire.exchange import Contract, Kind, Request

FAMILY = "codes"


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
        self,
        spec: PolicySpec,
        tokenizer: ActionTokenizer,
        name: str,
        fingerprint: str,
        target: Callable[[], CodePolicy],
    ) -> None:
        self.name, self.fingerprint, self._target = name, fingerprint, cache(target)
        self.contract, self._tokenizer, self._streams = _contract(spec, tokenizer), tokenizer, StepStreams()

    def read(self, arrays: Arrays) -> CodeDistribution:
        return CodeDistribution(arrays["probs"], arrays["offsets"], arrays.get("conditional"))

    def request(self, proposal: Proposal) -> Arrays:
        drafted: Drafted = proposal.evidence
        arrays = {"draft_probs": drafted.draft.probs, "codes": drafted.codes}
        if drafted.draft.conditional is not None:
            arrays["draft_conditional"] = drafted.draft.conditional
        return arrays

    def outcome(self, arrays: Arrays, times: OffloadTimes) -> Outcome:
        verdict = Verdict(arrays["codes"], arrays["accepted"], arrays["rejection"])
        return code_outcome(verdict, arrays["chunk"], times, None)

    def answer(self, kind: str, requests: Sequence[Request]) -> list[Arrays | WireError]:
        targets = self._target().infer_batch([request.window for request in requests])
        if kind == "infer":
            return [distribution_arrays(target) for target in targets]
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


def distribution_arrays(distribution: CodeDistribution) -> Arrays:
    """A distribution as the arrays of a reply."""
    arrays: Arrays = {"probs": distribution.probs, "offsets": distribution.offsets}
    return arrays if distribution.conditional is None else {**arrays, "conditional": distribution.conditional}


def _contract(spec: PolicySpec, tokenizer: ActionTokenizer) -> Contract:
    rows, chunk = (spec.codebooks, spec.codes), (spec.chunk, spec.actions)
    probs = ArraySpec(rows, np.float64, distribution=True)
    conditional = ArraySpec((spec.codes, spec.codes), np.float64, distribution=True)
    codes = ArraySpec((spec.codebooks,), np.int64, 0, spec.codes - 1)
    answer = {"probs": probs, "offsets": ArraySpec((*rows, *chunk), np.float32)}
    draft = {"draft_probs": probs, "codes": codes}
    verdict = {
        "codes": codes,
        "accepted": ArraySpec((spec.codebooks,), np.bool_),
        "rejection": ArraySpec((spec.codebooks,), np.float64, 0, 1),
        "chunk": ArraySpec(chunk, np.float32),
    }
    if spec.sequential:
        answer["conditional"] = draft["draft_conditional"] = conditional
    agreed = {
        # Codes of different tokenizers decode to different actions.
        "tokenizer": tokenizer.fingerprint,
        "observation": spec.target.describe(),
        "codebooks": spec.codebooks,
        "codes": spec.codes,
        "chunk": spec.chunk,
        "actions": spec.actions,
        "temperature": spec.temperature,
        "sequential": spec.sequential,
    }
    kinds = {"infer": Kind(Layout({}), Layout(answer)), "verify": Kind(Layout(draft), Layout(verdict))}
    return Contract(FAMILY, agreed, spec.target, kinds)
