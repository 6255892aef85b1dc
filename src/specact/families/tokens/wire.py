"""Wire format of tokens: a request and the decoded chunk as arrays, and how a server makes the replies.

It extends the wire format of chunk policies, which clients without tokens can use, by requests to verify. The server is
stateless: a method's state is part of each request. Its candidates may be a tree, one path in each row. The reply holds
what a head on the device needs from the target: the feature of the chunk's first token, 2 bytes per number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from specact.errors import WireError
from specact.families.chunks.wire import ChunkExchange
from specact.families.tokens.policy import BINS, TokenPolicy, Tokens
from specact.families.tokens.speculative import TAIL, UNLIMITED, Acceptance, Decoded
from specact.families.tokens.verify import MAX_CANDIDATES, OWN_DRAFTERS, DecodingRequest, TokenTarget, token_outcome
from specact.types import ActionUnits, OffloadTimes, Outcome, Proposal
from specact.wire.arrays import Arrays, ArraySpec, Layout
from specact.wire.exchange import Kind, Request
from specact.wire.messages import bad

# Marks a missing token.
_NONE = -1


class TokenExchange(ChunkExchange):
    """See :class:`~specact.wire.exchange.VerifyingExchange`; verification and its KV cache are on the server.

    Args:
        policy: the target.
        units: of the actions.
        name, fingerprint: of the target.
        target: makes the target with its own drafters; called on a server only.
    """

    def __init__(
        self, policy: TokenPolicy, units: ActionUnits, name: str, fingerprint: str, target: Callable[[], TokenTarget]
    ) -> None:
        super().__init__(policy.spec, name, fingerprint, lambda: policy, units, _verification(policy))
        self._tokens, self._units, self._decoder = policy, units, cache(target)

    def request(self, proposal: Proposal) -> Arrays:
        asked: DecodingRequest = proposal.evidence.request
        length = self._tokens.networks.length
        candidates = np.full((MAX_CANDIDATES, length), _NONE, np.int16)
        kept = asked.candidates[:MAX_CANDIDATES]
        candidates[: len(kept)] = kept
        tail = np.full(length, _NONE) if asked.tail is None else asked.tail
        return {
            "candidates": candidates,
            "tail": tail.astype(np.int16),
            "each": asked.rule.each.astype(np.int16),
            "groups": asked.rule.groups.astype(np.int16),
            "how": np.array([asked.rule.total, OWN_DRAFTERS.index(asked.then), asked.combined], np.int16),
        }

    def outcome(self, arrays: Arrays, times: OffloadTimes) -> Outcome:
        passes = arrays["accepted"] != _NONE
        tokens, bias = arrays["tokens"].astype(np.int64), arrays["bias"].astype(np.int64)
        # Each is within its own range; what the target wanted instead has to be a token, too.
        wanted = tokens - bias
        decoded = Decoded(
            tokens,
            arrays["sources"],
            bias,
            tuple(arrays["accepted"][passes].tolist()),
            tuple(arrays["read"][passes].tolist()),
            int(arrays["rejected"][0]),
            arrays["feature"].astype(np.float32),
            bool((wanted >= 0).all() and (wanted < BINS).all()),
        )
        return token_outcome(decoded, self._tokens, self._units, times)

    def verify(self, requests: Sequence[Request]) -> list[Arrays | WireError]:
        """All are decoded in one batch."""
        questions = [self._question(request) for request in requests]
        # Requests that are refused are not part of the batch.
        asked = {row: question for row, question in enumerate(questions) if isinstance(question, DecodingRequest)}
        windows = [requests[row].window for row in asked]
        decoded = iter(self._decoder().prefill(windows).decode(list(asked.values())) if asked else ())
        return [_answer(next(decoded)) if isinstance(question, DecodingRequest) else question for question in questions]

    def _question(self, request: Request) -> DecodingRequest | WireError:
        if request.arrays["how"][1] >= len(OWN_DRAFTERS):
            return bad(f"how names the drafters 0 to {len(OWN_DRAFTERS) - 1}, got {request.arrays['how'][1]}")
        question = _request_of(request.arrays)
        if question.then != "none" and question.then not in self._decoder().drafters:
            return bad(f"this server's target has no drafter {question.then!r}; start it with a bundle that has one")
        return question


def _answer(decoded: Decoded) -> Arrays | WireError:
    if not decoded.finite:
        return bad("the target has no finite answer to this observation")
    passes = np.full((2, len(decoded.tokens)), _NONE, np.int16)
    passes[:, : len(decoded.accepted)] = decoded.accepted, decoded.read
    return {
        "tokens": decoded.tokens.astype(np.uint8),
        "sources": decoded.sources,
        "bias": decoded.bias.astype(np.int16),
        "accepted": passes[0],
        "read": passes[1],
        "rejected": np.array([decoded.rejected], np.int16),
        "feature": decoded.feature.astype(np.float16),
    }


def _request_of(arrays: Arrays) -> DecodingRequest:
    tail = arrays["tail"].astype(np.int64)
    total, then, combined = arrays["how"].tolist()
    # Groups are renumbered by runs; the peer's numbers are not trusted.
    groups = np.cumsum(np.diff(arrays["groups"], prepend=arrays["groups"][:1]) != 0)
    rule = Acceptance(arrays["each"].astype(np.int64), groups, total)
    return DecodingRequest(
        _candidates_of(arrays["candidates"].astype(np.int64)),
        OWN_DRAFTERS[then],
        bool(combined),
        rule,
        tail if (tail >= 0).all() else None,
    )


def _candidates_of(rows: Tokens) -> Tokens:
    """The rows that propose something, ``[K, T]``, without what a peer put behind the first missing token."""
    proposed = np.logical_and.accumulate(rows >= 0, axis=1)
    # The first token is the target's own, so that a row with nothing else proposes nothing.
    return np.where(proposed, rows, _NONE)[proposed[:, :2].all(axis=1)]


def _verification(policy: TokenPolicy) -> Kind:
    length = policy.networks.length
    token = ArraySpec((length,), np.int16, _NONE, BINS - 1)
    return Kind(
        Layout(
            {
                "candidates": ArraySpec((MAX_CANDIDATES, length), np.int16, _NONE, BINS - 1),
                "tail": token,
                "each": ArraySpec((length,), np.int16, 0, BINS - 1),
                "groups": ArraySpec((length,), np.int16, 0, length - 1),
                "how": ArraySpec((3,), np.int16, 0, UNLIMITED),
            }
        ),
        Layout(
            {
                "tokens": ArraySpec((length,), np.uint8),
                "sources": ArraySpec((length,), np.uint8, 0, TAIL),
                "bias": ArraySpec((length,), np.int16, 1 - BINS, BINS - 1),
                "accepted": token,
                "read": token,
                "rejected": ArraySpec((1,), np.int16, 0, length),
                "feature": ArraySpec((policy.networks.width,), np.float16),
            }
        ),
    )
