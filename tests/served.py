"""What a server makes of an exchange's answers, without a server; and a certificate for one."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specact.errors import WireError
from specact.pair import Pair
from specact.wire.arrays import Arrays
from specact.wire.exchange import Exchange, Request, VerifyingExchange
from specact.wire.messages import Reply, ask, encode, read_ask, read_reply, request_of


def certify(folder: Path) -> None:
    """Makes ``cert.pem`` and ``key.pem`` for 127.0.0.1 in a folder, others each time."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl to make a certificate")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-days", "2", "-subj", "/CN=robot server", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", folder / "key.pem", "-out", folder / "cert.pem"],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip


def served(exchange: Exchange[Any], kind: str, requests: Sequence[Request]) -> list[Arrays | WireError]:
    """The answers to requests of one batch, everything as bytes in between."""
    contract = exchange.contract
    arrivals = [request_of(read_ask(encode(ask(request, contract, kind, 1, 100.0))), contract) for request in requests]
    layout, replies = contract.kinds[kind].reply, []
    for answer in exchange.answer(kind, arrivals):
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
