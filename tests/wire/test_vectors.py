"""The vectors in ``vectors/``, from which another implementation can be tested, are what this one sends.

``python -m tests.wire.test_vectors`` writes them again, after an intended change of the protocol.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import msgpack
from tests.wire.contracts import messages

from specact.wire.exchange import Contract
from specact.wire.messages import (
    Ask,
    Failure,
    Hello,
    Reply,
    Welcome,
    encode,
    read_ask,
    read_hello,
    read_reply,
    read_welcome,
    request_of,
)

FOLDER = Path(__file__).parent / "vectors"


def readable(value: Any) -> Any:
    """A decoded message as JSON: bytes in hexadecimal."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, list):
        return [readable(entry) for entry in value]
    return {key: readable(entry) for key, entry in value.items()} if isinstance(value, dict) else value


def arrays(contract: Contract, message: Any) -> dict[str, Any]:
    """What the bytes of a message hold, by array."""
    if isinstance(message, Ask):
        request = request_of(message, contract)
        return {name: array.tolist() for name, array in {**request.window.arrays, **request.arrays}.items()}
    if isinstance(message, Reply):
        kinds = {kind.reply.nbytes: kind.reply for kind in contract.kinds.values()}
        return {name: array.tolist() for name, array in kinds[len(message.arrays)].unpack(message.arrays).items()}
    return {}


def vector(contract: Contract, message: Any) -> str:
    frame = encode(message)
    fields = {
        "message": readable(msgpack.decode(frame)), "arrays": arrays(contract, message),
        "spec": dict(contract.spec), "kinds": contract.describe(), "frame": frame.hex(),
    }  # fmt: skip
    return json.dumps(fields, indent=1) + "\n"


@pytest.mark.parametrize("name", messages())
def test_a_vector_is_what_is_sent_and_read(name: str) -> None:
    contract, message = messages()[name]
    stored = (FOLDER / f"{name}.json").read_text()
    assert vector(contract, message) == stored
    frame = bytes.fromhex(json.loads(stored)["frame"])
    readers: dict[type, Callable[[bytes], object]]
    readers = {Hello: read_hello, Welcome: read_welcome, Ask: read_ask, Reply: read_reply, Failure: read_reply}
    assert readers[type(message)](frame) == message


def test_there_is_no_other_vector() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(messages())


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, found in messages().items():
        (FOLDER / f"{name}.json").write_text(vector(*found))
