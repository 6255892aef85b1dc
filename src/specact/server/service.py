"""From a message to its reply: the one way through the server, for the stream and for HTTP."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from specact import __version__
from specact.errors import WireError
from specact.policies.bundle import Bundle
from specact.server.settings import ServerSettings
from specact.server.telemetry import Robot, Telemetry
from specact.server.worker import Result, TargetWorker
from specact.wire.checks import request_id
from specact.wire.handshake import Welcome, check_hello, read_hello, shared_spec, welcome_fields
from specact.wire.protocol import ErrorCode, max_message_bytes
from specact.wire.reply import DistributionReply, ErrorReply, ServerTimes, VerdictReply, reply_fields
from specact.wire.request import Request, read_request

Fields = dict[str, Any]
_log = logging.getLogger("specact.server")


class Service:
    """A bundle's target, its worker, and the books on both.

    Args:
        bundle: what is served.
        settings: how much the server takes on.
    """

    def __init__(self, bundle: Bundle, settings: ServerSettings) -> None:
        self.bundle, self.settings = bundle, settings
        self.limit = max_message_bytes(bundle.spec)
        self.telemetry = Telemetry(bundle.name)
        self.worker = TargetWorker(bundle, settings.max_batch, settings.max_queue, settings.max_wait_ms)
        self.draining = False
        self._under_way = 0

    def hello(self, fields: Fields) -> tuple[str, Fields]:
        """The robot's name and the welcome.

        Raises:
            WireError: if device and server do not fit together.
        """
        hello = read_hello(fields)
        check_hello(hello, shared_spec(self.bundle.spec), self.bundle.tokenizer.fingerprint)
        target = self.bundle.manifest["fingerprints"]["target"]
        return hello.robot, welcome_fields(Welcome(self.bundle.name, target, __version__, self.limit))

    async def answer(self, fields: Fields, arrived: float, robot: Robot | None = None) -> Fields:
        """The reply to a request; an error reply where there is no result, never an exception.

        Args:
            fields: the decoded message.
            arrived: when its frame came in, in seconds of the monotonic clock.
            robot: whose request it is, where that is known.
        """
        said = fields.get("type")
        kind = said if isinstance(said, str) and said in ("infer", "verify") else "other"
        self._under_way += 1
        try:
            request = read_request(fields, self.bundle.spec)
            if robot is not None and request.report:
                robot.report = request.report
            if self.draining:
                raise WireError(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
            reply = _reply(request, await self.worker.submit(request, arrived), arrived)
        except WireError as error:
            return self._refused(kind, error, fields, robot)
        # The border of the process: no message may cost its sender more than an error reply.
        except Exception:  # noqa: BLE001
            _log.exception("a request failed")
            failure = WireError(ErrorCode.INTERNAL, "the request failed; see the server's log")
            return self._refused(kind, failure, fields, robot)
        finally:
            self._under_way -= 1
        self.telemetry.answered(kind, reply.times, robot)
        return reply_fields(reply)

    def _refused(self, kind: str, error: WireError, fields: Fields, robot: Robot | None) -> Fields:
        self.telemetry.refused(kind, error.code, robot)
        return reply_fields(ErrorReply(request_id(fields), ErrorCode(error.code), str(error)))

    async def drain(self) -> None:
        """Refuses what is new and waits for what is under way, for ``drain_s`` seconds at most."""
        self.draining = True
        until = time.monotonic() + self.settings.drain_s
        while self._under_way and time.monotonic() < until:
            await asyncio.sleep(0.005)


def refusal(error: WireError) -> Fields:
    """An error that belongs to no request."""
    return reply_fields(ErrorReply(None, ErrorCode(error.code), str(error)))


def _reply(request: Request, result: Result, arrived: float) -> DistributionReply | VerdictReply:
    times = ServerTimes(
        queue_ms=max(0.0, 1e3 * result.queued_s),
        target_ms=1e3 * result.target_s,
        total_ms=1e3 * (time.monotonic() - arrived),
        batch=result.batch,
    )
    if result.verdict is None or result.chunk is None:
        return DistributionReply(request.id, result.target, times)
    return VerdictReply(request.id, result.verdict, result.chunk, times)
