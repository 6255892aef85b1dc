"""A worker pool of processes, on this machine or on a Ray cluster."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context, parent_process
from types import TracebackType
from typing import TypeVar

import numpy as np

from specact.errors import ConfigError, SpecactError
from specact.lab.rollout.cluster import HERE, check_place
from specact.lab.rollout.rollout import Outcome, Shard, run_shard

_LOOK_EVERY_S = 0.5
Item = TypeVar("Item")
Output = TypeVar("Output")
Result = tuple[list[Outcome], dict[str, np.ndarray]]


class Pool:
    """A pool of ``workers`` processes; one local worker is this process.

    Use it as a context manager: the processes live until its exit, and cache loaded models.

    Args:
        workers: processes; one per core if None.
        on: ``here``, on this machine; ``ray``, on a new Ray cluster on this machine; or ``ray:ADDRESS``.

    Attributes:
        workers: their number; for a cluster it is known inside the context.

    Raises:
        ConfigError: for less than one worker, or another place.
    """

    def __init__(self, workers: int | None = None, on: str = HERE) -> None:
        if workers is not None and workers < 1:
            raise ConfigError(f"workers must be at least 1, got {workers}")
        check_place(on)
        self.workers = os.cpu_count() or 1 if workers is None else workers
        self._requested, self._on = workers, on
        self._executor: Executor | None = None

    def __enter__(self) -> Pool:
        if self._on != HERE:
            from specact.lab.rollout.ray_executor import RayExecutor

            self._executor = cluster = RayExecutor(self._on, self._requested)
            self.workers = cluster.workers
        elif self.workers > 1:
            self._executor = ProcessPoolExecutor(
                self.workers, mp_context=get_context("spawn"), initializer=_prepare_worker
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._executor is None:
            return
        if kind is not None and self._on == HERE:
            for process in active_children():
                process.terminate()
        self._executor.shutdown(cancel_futures=True)

    def run(self, shards: Sequence[Shard]) -> Iterator[tuple[Shard, Result]]:
        """Yields every shard with its result, as :meth:`each` does."""
        return self.each(run_shard, shards)

    def each(
        self, work: Callable[[Item], Output], items: Iterable[Item], meanwhile: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[Item, Output]]:
        """Yields every item with its result of ``work``, in order of completion.

        Args:
            work: a module-level function.
            items: its arguments.
            meanwhile: called now and then while other processes work.

        Raises:
            SpecactError: if a worker process was killed.
            RuntimeError: outside of the context, where there are no processes.
        """
        if self._executor is None:
            if self.workers > 1 or self._on != HERE:
                raise RuntimeError("the pool is not running; use it as `with Pool(...) as pool:`")
            yield from ((item, work(item)) for item in items)
            return
        futures = {self._executor.submit(work, item): item for item in items}
        try:
            pending = set(futures)
            while pending:
                done, pending = wait(pending, _LOOK_EVERY_S, FIRST_COMPLETED)
                meanwhile()
                for future in done:
                    yield futures[future], future.result()
        except BrokenProcessPool:
            raise SpecactError(
                "a worker process was killed, most likely for lack of memory; run the same command again with fewer "
                "of them (--workers 1, of a training --jobs 1): finished results and checkpoints are kept"
            ) from None


def _prepare_worker() -> None:
    """Limits a worker's libraries to one thread, and makes it end with its parent, which alone handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["LP_NUM_THREADS"] = "0"  # Mesa's software renderer
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this worker when its parent dies; after a kill it would otherwise wait forever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
