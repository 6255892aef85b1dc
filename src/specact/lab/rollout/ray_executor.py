"""A :class:`concurrent.futures.Executor` on a Ray cluster: one task per call."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from specact import __version__
from specact.errors import ConfigError, SpecactError
from specact.lab.rollout.cluster import join

Output = TypeVar("Output")
# Retries of a task that was lost with its worker or node; bounded, because a task may itself kill its worker.
_RETRIES = 3
# How soon a thread that waits for a task notices that nobody wants its result any more.
_NOTICED_AFTER_S = 0.1
# Set before a worker loads a library: one thread per process, also for Mesa's software renderer.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "LP_NUM_THREADS": "0"}
# Results are bit-reproducible only with the same versions of these.
_PACKAGES = ("numpy", "onnxruntime")


class RayExecutor(Executor):
    """Runs each call as a task on one CPU of a cluster; a task that is lost with a worker or node is retried.

    Args:
        on: see :func:`~specact.lab.rollout.cluster.join`.
        workers: concurrent tasks, and CPUs of a new cluster; None for all CPUs.

    Attributes:
        workers: concurrent tasks.

    Raises:
        ConfigError: if there is no such cluster, or it has no CPU.
    """

    def __init__(self, on: str, workers: int | None) -> None:
        self._joined = join(on, workers)

        import ray

        self.workers = workers or int(ray.cluster_resources().get("CPU", 0))
        # Each thread waits for one task.
        self._threads = ThreadPoolExecutor(max(1, self.workers), thread_name_prefix="specact ray")
        self._leaving = threading.Event()
        options: dict[str, Any] = {"num_cpus": 1, "max_retries": _RETRIES, "runtime_env": {"env_vars": _ENVIRONMENT}}
        self._task: Any = ray.remote(**options)(_run)
        self._place = _versions(), str(Path.cwd())
        if not self.workers:
            self.shutdown()
            raise ConfigError("the Ray cluster has no CPU; start one of its nodes with --num-cpus")

    def submit(self, fn: Callable[..., Output], /, *args: Any, **kwargs: Any) -> Future[Output]:
        return self._threads.submit(self._result, fn, args, kwargs)

    def _result(self, *work: Any) -> Any:
        import ray
        from ray.exceptions import NodeDiedError, OutOfMemoryError, RayError, RayTaskError, WorkerCrashedError

        task = self._task.remote(self._place, *work)
        try:
            while not ray.wait([task], timeout=_NOTICED_AFTER_S)[0]:
                if self._leaving.is_set():
                    raise CancelledError
            return ray.get(task)
        except RayTaskError as error:
            if not isinstance(error.cause, _FailedError):
                raise SpecactError(
                    f"a node of the cluster could not take on the work: {error.cause}; every node needs specact "
                    f"{__version__} with the same extras, and the modules that the command names"
                ) from error
            cause, node = error.cause.args
            cause.add_note(
                f"this was on the node {node}: every node needs the bundles, modules and data that the command names, "
                "under the same paths"
            )
            raise cause from (None if isinstance(cause, SpecactError) else error)
        except (WorkerCrashedError, NodeDiedError, OutOfMemoryError) as error:
            raise SpecactError(
                f"the same work was lost with its worker {_RETRIES + 1} times, most likely for lack of memory "
                f"({type(error).__name__}); run the same command again with fewer --workers: finished results are kept"
            ) from None
        except RayError as error:
            raise SpecactError(
                f"the Ray cluster failed: {error}; run the same command again: finished results are kept"
            ) from None

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leaves the cluster if this executor joined it; with ``cancel_futures`` Ray then kills the running tasks.

        In a process that was in the cluster before, the running tasks finish, as they do in a pool of local processes.
        """
        import ray

        # Not ray.cancel: for a task that is just finishing, Ray 2.60 aborts this process (a race as in its #54798).
        if cancel_futures and self._joined:
            self._leaving.set()
        self._threads.shutdown(wait=wait, cancel_futures=cancel_futures)
        if self._joined:
            ray.shutdown()


class _FailedError(Exception):
    """The exception that a task raised, and the address of its node."""


def _run(place: tuple[dict[str, str], str], work: Callable[..., Output], args: Any, kwargs: Any) -> Output:
    """Runs a task in a worker, in the command's working directory if it exists; checks the package versions."""
    versions, folder = place
    try:
        installed = _versions()
        mismatched = [
            f"{name} {installed[name]}, not {wanted}" for name, wanted in versions.items() if installed[name] != wanted
        ]
        if mismatched:
            raise ConfigError(f"there is {' and '.join(mismatched)}; results would differ, so install the same")
        with suppress(OSError):
            os.chdir(folder)
        return work(*args, **kwargs)
    # Everything has to cross the process boundary.
    except Exception as error:
        import ray

        raise _FailedError(error, ray.util.get_node_ip_address()) from error


def _versions() -> dict[str, str]:
    return {"specact": __version__, **{name: version(name) for name in _PACKAGES}}
