"""What a server makes of an exchange's answers, without a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specact.errors import WireError
from specact.pair import Pair
from specact.wire.arrays import Arrays
from specact.wire.exchange import Exchange, Request, VerifyingExchange
from specact.wire.messages import Reply, ask, encode, read_ask, read_reply, request_of


def served(exchange: Exchange[Any], kind: str, requests: Sequence[Request]) -> list[Arrays | WireError]:
    """The answers to requests of one batch, everything as bytes in between."""
    contract = exchange.contract
    there = [request_of(read_ask(encode(ask(request, contract, kind, 1, 100.0))), contract) for request in requests]
    layout, replies = contract.kinds[kind].reply, []
    for answer in exchange.answer(kind, there):
        try:
            if isinstance(answer, WireError):
                raise answer
            reply = read_reply(encode(Reply(1, 0.0, 1.0, 1.0, 1, layout.pack(answer))))
            assert isinstance(reply, Reply)
            replies.append(layout.unpack(reply.arrays))
        except WireError as error:
            replies.append(error)  # type: ignore[arg-type]
    return replies  # type: ignore[return-value]


def verifying(pair: Pair[Any]) -> VerifyingExchange[Any]:
    """The exchange of a family that can verify on the server."""
    assert isinstance(pair.exchange, VerifyingExchange)
    return pair.exchange
