"""The thread that owns the target: it takes what is queued when it becomes free, and computes nothing in vain."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specact.errors import WireError
from specact.policies.bundle import Bundle
from specact.policies.policy import CodePolicy, PolicySpec
from specact.policies.timing import measure_inference
from specact.policies.tokenizer import ActionTokenizer
from specact.rng import Role, stream
from specact.sampling import verify
from specact.types import CodeDistribution, Verdict
from specact.wire.checks import bad
from specact.wire.protocol import ErrorCode
from specact.wire.request import InferRequest, Request, VerifyRequest

_log = logging.getLogger("specact.server")


@dataclass(frozen=True, slots=True)
class Result:
    """What the target made of a request.

    Attributes:
        target: its distribution; ``verdict`` and ``chunk`` where the server sampled.
        queued_s, target_s: how long the request waited, and the inference took.
        batch: requests in that inference.
    """

    target: CodeDistribution
    verdict: Verdict | None
    chunk: np.ndarray | None
    queued_s: float
    target_s: float
    batch: int


@dataclass(slots=True)
class _Job:
    request: Request
    arrived: float
    future: asyncio.Future[Result]


class TargetWorker:
    """Micro-batching without waiting: the batch is what came in while the last one was computed.

    Args:
        bundle: whose target it owns.
        max_batch, max_queue, max_wait_ms: see :class:`~specact.server.settings.ServerSettings`.
    """

    def __init__(self, bundle: Bundle, max_batch: int, max_queue: int, max_wait_ms: float) -> None:
        self._policy: CodePolicy = bundle.target
        self._spec: PolicySpec = bundle.spec
        self._tokenizer: ActionTokenizer = bundle.tokenizer
        self._max_batch, self._max_queue, self._max_wait_s = max_batch, max_queue, max_wait_ms / 1e3
        self._queue: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="specact target", daemon=True)
        self.ready = False

    def start(self) -> None:
        """Warms the target up and starts taking requests."""
        measure_inference(self._policy, self._spec, repeats=20)
        self._thread.start()
        self.ready = True

    def stop(self) -> None:
        """Ends the thread; what is still queued is answered first."""
        with self._changed:
            self._closing, self.ready = True, False
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def queued(self) -> int:
        """Requests that wait now."""
        return len(self._queue)

    def submit(self, request: Request, arrived: float) -> asyncio.Future[Result]:
        """Queues a request; call it on the event loop that awaits the result.

        Args:
            request: checked already.
            arrived: when its frame came in, in seconds of the monotonic clock.

        Raises:
            WireError: ``overloaded`` if the queue is full, ``shutting_down`` if it is closed; as the future's exception
                ``expired`` if the deadline passed first, ``internal`` if the target failed.
        """
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        with self._changed:
            if self._closing:
                raise WireError(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
            if len(self._queue) >= self._max_queue:
                raise WireError(ErrorCode.OVERLOADED, f"{self._max_queue} requests are waiting already")
            self._queue.append(_Job(request, arrived, future))
            self._changed.notify()
        return future

    def _work(self) -> None:
        while taken := self._take():
            now = time.monotonic()
            # Where a connection is gone, nobody waits.
            jobs = [job for job in taken if not job.future.cancelled()]
            alive = [job for job in jobs if now - job.arrived <= job.request.deadline_ms / 1e3]
            outcomes: list[tuple[_Job, Result | WireError]] = [
                (job, WireError(ErrorCode.EXPIRED, "the deadline passed in the queue"))
                for job in jobs
                if now - job.arrived > job.request.deadline_ms / 1e3
            ]
            if alive:
                outcomes += zip(alive, self._answer(alive, now), strict=True)
            for loop in {job.future.get_loop() for job in jobs}:
                own = [(job, outcome) for job, outcome in outcomes if job.future.get_loop() is loop]
                loop.call_soon_threadsafe(_resolve, own)

    def _take(self) -> list[_Job]:
        """The next batch; empty when it is time to end."""
        with self._changed:
            while not self._queue and not self._closing:
                self._changed.wait()
            if self._max_wait_s > 0.0:
                until = time.monotonic() + self._max_wait_s
                while len(self._queue) < self._max_batch and (left := until - time.monotonic()) > 0.0:
                    if self._closing:
                        break
                    self._changed.wait(left)
            return [self._queue.popleft() for _ in range(min(len(self._queue), self._max_batch))]

    def _answer(self, jobs: Sequence[_Job], started: float) -> list[Result | WireError]:
        try:
            targets = self._policy.infer_batch([job.request.window for job in jobs])
            sampled = [self._sample(job.request, target) for job, target in zip(jobs, targets, strict=True)]
        # The border of the process: whatever the runtime raises, the server lives on and says nothing of its inside.
        except Exception:  # noqa: BLE001
            _log.exception("the target failed")
            return [WireError(ErrorCode.INTERNAL, "the target failed; see the server's log") for _ in jobs]
        spent = time.monotonic() - started
        return [
            found if isinstance(found, WireError) else Result(target, *found, started - job.arrived, spent, len(jobs))
            for job, target, found in zip(jobs, targets, sampled, strict=True)
        ]

    def _sample(
        self, request: Request, target: CodeDistribution
    ) -> tuple[Verdict | None, np.ndarray | None] | WireError:
        """Verdict and chunk, where the server samples; one request's fault is no other's in its batch."""
        # An observation far beyond those of training overflows inside.
        if not np.isfinite(target.probs).all() or not np.isfinite(target.offsets).all():
            return bad("the target has no finite answer to this observation")
        if isinstance(request, InferRequest):
            return None, None
        return verdict_of(request, target, self._tokenizer)


def verdict_of(
    request: VerifyRequest, target: CodeDistribution, tokenizer: ActionTokenizer
) -> tuple[Verdict, np.ndarray]:
    """What a device with this target would have drawn itself: the same code, with the same random stream."""
    seed, robot, episode, step = request.address
    draft = CodeDistribution(request.draft_probs, target.offsets, request.draft_conditional)
    rng = stream(seed, Role.VERIFY, robot=robot, episode=episode, step=step)
    verdict = verify(target, draft, request.codes, rng)
    return verdict, tokenizer.decode(verdict.codes, target.offsets)


def _resolve(outcomes: Sequence[tuple[_Job, Result | WireError]]) -> None:
    for job, outcome in outcomes:
        # Cancelled where its connection is gone.
        if job.future.done():
            continue
        if isinstance(outcome, WireError):
            job.future.set_exception(outcome)
        else:
            job.future.set_result(outcome)
