"""Inferences of a chunk policy for a control loop, one at a time: beside it in a thread, or while it waits."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol

import numpy as np

from specact.errors import BundleError, ObservationError
from specact.families.chunks.policy import Chunk, ChunkPolicy, ChunkSpec, Inpainting
from specact.observation import Window
from specact.rng import Role, StepAddress, StepStreams
from specact.types import Miss, OffloadTimes


class ChunkSource(Protocol):
    """Where a robot's chunks come from: a policy in this process, or on a server."""

    @property
    def spec(self) -> ChunkSpec:
        """What the policy needs to see, and what it gives."""
        ...

    @property
    def inpaints(self) -> bool:
        """Whether :meth:`ask` understands inpainting."""
        ...

    def ask(self, window: Window, address: StepAddress, inpainting: Inpainting | None = None) -> Chunk | Miss:
        """The chunk ``[H, A]`` for a window, in the environment's units and finite; the caller waits for it."""
        ...


class LocalSource:
    """A chunk policy in this process, which draws what it would draw on a server.

    Args:
        policy: the policy.
    """

    def __init__(self, policy: ChunkPolicy) -> None:
        self._policy, self._streams = policy, StepStreams()
        self.spec, self.inpaints = policy.spec, policy.inpaints

    def ask(self, window: Window, address: StepAddress, inpainting: Inpainting | None = None) -> Chunk | Miss:
        """See :class:`ChunkSource`; a chunk that is not finite is a miss of cause ``invalid``.

        Raises:
            BundleError: if the policy's answer is none of its spec.
        """
        try:
            chunk = self._policy.infer(window, self._streams(Role.VERIFY, address), inpainting)
        except ObservationError:
            return Miss("invalid", OffloadTimes(), sent=False)
        shape = (self.spec.chunk, self.spec.actions)
        if np.shape(chunk) != shape:
            raise BundleError(f"the policy must answer with a chunk of shape {shape}, it gave {np.shape(chunk)}")
        return chunk if np.isfinite(chunk).all() else Miss("invalid", OffloadTimes(), sent=False)


@dataclass(frozen=True, slots=True)
class Finished:
    """An inference that has ended.

    Attributes:
        address: of its random stream.
        answer: what came of it.
        took_s: how long it took [s].
    """

    address: StepAddress
    answer: Chunk | Miss
    took_s: float


class Inference(Protocol):
    """Inferences that go on while others act, one at a time."""

    @property
    def source(self) -> ChunkSource:
        """Where the chunks come from."""
        ...

    @property
    def busy(self) -> bool:
        """Whether one has begun whose end nobody has taken."""
        ...

    def begin(self, window: Window, address: StepAddress, inpainting: Inpainting | None) -> None:
        """Begins one; only where it is not busy."""
        ...

    def take(self) -> Finished | None:
        """The one that has ended, once; never waits.

        Raises:
            Exception: what the inference raised.
        """
        ...

    def wait(self, seconds: float) -> bool:
        """Waits for the end of the one that has begun, for at most ``seconds``; returns whether it has ended."""
        ...


class InlineInference:
    """See :class:`Inference`; :meth:`begin` waits for the end, for loops in which the world waits as well.

    Args:
        source: where the chunks come from.
    """

    def __init__(self, source: ChunkSource) -> None:
        self.source = source
        self._found: Finished | None = None

    @property
    def busy(self) -> bool:
        """See :class:`Inference`."""
        return self._found is not None

    def begin(self, window: Window, address: StepAddress, inpainting: Inpainting | None) -> None:
        """See :class:`Inference`."""
        began = time.perf_counter()
        answer = self.source.ask(window, address, inpainting)
        self._found = Finished(address, answer, time.perf_counter() - began)

    def take(self) -> Finished | None:
        """See :class:`Inference`."""
        found, self._found = self._found, None
        return found

    def wait(self, seconds: float) -> bool:
        """See :class:`Inference`."""
        return self.busy


class InferenceThread:
    """See :class:`Inference`. Use it as a context manager, or call :meth:`close`.

    Args:
        source: where the chunks come from; used in the thread alone.
    """

    def __init__(self, source: ChunkSource) -> None:
        self.source, self.busy = source, False
        self._asked: SimpleQueue[tuple[Window, StepAddress, Inpainting | None] | None] = SimpleQueue()
        self._ended = threading.Event()
        self._found: Finished | Exception | None = None
        # A daemon: a policy that never answers must not keep the process from ending.
        self._thread = threading.Thread(target=self._infer, name="specact inference", daemon=True)
        self._thread.start()

    def __enter__(self) -> InferenceThread:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self, within_s: float = 5.0) -> None:
        """Ends the thread after the inference under way; waits for that for at most so long [s]."""
        self._asked.put(None)
        self._thread.join(within_s)

    def begin(self, window: Window, address: StepAddress, inpainting: Inpainting | None) -> None:
        """See :class:`Inference`."""
        self.busy = True
        self._asked.put((window, address, inpainting))

    def take(self) -> Finished | None:
        """See :class:`Inference`."""
        if not self._ended.is_set():
            return None
        found, self._found = self._found, None
        self._ended.clear()
        self.busy = False
        if isinstance(found, Exception):
            raise found
        return found

    def wait(self, seconds: float) -> bool:
        """See :class:`Inference`."""
        return self.busy and self._ended.wait(seconds)

    def _infer(self) -> None:
        while (asked := self._asked.get()) is not None:
            began = time.perf_counter()
            try:
                answer = self.source.ask(*asked)
                self._found = Finished(asked[1], answer, time.perf_counter() - began)
            except Exception as error:  # noqa: BLE001 - raised again where the answer is taken
                self._found = error
            self._ended.set()
