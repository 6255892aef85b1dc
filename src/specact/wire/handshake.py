"""The handshake: a device sends its family and spec; the server accepts or reports the differences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specact.errors import WireError
from specact.wire.checks import PROTOCOL, ErrorCode, bad, check_head, is_integer, is_plain, quoted
from specact.wire.dialect import Dialect
from specact.wire.messages import read_error

# Number of differences listed in an error.
_MAX_DIFFERENCES = 4


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a device, so that an incompatible pair is refused before it acts.

    Attributes:
        robot: a name for the status page, at most 64 characters.
        family: of its policies, or None to query the server's.
        spec: the ``agreed`` settings of its :class:`~specact.wire.dialect.Dialect`; empty to query the server's.
    """

    robot: str
    family: str | None
    spec: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Welcome:
    """The server's acceptance.

    Attributes:
        bundle, target: name of the served bundle and fingerprint of its target.
        version: of the server's package.
        max_message_bytes: the largest message it reads.
        family, spec: of its dialect.
    """

    bundle: str
    target: str
    version: str
    max_message_bytes: int
    family: str
    spec: Mapping[str, Any]


def hello_fields(hello: Hello) -> dict[str, Any]:
    """As a map of plain values."""
    return {"v": PROTOCOL, "type": "hello", "robot": hello.robot, "family": hello.family, "spec": dict(hello.spec)}


def welcome_fields(welcome: Welcome) -> dict[str, Any]:
    """As a map of plain values."""
    return {
        "v": PROTOCOL,
        "type": "welcome",
        "bundle": welcome.bundle,
        "target": welcome.target,
        "version": welcome.version,
        "max_message_bytes": welcome.max_message_bytes,
        "family": welcome.family,
        "spec": dict(welcome.spec),
    }


def read_hello(fields: dict[str, Any]) -> Hello:
    """A device's first message.

    Raises:
        WireError: ``bad_message``, or ``unsupported_protocol``.
    """
    check_head(fields, "hello")
    robot, family, spec = (fields.get(name) for name in ("robot", "family", "spec"))
    named = "family" in fields and isinstance(family, str | None)
    if not isinstance(robot, str) or not named or not isinstance(spec, dict):
        raise bad("hello needs robot (text), family (text or null) and spec (map)")
    if len(robot) > 64 or not robot.isprintable() or not is_plain(spec):
        raise bad(
            "hello: robot is at most 64 printable characters; spec holds texts, numbers, booleans, null, and lists and "
            "maps of these"
        )
    return Hello(robot, family, spec)


def check_hello(hello: Hello, dialect: Dialect) -> None:
    """Compares a device's family and spec with the server's; a device without both is accepted.

    Raises:
        WireError: ``mismatch``, with the differences.
    """
    if hello.family is None and not hello.spec:
        return
    if hello.family != dialect.family:
        raise WireError(
            ErrorCode.MISMATCH,
            f"the device has policies of the family {quoted(hello.family)}, the server {dialect.family}; deploy the "
            "same bundle on both",
        )
    differs = [text for name, ours in dialect.agreed.items() for text in _differences(name, hello.spec, name, ours)]
    if differs:
        more = f" and {len(differs) - _MAX_DIFFERENCES} more" if len(differs) > _MAX_DIFFERENCES else ""
        listed = ", ".join(differs[:_MAX_DIFFERENCES])
        raise WireError(
            ErrorCode.MISMATCH, f"device and server differ in {listed}{more}; deploy the same bundle on both"
        )


def _differences(path: str, given: Mapping[str, Any], name: str, ours: Any) -> list[str]:
    """Differences between the device's value of this name and ours, recursively."""
    if name not in given:
        return [f"{path} None / {ascii(ours)[:60]}"]
    theirs = given[name]
    if not isinstance(ours, Mapping) or not isinstance(theirs, Mapping):
        return [] if _same(theirs, ours) else [f"{path} {ascii(theirs)[:60]} / {ascii(ours)[:60]}"]
    unknown = [f"{path}.{quoted(key)} / None" for key in theirs if key not in ours]
    return [text for key in ours for text in _differences(f"{path}.{key}", theirs, key, ours[key])] + unknown


def _same(theirs: Any, ours: Any) -> bool:
    """Whether two plain values are equal; 1 equals 1.0 but, unlike in Python, not True."""
    if isinstance(ours, list):
        return isinstance(theirs, list) and len(theirs) == len(ours) and all(map(_same, theirs, ours))
    return bool(theirs == ours) and isinstance(theirs, bool) == isinstance(ours, bool)


def read_welcome(fields: dict[str, Any]) -> Welcome:
    """The server's acceptance.

    Raises:
        WireError: ``bad_message``, or the server's error.
    """
    kind = fields.get("type")
    if isinstance(kind, str) and kind == "error":
        refusal = read_error(fields)
        raise WireError(refusal.code, refusal.message)
    check_head(fields, "welcome")
    texts = [fields.get(name) for name in ("bundle", "target", "version", "family")]
    size, spec = fields.get("max_message_bytes"), fields.get("spec")
    if not all(isinstance(value, str) for value in texts) or not is_integer(size, 2**31) or not isinstance(spec, dict):
        raise bad("welcome needs bundle, target, version and family (text), max_message_bytes, and spec (map)")
    bundle, target, version, family = (str(value) for value in texts)
    return Welcome(bundle, target, version, size, family, spec)
