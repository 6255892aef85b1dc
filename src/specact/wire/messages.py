"""The messages between device and server: msgpack lists, decoded and checked in one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, msgpack

from specact.errors import WireError
from specact.observation import Window
from specact.rng import StepAddress
from specact.types import OffloadTimes
from specact.wire.exchange import Contract, Kind, Request
from specact.wire.images import read_images, to_jpeg

PROTOCOL = 4
PATH = f"/v{PROTOCOL}/stream"
MAX_DEADLINE_MS, MAX_INSTRUCTION_CHARS = 60_000.0, 1000
# Counters that a device may report: inferences, those transmitted, those missed; units verified, those accepted.
REPORT_COUNTERS = ("steps", "transmitted", "missed", "verified", "accepted")
# Number of differences listed in an error.
_MAX_DIFFERENCES = 4

Whole = Annotated[int, Meta(ge=0)]
Identity = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Milliseconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Deadline = Annotated[float, Meta(gt=0.0, le=MAX_DEADLINE_MS)]


class ErrorCode(StrEnum):
    """Code of an error."""

    BAD_MESSAGE = "bad_message"
    UNSUPPORTED_PROTOCOL = "unsupported_protocol"
    MISMATCH = "mismatch"
    UNAUTHORIZED = "unauthorized"
    TOO_LARGE = "too_large"
    OVERLOADED = "overloaded"
    EXPIRED = "expired"
    SHUTTING_DOWN = "shutting_down"
    INTERNAL = "internal"


class Hello(Struct, array_like=True, tag="hello", frozen=True):
    """The first message of a device: its contract's family and spec, or None and nothing to ask for the server's.

    ``rate_hz`` and ``deadline_ms`` are the requests per second that it expects to send, and their deadline.
    """

    protocol: int
    robot: Annotated[str, Meta(max_length=64)]
    family: str | None = None
    spec: dict[str, Any] = {}
    rate_hz: Annotated[float, Meta(gt=0.0, le=1e4)] | None = None
    deadline_ms: Deadline | None = None


class Welcome(Struct, array_like=True, tag="welcome", frozen=True):
    """The server's acceptance: ``target`` is a fingerprint; see :meth:`~specact.wire.exchange.Contract.describe`."""

    protocol: int
    bundle: str
    target: str
    version: str
    max_message_bytes: Whole
    family: str
    spec: dict[str, Any]
    kinds: dict[str, Any]


class Ask(Struct, array_like=True, gc=False):
    """A request: bytes of the observation's arrays and of the kind's, and the camera frames where they are JPEG."""

    kind: str
    id: Identity
    deadline_ms: Annotated[float, Meta(ge=0.0, le=MAX_DEADLINE_MS)]
    address: tuple[Whole, Whole, Whole, Whole]
    window: bytearray
    arrays: bytearray = bytearray()
    instruction: Annotated[str, Meta(max_length=MAX_INSTRUCTION_CHARS)] | None = None
    jpegs: list[bytes] | None = None
    report: Annotated[list[Identity], Meta(max_length=len(REPORT_COUNTERS))] = []


class Reply(Struct, array_like=True, tag="reply", gc=False):
    """The reply to a request. Only durations are sent, so that no two clocks are compared."""

    id: Identity
    queue_ms: Milliseconds
    target_ms: Milliseconds
    total_ms: Milliseconds
    batch: Annotated[int, Meta(ge=1)]
    arrays: bytearray


class Failure(Struct, array_like=True, tag="error", gc=False):
    """An error reply; ``id`` is None if it answers no request, or one whose id cannot be read."""

    id: Identity | None
    code: ErrorCode
    message: str


encode = msgpack.Encoder().encode


def _reader(kind: Any) -> Callable[[bytes | bytearray | str], Any]:
    decode = msgpack.Decoder(kind).decode

    def read(payload: Any) -> Any:
        """A message, whose arrays are not read yet; raises WireError, ``bad_message``."""
        try:
            return decode(payload)
        # Text that is no UTF-8 is a ValueError, a message of text a TypeError; deep nesting raises RecursionError.
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
            raise bad(f"this is not a message of protocol {PROTOCOL}: {printable(str(error), 200)}") from None

    return read


read_ask: Callable[[bytes | bytearray], Ask] = _reader(Ask)
read_reply: Callable[[bytes | bytearray | str], Reply | Failure] = _reader(Reply | Failure)
_read_hello: Callable[[bytes | bytearray], Hello] = _reader(Hello)
_read_welcome: Callable[[bytes | bytearray | str], Welcome | Failure] = _reader(Welcome | Failure)


def read_hello(payload: bytes | bytearray) -> Hello:
    """A device's first message; WireError, ``bad_message`` or ``unsupported_protocol``, for one that is not."""
    hello = _read_hello(payload)
    if hello.protocol != PROTOCOL:
        raise WireError(
            ErrorCode.UNSUPPORTED_PROTOCOL,
            f"the server uses protocol {PROTOCOL}, the device {hello.protocol}; install the same version of specact on "
            "both",
        )
    if not hello.robot.isprintable():
        raise bad("the name of a robot must be printable")
    return hello


def read_welcome(payload: bytes | bytearray | str) -> Welcome:
    """The server's answer to a hello; WireError, ``bad_message`` or the server's error, for any other."""
    welcome = _read_welcome(payload)
    if isinstance(welcome, Failure):
        raise WireError(welcome.code, printable(welcome.message))
    return welcome


