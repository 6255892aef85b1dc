"""Wire format of action codes: distributions and verdicts as arrays, and the server's responder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import WireError
from specact.families.codes.sampling import verify
from specact.families.codes.spec import CodePolicy, PolicySpec
from specact.families.codes.tokenizer import ActionTokenizer
from specact.families.codes.values import CodeDistribution, Drafted, Verdict
from specact.families.codes.verify import code_outcome
from specact.rng import Role, StepStreams
from specact.types import OffloadTimes, Outcome, Proposal
from specact.wire.checks import bad
from specact.wire.dialect import Arrays, ArraySpec, Dialect, Exchange
from specact.wire.messages import Request

FAMILY = "codes"


class CodeCodec:
    """See :class:`~specact.wire.dialect.VerifyingCodec`.

    Args:
        spec, tokenizer: of the bundle.
    """

    def __init__(self, spec: PolicySpec, tokenizer: ActionTokenizer) -> None:
        self._spec, self._tokenizer = spec, tokenizer
        self.dialect = _dialect(spec, tokenizer)

    def read(self, arrays: Arrays) -> CodeDistribution:
        """See :class:`~specact.wire.dialect.Codec`."""
        return CodeDistribution(arrays["probs"], arrays["offsets"], arrays.get("conditional"))

    def request_arrays(self, proposal: Proposal) -> Arrays:
        """See :class:`~specact.wire.dialect.VerifyingCodec`."""
        drafted: Drafted = proposal.evidence
        arrays = {"draft_probs": drafted.draft.probs, "codes": drafted.codes}
        if drafted.draft.conditional is not None:
            arrays["draft_conditional"] = drafted.draft.conditional
        return arrays

    def outcome(self, arrays: Arrays, times: OffloadTimes) -> Outcome:
        """See :class:`~specact.wire.dialect.VerifyingCodec`."""
        verdict = Verdict(arrays["codes"], arrays["accepted"], arrays["rejection"])
        return code_outcome(verdict, arrays["chunk"], times, None)


class CodeResponder:
    """See :class:`~specact.wire.messages.Responder`.

    Args:
        policy: the target.
        tokenizer: of the same bundle.
        dialect: of the bundle.
        name, fingerprint: of the bundle, and of its target.
    """

    # The inference time does not depend on the request.
    steady = True

    def __init__(
        self, policy: CodePolicy, tokenizer: ActionTokenizer, dialect: Dialect, name: str, fingerprint: str
    ) -> None:
        self._policy, self._tokenizer, self.dialect = policy, tokenizer, dialect
        self.name, self.fingerprint = name, fingerprint
        self._streams = StepStreams()

    def respond(self, requests: Sequence[Request]) -> list[Arrays | WireError]:
        """See :class:`~specact.wire.messages.Responder`."""
        targets = self._policy.infer_batch([request.window for request in requests])
        return [self._answer(request, target) for request, target in zip(requests, targets, strict=True)]

    def _answer(self, request: Request, target: CodeDistribution) -> Arrays | WireError:
        # Extreme observations can overflow; only that request of the batch fails.
        if not all(np.count_nonzero(np.isfinite(array)) == array.size for array in (target.probs, target.offsets)):
            return bad("the target has no finite answer to this observation")
        if request.kind == "infer":
            return distribution_arrays(target)
        asked = request.arrays
        draft = CodeDistribution(asked["draft_probs"], target.offsets, asked.get("draft_conditional"))
        verdict = verify(target, draft, asked["codes"], self._streams(Role.VERIFY, request.address))
        return {
            "codes": verdict.codes,
            "accepted": verdict.accepted,
            "rejection": verdict.rejection,
            "chunk": self._tokenizer.decode(verdict.codes, target.offsets),
        }


def distribution_arrays(distribution: CodeDistribution) -> Arrays:
    """A distribution as the arrays of a reply."""
    arrays: dict[str, NDArray[Any]] = {"probs": distribution.probs, "offsets": distribution.offsets}
    if distribution.conditional is not None:
        arrays["conditional"] = distribution.conditional
    return arrays


def _dialect(spec: PolicySpec, tokenizer: ActionTokenizer) -> Dialect:
    rows, chunk = (spec.codebooks, spec.codes), (spec.chunk, spec.actions)
    probs = ArraySpec(rows, np.float64, distribution=True)
    conditional = ArraySpec((spec.codes, spec.codes), np.float64, distribution=True)
    codes = ArraySpec((spec.codebooks,), np.int64, 0, spec.codes - 1)
    infer = Exchange(
        {},
        "distribution",
        {"probs": probs, "offsets": ArraySpec((*rows, *chunk), np.float32)}
        | ({"conditional": conditional} if spec.sequential else {}),
    )
    verified = Exchange(
        {"draft_probs": probs, "codes": codes} | ({"draft_conditional": conditional} if spec.sequential else {}),
        "verdict",
        {
            "codes": codes,
            "accepted": ArraySpec((spec.codebooks,), np.bool_),
            "rejection": ArraySpec((spec.codebooks,), np.float64, 0, 1),
            "chunk": ArraySpec(chunk, np.float32),
        },
    )
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
    return Dialect(FAMILY, agreed, spec.target, {"infer": infer, "verify": verified})
