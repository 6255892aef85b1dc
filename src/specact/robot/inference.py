"""Inferences of a chunk policy for a control loop, one at a time: in a thread, or inline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Protocol

import numpy as np

from specact.errors import BundleError, MissError, ObservationError
from specact.families.chunks.policy import Chunk, ChunkPolicy, ChunkSpec, Inpainting
from specact.observation import Window
from specact.pair import Pending
from specact.rng import Role, StepAddress, StepStreams
from specact.types import NO_OFFLOAD, Miss


class ChunkSource(Protocol):
    """Source of a robot's chunks: a policy in this process, or on a server; ``inpaints`` where it supports that."""

    @property
    def spec(self) -> ChunkSpec: ...
    @property
    def inpaints(self) -> bool: ...

    def ask(self, window: Window, address: StepAddress, inpainting: Inpainting | None = None) -> Chunk | Miss:
        """The chunk ``[H, A]`` for a window, finite and in the environment's units; blocks."""
        ...


class LocalSource:
    """A chunk policy in this process, with the same random streams as on a server.

    A chunk that is not finite is a miss of cause ``invalid``; one that does not match the spec raises BundleError.
    """

    def __init__(self, policy: ChunkPolicy) -> None:
        self._policy, self._streams = policy, StepStreams()
        self.spec, self.inpaints = policy.spec, policy.inpaints

    def ask(self, window: Window, address: StepAddress, inpainting: Inpainting | None = None) -> Chunk | Miss:
        try:
            chunk = self._policy.infer(window, self._streams(Role.VERIFY, address), inpainting)
        except ObservationError:
            return Miss("invalid", NO_OFFLOAD, sent=False)
        except MissError as error:
            return Miss.of(error, NO_OFFLOAD)
        shape = (self.spec.chunk, self.spec.actions)
        if np.shape(chunk) != shape:
            raise BundleError(f"the policy must answer with a chunk of shape {shape}, it gave {np.shape(chunk)}")
        return chunk if np.isfinite(chunk).all() else Miss("invalid", NO_OFFLOAD, sent=False)


@dataclass(frozen=True, slots=True)
class Finished:
    """An inference that has ended: the address of its random stream, its chunk or a miss, and its latency [s]."""

    address: StepAddress
    answer: Chunk | Miss
    took_s: float


class Inference:
    """Inferences of a source for a control loop, one at a time.

    These block the loop, for simulated robots whose time stands still meanwhile; :class:`InferenceThread` does not.
    """

    def __init__(self, source: ChunkSource) -> None:
        self.source = source

    def begin(self, window: Window, address: StepAddress, inpainting: Inpainting | None) -> Pending[Finished]:
        """Begins one; only after the last one is done. Its result raises what the inference raised."""
        finished = _timed(self.source, window, address, inpainting)
        return Pending(lambda: finished)

    def wait(self, seconds: float) -> bool:
        """Waits for the current inference, for at most ``seconds``; whether it is done."""
        return True


class InferenceThread(Inference):
    """Inferences in a thread, which alone uses the source. Use it as a context manager, or call :meth:`close`."""

    def __init__(self, source: ChunkSource) -> None:
        super().__init__(source)
        self._current = futures.Future[Finished]()
        self._requests: SimpleQueue[tuple[futures.Future[Finished], Callable[[], Finished]] | None] = SimpleQueue()
        # A daemon: a policy that never answers must not block the process's exit.
        self._thread = threading.Thread(target=self._infer, name="specact inference", daemon=True)
        self._thread.start()

    def __enter__(self) -> InferenceThread:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self, within_s: float = 5.0) -> None:
        """Ends the thread after the current inference; waits for at most ``within_s`` [s]."""
        self._requests.put(None)
        self._thread.join(within_s)

    def begin(self, window: Window, address: StepAddress, inpainting: Inpainting | None) -> Pending[Finished]:
        self._current = futures.Future()
        self._requests.put((self._current, partial(_timed, self.source, window, address, inpainting)))
        return Pending(self._current.result, self._current.done)

    def wait(self, seconds: float) -> bool:
        return bool(futures.wait([self._current], seconds).done)

    def _infer(self) -> None:
        while (request := self._requests.get()) is not None:
            future, infer = request
            try:
                future.set_result(infer())
            except Exception as error:  # noqa: BLE001 - raised again where the answer is taken
                future.set_exception(error)
            except BaseException as error:  # noqa: BLE001 - sys.exit would end the run as if it had succeeded
                future.set_exception(RuntimeError(f"the inference thread ended with {type(error).__name__}: {error}"))


def _timed(source: ChunkSource, window: Window, address: StepAddress, inpainting: Inpainting | None) -> Finished:
    began = time.perf_counter()
    answer = source.ask(window, address, inpainting)
    return Finished(address, answer, time.perf_counter() - began)