def ask(
    request: Request, contract: Contract, kind: str, identity: int, deadline_ms: float,
    report: Mapping[str, int] | None = None, jpeg_quality: int | None = None,
) -> Ask:  # fmt: skip
    """A request for the wire; its window is cut to the target's observation."""
    spec = contract.observation
    window, jpegs, layout = spec.select(request.window), None, contract.window
    if jpeg_quality is not None and spec.images:
        layout = contract.vectors
        frames = (window.arrays[name].reshape(-1, *spec[name].shape) for name in spec.images)
        jpegs = [file for series in frames for file in to_jpeg(series, jpeg_quality)]
    return Ask(
        kind, identity, deadline_ms, tuple(request.address), layout.pack(window.arrays),  # type: ignore[arg-type]
        contract.kinds[kind].request.pack(request.arrays), window.instruction, jpegs,
        [report.get(name, 0) for name in REPORT_COUNTERS] if report else [],
    )  # fmt: skip


def request_of(message: Ask, contract: Contract) -> Request:
    """The request in one message, or its error, see :func:`requests_of`."""
    [request] = requests_of([message], contract)
    if isinstance(request, WireError):
        raise request
    return request


def requests_of(messages: Sequence[Ask], contract: Contract) -> list[Request | WireError]:
    """The requests in messages of one kind, checked together: every array is finite and in range, or there is an error.

    An unknown kind is a WireError, ``bad_message``, for all of them.
    """
    kind = contract.kinds.get(messages[0].kind)
    if kind is None:
        raise bad(f"unknown kind of request {messages[0].kind!a:.40}; this server answers {', '.join(contract.kinds)}")
    faults = kind.request.faults([message.arrays for message in messages])
    faults.update(_window_faults(messages, contract))
    return [faults.get(row) or _read(message, contract, kind) for row, message in enumerate(messages)]


def _window_faults(messages: Sequence[Ask], contract: Contract) -> Iterator[tuple[int, WireError]]:
    if not contract.observation.images:
        yield from contract.window.faults([message.window for message in messages]).items()
        return
    for row, message in enumerate(messages):
        layout = contract.window if message.jpegs is None else contract.vectors
        for fault in layout.faults([message.window]).values():
            yield row, fault


def _read(message: Ask, contract: Contract, kind: Kind) -> Request | WireError:
    spec = contract.observation
    if spec.instruction and message.instruction is None:
        return bad("this target needs an instruction")
    if message.jpegs is None or not spec.images:
        window = contract.window.views(message.window)
    else:
        try:
            window = contract.vectors.views(message.window) | read_images(message.jpegs, spec)
        except WireError as error:
            return error
    instruction = message.instruction if spec.instruction else None
    return Request(Window(window, instruction), StepAddress(*message.address), kind.request.views(message.arrays))


def exchange_bytes(contract: Contract) -> int:
    """Bytes of a step's request and of its reply, with uncompressed camera frames."""
    kind, large = contract.kinds[contract.step_kind], 2**32
    request = Request(contract.observation.zeros(), StepAddress(0, 0, 0, 0), kind.request.example())
    message = ask(request, contract, contract.step_kind, large, 1.0)
    return len(encode(message)) + len(encode(Reply(large, 1.0, 1.0, 1.0, 1, bytearray(kind.reply.nbytes))))


def check_terms(contract: Contract, family: str | None, spec: Mapping[str, Any], fingerprint: str = "") -> None:
    """Compares the other side's family, spec and, where both are known, fingerprint of the target with ours.

    WireError, ``mismatch``, names the differences.
    """
    differs = [text for name, ours in contract.spec.items() for text in _differences(name, spec.get(name, ...), ours)]
    if fingerprint and contract.fingerprint not in ("", fingerprint):
        differs.append(f"the target's fingerprint {fingerprint} / {contract.fingerprint}")
    if family != contract.family:
        said = f"one side has policies of the family {family!a:.40}, the other {contract.family}"
    elif differs:
        more = f" and {len(differs) - _MAX_DIFFERENCES} more" if len(differs) > _MAX_DIFFERENCES else ""
        said = f"both sides differ in {', '.join(differs[:_MAX_DIFFERENCES])}{more}"
    else:
        return
    raise WireError(ErrorCode.MISMATCH, f"{said}; deploy the same bundle on both")


def _differences(path: str, theirs: Any, ours: Any) -> Iterator[str]:
    """Paths and values in which two plain values differ; 1 equals 1.0 but, unlike in Python, not True."""
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        for key in {**ours, **theirs}:
            yield from _differences(f"{path}.{key!s:.60}", theirs.get(key, ...), ours.get(key, ...))
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for place, pair in enumerate(zip(theirs, ours, strict=True)):
            yield from _differences(f"{path}.{place}", *pair)
    elif theirs != ours or isinstance(theirs, bool) != isinstance(ours, bool):
        texts = ["missing" if value is ... else ascii(value)[:60] for value in (theirs, ours)]
        yield f"{ascii(path)[1:-1]} {texts[0]} / {texts[1]}"


def device_times(reply: Reply, encode_s: float, waited_s: float, decode_s: float) -> OffloadTimes:
    """The stages of a request: the server's durations, scaled down if they exceed the time waited, and the device's."""
    queue, target = reply.queue_ms / 1e3, reply.target_ms / 1e3
    at_server = max(reply.total_ms / 1e3, queue + target)
    scale = min(1.0, waited_s / at_server) if at_server else 1.0
    encode_s += decode_s + max(0.0, scale * (at_server - queue - target))
    return OffloadTimes(encode_s, max(0.0, waited_s - scale * at_server), scale * queue, scale * target)


def printable(text: str, limit: int = 500) -> str:
    """A peer's text made safe for a terminal: truncated, with a question mark for each non-printable character."""
    return "".join(char if char.isprintable() else "?" for char in text[:limit])


def bad(message: str) -> WireError:
    """A ``bad_message`` error; the message should state what is allowed."""
    return WireError(ErrorCode.BAD_MESSAGE, message)
