"""Inferences of a chunk policy for a control loop, one at a time: in a thread, or inline."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol

import numpy as np

from specact.errors import BundleError, MissError, ObservationError
from specact.families.chunks.policy import Chunk, ChunkPolicy, ChunkSpec, Inpainting
from specact.observation import Window
from specact.rng import Role, StepAddress, StepStreams
from specact.types import Miss, OffloadTimes
from specact.verification import Pending


class ChunkSource(Protocol):
    """Source of a robot's chunks: a policy in this process, or on a server."""

    @property
    def spec(self) -> ChunkSpec:
        """The policy's observations and chunks."""
        ...

    @property
    def inpaints(self) -> bool:
        """Whether :meth:`ask` supports inpainting."""
        ...

    def ask(self, window: Window, address: StepAddress, inpainting: Inpainting | None = None) -> Chunk | Miss:
        """The chunk ``[H, A]`` for a window, finite and in the environment's units; blocks."""
        ...


class LocalSource:
    """A chunk policy in this process, with the same random streams as on a server.

    Args:
        policy: the policy.
    """

    def __init__(self, policy: ChunkPolicy) -> None:
        self._policy, self._streams = policy, StepStreams()
        self.spec, self.inpaints = policy.spec, policy.inpaints

    def ask(self, window: Window, address: StepAddress, inpainting: Inpainting | None = None) -> Chunk | Miss:
        """See :class:`ChunkSource`; a chunk that is not finite is a miss of cause ``invalid``.

        Raises:
            BundleError: if the policy's chunk does not match its spec.
        """
        try:
            chunk = self._policy.infer(window, self._streams(Role.VERIFY, address), inpainting)
        except ObservationError:
            return Miss("invalid", OffloadTimes(), sent=False)
        except MissError as error:
            return Miss.of(error, OffloadTimes())
        shape = (self.spec.chunk, self.spec.actions)
        if np.shape(chunk) != shape:
            raise BundleError(f"the policy must answer with a chunk of shape {shape}, it gave {np.shape(chunk)}")
        return chunk if np.isfinite(chunk).all() else Miss("invalid", OffloadTimes(), sent=False)


@dataclass(frozen=True, slots=True)
class Finished:
    """An inference that has ended.

    Attributes:
        address: of its random stream.
        answer: its chunk, or a miss.
        took_s: its latency [s].
    """

    address: StepAddress
    answer: Chunk | Miss
    took_s: float


class Inference(Protocol):
    """Inferences that run concurrently with the control loop, one at a time."""

    @property
    def source(self) -> ChunkSource:
        """Source of the chunks."""
        ...

    def begin(self, window: Window, address: StepAddress, inpainting: Inpainting | None) -> Pending[Finished]:
        """Begins one; only after the last one is done. Its result raises what the inference raised."""
        ...

    def wait(self, seconds: float) -> bool:
        """Waits for the current inference, for at most ``seconds``; whether it is done."""
        ...


class InlineInference:
    """See :class:`Inference`; :meth:`begin` blocks, for simulated loops whose time stands still meanwhile.

    Args:
        source: of the chunks.
    """

    def __init__(self, source: ChunkSource) -> None:
        self.source = source

    def begin(self, window: Window, address: StepAddress, inpainting: Inpainting | None) -> Pending[Finished]:
        began = time.perf_counter()
        answer = self.source.ask(window, address, inpainting)
        finished = Finished(address, answer, time.perf_counter() - began)
        return Pending(lambda: finished)

    def wait(self, seconds: float) -> bool:
        return True


class InferenceThread:
    """See :class:`Inference`. Use it as a context manager, or call :meth:`close`.

    Args:
        source: of the chunks; used in the thread only.
    """

    def __init__(self, source: ChunkSource) -> None:
        self.source = source
        self._requests: SimpleQueue[tuple[Window, StepAddress, Inpainting | None] | None] = SimpleQueue()
        self._finished = threading.Event()
        self._result: Finished | BaseException | None = None
        # A daemon: a policy that never answers must not block the process's exit.
        self._thread = threading.Thread(target=self._infer, name="specact inference", daemon=True)
        self._thread.start()

    def __enter__(self) -> InferenceThread:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self, within_s: float = 5.0) -> None:
        """Ends the thread after the current inference; waits for at most ``within_s`` [s]."""
        self._requests.put(None)
        self._thread.join(within_s)

    def begin(self, window: Window, address: StepAddress, inpainting: Inpainting | None) -> Pending[Finished]:
        self._finished.clear()
        self._requests.put((window, address, inpainting))
        return Pending(self._take, self._finished.is_set)

    def wait(self, seconds: float) -> bool:
        return self._finished.wait(seconds)

    def _take(self) -> Finished:
        result = self._result
        if isinstance(result, Finished):
            return result
        if isinstance(result, Exception):
            raise result
        # A policy that calls sys.exit would end the run as if it had succeeded.
        raise RuntimeError(f"the inference thread ended with {type(result).__name__}: {result}") from result

    def _infer(self) -> None:
        while (request := self._requests.get()) is not None:
            began = time.perf_counter()
            try:
                answer = self.source.ask(*request)
                self._result = Finished(request[1], answer, time.perf_counter() - began)
            except BaseException as error:  # noqa: BLE001 - raised again where the answer is taken
                self._result = error
            self._finished.set()
