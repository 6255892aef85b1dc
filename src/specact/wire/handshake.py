"""The handshake: a device says what it speaks, the server agrees or says what differs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from specact.errors import WireError
from specact.families.codes.spec import PolicySpec
from specact.wire.checks import bad, check_head, is_integer, is_plain, said
from specact.wire.protocol import PROTOCOL, ErrorCode
from specact.wire.reply import read_error


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a device: what it speaks, so that a pair that does not fit is refused before it acts.

    Attributes:
        robot: a name for the status page, at most 64 characters.
        tokenizer: fingerprint of the tokenizer both must share.
        spec: shapes, temperature and all else of :func:`shared_spec`.
    """

    robot: str
    tokenizer: str
    spec: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Welcome:
    """The server's consent.

    Attributes:
        bundle, target: name of the bundle and fingerprint of its target.
        version: of the server's package.
        max_message_bytes: the largest message it reads.
    """

    bundle: str
    target: str
    version: str
    max_message_bytes: int


def shared_spec(spec: PolicySpec) -> dict[str, Any]:
    """What device and server must agree on, as plain values; how a chunk is executed is the device's own matter."""
    return {
        "window": spec.window,
        "state": spec.state,
        "goal": spec.goal,
        "image": list(spec.image) if spec.image else None,
        "codebooks": spec.codebooks,
        "codes": spec.codes,
        "chunk": spec.chunk,
        "actions": spec.actions,
        "temperature": spec.temperature,
        "sequential": spec.sequential,
    }


def hello_fields(hello: Hello) -> dict[str, Any]:
    """As a map of plain values."""
    return {"v": PROTOCOL, "type": "hello", **dataclasses.asdict(hello)}


def welcome_fields(welcome: Welcome) -> dict[str, Any]:
    """As a map of plain values."""
    return {"v": PROTOCOL, "type": "welcome", **dataclasses.asdict(welcome)}


def read_hello(fields: dict[str, Any]) -> Hello:
    """A device's first message.

    Raises:
        WireError: ``bad_message``, or ``unsupported_protocol``.
    """
    check_head(fields, "hello")
    robot, tokenizer, spec = (fields.get(name) for name in ("robot", "tokenizer", "spec"))
    if not isinstance(robot, str) or not isinstance(tokenizer, str) or not isinstance(spec, dict):
        raise bad("hello needs robot (text), tokenizer (text) and spec (map)")
    if len(robot) > 64 or not robot.isprintable() or not all(is_plain(value) for value in spec.values()):
        raise bad(
            "hello: robot is at most 64 printable characters; spec holds numbers, booleans, lists of numbers, or null"
        )
    return Hello(robot, tokenizer, spec)


def check_hello(hello: Hello, spec: dict[str, Any], tokenizer: str) -> None:
    """Compares what a device speaks with what the server speaks.

    Raises:
        WireError: ``mismatch``, naming what differs.
    """
    if hello.tokenizer != tokenizer:
        raise WireError(
            ErrorCode.MISMATCH,
            f"the device has tokenizer {said(hello.tokenizer)}, the server {tokenizer!r}: their codes mean different "
            "actions; deploy the same bundle on both",
        )
    differs = [name for name in spec if name not in hello.spec or not _same(hello.spec[name], spec[name])]
    if differs:
        both = ", ".join(f"{name} {str(hello.spec.get(name))[:32]} / {spec[name]}" for name in differs)
        raise WireError(ErrorCode.MISMATCH, f"device and server differ in {both}; deploy the same bundle on both")


def _same(theirs: Any, ours: Any) -> bool:
    """Whether two plain values are equal; 1 is 1.0, but not True, as it is in Python."""
    return bool(theirs == ours) and isinstance(theirs, bool) == isinstance(ours, bool)


def read_welcome(fields: dict[str, Any]) -> Welcome:
    """The server's consent.

    Raises:
        WireError: ``bad_message``, or the server's own refusal.
    """
    kind = fields.get("type")
    if isinstance(kind, str) and kind == "error":
        refusal = read_error(fields)
        raise WireError(refusal.code, refusal.message)
    check_head(fields, "welcome")
    bundle, target, version = (fields.get(name) for name in ("bundle", "target", "version"))
    size = fields.get("max_message_bytes")
    if not all(isinstance(value, str) for value in (bundle, target, version)) or not is_integer(size, 2**31):
        raise bad("welcome needs bundle, target and version (text) and max_message_bytes")
    return Welcome(str(bundle), str(target), str(version), size)
