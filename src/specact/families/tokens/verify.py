"""Verification of proposals of tokens by the target: a pure function of windows and a request for each, and its wire.

The wire format extends that of chunk policies, which clients without tokens can use. The server is stateless: a
method's state is part of each request. The reply holds what a head on the device needs from the target: the feature of
the chunk's first token, 2 bytes per number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from specact.errors import WireError
from specact.families.chunks.policy import ChunkExchange, filled
from specact.families.tokens.policy import BINS, OWN_DRAFTERS, DecodingRequest, Prefilled, TokenPolicy
from specact.families.tokens.speculative import DRAFT, DROPPED, TAIL, UNLIMITED, Acceptance, Decoded
from specact.pair import Answer, Target, TargetVerifier
from specact.rng import StepAddress
from specact.types import OffloadTimes, Origin, Outcome, Proposal
from specact.wire.arrays import Arrays, ArraySpec, Layout
from specact.wire.exchange import Kind, Request
from specact.wire.messages import bad

if TYPE_CHECKING:
    from specact.families.tokens.pair import TokenParts

# Candidates that a request can hold, and what marks a missing token; part of the wire format.
MAX_CANDIDATES, _NONE = 8, -1


class TokenVerifier(TargetVerifier[Prefilled]):
    """Decodes windows that the target has prefilled."""

    def __init__(self, target: Target[Prefilled], parts: TokenParts) -> None:
        super().__init__(target)
        self._parts = parts

    def judge(self, answer: Answer[Prefilled], proposal: Proposal, address: StepAddress) -> Outcome:
        (decoded,) = answer.value.decode([proposal.evidence])
        return token_outcome(decoded, self._parts, answer.times)


def token_outcome(decoded: Decoded, parts: TokenParts, times: OffloadTimes) -> Outcome:
    """A decoded chunk, its evidence, as an outcome in units of the actions; NaN if any logit was not finite.

    An action is *compensated* if any of its tokens is the tail's, otherwise *accepted* if any is a drafted one, and
    *replaced* if all of them are the target's. The chunk ends after so many actions as the decoding executes, and as a
    tail may fill; the tokens behind are dropped.
    """
    actions, decoding = parts.units.from_environment(parts.policy.chunk(decoded)), parts.decoding
    sources = decoded.sources.reshape(actions.shape).copy()
    compensated = (sources == TAIL).any(axis=1)
    end = len(actions) if decoding.execute is None else decoding.execute
    if compensated.any():
        end = min(end, int(np.argmax(compensated)) + decoding.tail_actions)
    sources[end:] = DROPPED
    origins = np.full(len(actions), Origin.REPLACED, np.uint8)
    origins[(sources == DRAFT).any(axis=1)] = Origin.ACCEPTED
    origins[compensated] = Origin.COMPENSATED
    verified, accepted = sources[:end].size, int((sources == DRAFT).sum())
    evidence = replace(decoded, sources=sources.ravel())
    return Outcome(actions[:end], origins[:end], verified, accepted, times, evidence)


class TokenExchange(ChunkExchange):
    """See :class:`~specact.wire.exchange.VerifyingExchange`; verification and its KV cache are on the server."""

    def __init__(self, parts: TokenParts) -> None:
        policy, verify = parts.policy, _verification(parts.policy)
        self._parts, self._tokens, self._verify = parts, policy, verify
        super().__init__(policy.spec, parts.name, parts.target_fingerprint, lambda: policy, parts.units, verify)

    def request(self, proposal: Proposal) -> Arrays:
        wanted: DecodingRequest = proposal.evidence
        rule = wanted.rule
        return filled(
            self._verify.request, candidates=wanted.candidates[:MAX_CANDIDATES], tail=wanted.tail, each=rule.each,
            groups=rule.groups, total=rule.total, then=OWN_DRAFTERS.index(wanted.then), combined=wanted.combined,
        )  # fmt: skip

    def outcome(self, arrays: Arrays, times: OffloadTimes) -> Outcome:
        passes = arrays["accepted"] != _NONE
        tokens, bias = arrays["tokens"].astype(np.int64), arrays["bias"].astype(np.int64)
        # Each is within its own range; what the target wanted instead has to be a token, too.
        wanted = tokens - bias
        accepted, read = (arrays[name][passes].tolist() for name in ("accepted", "read"))
        features, finite = arrays["feature"][None].astype(np.float32), bool(((wanted >= 0) & (wanted < BINS)).all())
        rejected = int(arrays["rejected"][0])
        decoded = Decoded(tokens, arrays["sources"], bias, accepted, read, rejected, features, finite)
        return token_outcome(decoded, self._parts, times)

    def verify(self, requests: Sequence[Request]) -> list[Arrays | WireError]:
        """All are decoded in one batch."""
        read = [self._read(request) for request in requests]
        # Requests that are refused are not part of it.
        accepted = {row: wanted for row, wanted in enumerate(read) if isinstance(wanted, DecodingRequest)}
        windows = [requests[row].window for row in accepted]
        decoded = iter(self._tokens.prefill(windows).decode(list(accepted.values())) if accepted else ())
        return [self._reply(next(decoded)) if isinstance(wanted, DecodingRequest) else wanted for wanted in read]

    def _read(self, request: Request) -> DecodingRequest | WireError:
        arrays = request.arrays
        total, code, combined = (arrays[name][0].item() for name in ("total", "then", "combined"))
        then, tail = OWN_DRAFTERS[code], arrays["tail"].astype(np.int64)
        if then != "none" and then not in self._tokens.drafters:
            return bad(f"this server's target has no drafter {then!r}; start it with a bundle that has one")
        # Groups are renumbered by runs; the peer's numbers are not trusted.
        groups = np.cumsum(np.diff(arrays["groups"], prepend=arrays["groups"][:1]) != 0)
        rule = Acceptance(arrays["each"].astype(np.int64), groups, total)
        rows = arrays["candidates"].astype(np.int64)
        # What a peer put behind the first missing token is left out. The first token is the target's own, so that a row
        # with nothing else proposes nothing.
        proposed = np.logical_and.accumulate(rows >= 0, axis=1)
        candidates = np.where(proposed, rows, _NONE)[proposed[:, :2].all(axis=1)]
        return DecodingRequest(candidates, then, rule, combined, tail if (tail >= 0).all() else None)

    def _reply(self, decoded: Decoded) -> Arrays | WireError:
        if not decoded.finite:
            return bad("the target has no finite answer to this observation")
        return filled(
            self._verify.reply, tokens=decoded.tokens, sources=decoded.sources, bias=decoded.bias,
            accepted=decoded.accepted, read=decoded.read, rejected=decoded.rejected, feature=decoded.features[0],
        )  # fmt: skip


def _verification(policy: TokenPolicy) -> Kind:
    length = policy.networks.length
    token = ArraySpec((length,), np.int16, _NONE, BINS - 1)
    request = {
        "candidates": ArraySpec((MAX_CANDIDATES, length), np.int16, _NONE, BINS - 1),
        "tail": token,
        "each": ArraySpec((length,), np.int16, 0, BINS - 1),
        "groups": ArraySpec((length,), np.int16, 0, length - 1),
        "total": ArraySpec((1,), np.int16, 0, UNLIMITED),
        "then": ArraySpec((1,), np.uint8, 0, len(OWN_DRAFTERS) - 1),
        "combined": ArraySpec((1,), np.bool_),
    }
    reply = {
        "tokens": ArraySpec((length,), np.uint8),
        "sources": ArraySpec((length,), np.uint8, 0, TAIL),
        "bias": ArraySpec((length,), np.int16, 1 - BINS, BINS - 1),
        "accepted": token,
        "read": token,
        "rejected": ArraySpec((1,), np.int16, 0, length),
        "feature": ArraySpec((policy.networks.width,), np.float16),
    }
    return Kind(Layout(request), Layout(reply))
