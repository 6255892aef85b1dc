"""Where shards run: in a pool of processes, on this machine or a Ray cluster; or in real time against a server."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import version
from itertools import islice
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from specact import __version__
from specact.errors import ConfigError, SpecactError
from specact.lab.envs import load_task
from specact.lab.envs.robot import SimulatedRobot
from specact.lab.rollout.families import FamilyRollout, rollout_of
from specact.lab.rollout.processes import linked, serving
from specact.lab.rollout.rollout import Outcome, Shard, begin, run_shard, run_together, time_by_episode
from specact.lab.rollout.steps import Audit
from specact.pair import LocalTarget, Pair, Verifier
from specact.remote.client import Client
from specact.remote.endpoint import Endpoint
from specact.remote.target import RemoteTarget, RemoteVerifier, check_requests
from specact.wire.exchange import VerifyingExchange

HERE = "here"
_LOOK_EVERY_S = 0.5
# Ray's own timeout is minutes.
_CONNECT_TIMEOUT_S = 5.0
# Retries of a task that was lost with its worker or node; bounded, because a task may itself kill its worker.
_RETRIES = 3
# Set before a worker loads a library: one thread per process, also for Mesa's software renderer.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "LP_NUM_THREADS": "0"}
# Results are bit-reproducible only with the same versions of these.
_PACKAGES = ("numpy", "onnxruntime")

Item = TypeVar("Item")
Output = TypeVar("Output")
Result = tuple[list[Outcome], dict[str, np.ndarray]]


class Pool:
    """A pool of ``workers`` processes, by default one per core (of a cluster); one local worker is this process.

    Use it as a context manager: the processes live until its exit, and cache loaded models. Work is done ``on``
    ``here``, this machine; ``ray``, a new Ray cluster on this machine; or ``ray:ADDRESS``, see :func:`join`. Less than
    one worker, or another place, is a :exc:`ConfigError`.
    """

    def __init__(self, workers: int | None = None, on: str = HERE) -> None:
        if workers is not None and workers < 1:
            raise ConfigError(f"workers must be at least 1, got {workers}")
        if on != HERE and on.partition(":")[0] != "ray":
            raise ConfigError(f"work is done on here, ray, or ray:ADDRESS with the address of a cluster, not on {on!r}")
        self.workers = os.cpu_count() or 1 if workers is None else workers
        self._requested, self._on = workers, on
        self._executor: ProcessPoolExecutor | None = None
        self._cluster: _Cluster | None = None

    def __enter__(self) -> Pool:
        if self._on != HERE:
            self._cluster = _Cluster(self._on, self._requested)
            self.workers = self._cluster.workers
        elif self.workers > 1:
            self._others = active_children()
            context = get_context("spawn")
            self._executor = ProcessPoolExecutor(self.workers, mp_context=context, initializer=_prepare_worker)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._cluster is not None:
            self._cluster.leave()
        elif self._executor is not None:
            for process in active_children() if kind is not None else ():
                if process not in self._others:
                    process.terminate()
            self._executor.shutdown(cancel_futures=True)

    def run(self, shards: Sequence[Shard]) -> Iterator[tuple[Shard, Result]]:
        """Yields every shard with its result, as :meth:`each` does."""
        return self.each(run_shard, shards)

    def each(
        self, work: Callable[[Item], Output], items: Iterable[Item], meanwhile: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[Item, Output]]:
        """Yields every item with its result of ``work``, a module-level function, in order of completion.

        ``meanwhile`` is called now and then while other processes work. A worker process that was killed is a
        :exc:`SpecactError`, use outside of the context, where there are no processes, a :exc:`RuntimeError`.
        """
        if self._cluster is not None:
            yield from self._cluster.each(work, items, meanwhile)
        elif self._executor is not None:
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
                    "a worker process was killed, most likely for lack of memory; run the same command again with "
                    "fewer of them (--workers 1, of a training --jobs 1): finished results and checkpoints are kept"
                ) from None
        elif self.workers > 1 or self._on != HERE:
            raise RuntimeError("the pool is not running; use it as `with Pool(...) as pool:`")
        else:
            yield from ((item, work(item)) for item in items)


Runner = Callable[[Sequence[Shard]], Iterator[tuple[Shard, Result]]]


@contextmanager
def real_time(pair: Pair[Any], link: str, deadline_ms: float, seed: int) -> Iterator[Runner]:
    """Runs shards over sockets, one after the other, against a server process of its own with the pair's target.

    The simulated world waits during inference, as in virtual time, but every time is measured. ``link``, see
    :func:`~specact.links.link.load_link`, with its ``seed`` shapes a relay on loopback.
    """
    named = () if pair.source.target is None else ("--target", pair.source.target)
    with (
        serving(pair.source.name_or_path, *named) as server,
        # A separate process, because threads of this one would be delayed by its own work.
        linked(server.port, link, seed) as relay,
        Client(Endpoint("ws", "127.0.0.1", relay.port), pair.exchange.contract, "evaluation") as client,
    ):
        client.connect(30.0)
        yield lambda shards: ((shard, _run_live(pair, client, deadline_ms, shard)) for shard in shards)


def _run_live(pair: Pair[Any], client: Client, deadline_ms: float, shard: Shard) -> Result:
    family = rollout_of(pair, shard.method)
    world, audit = SimulatedRobot(load_task(shard.env, family.pair.observation)), Audit(family)
    verifier, outcomes = _live_verifier(family, client, deadline_ms), list[Outcome]()
    try:
        for episode in shard.episodes:
            run_together([begin(shard, family, world, episode, verifier)], family, audit)
            outcomes.append(Outcome.of(episode, world, 0.0))
    finally:
        world.close()
    table = audit.table()
    if not shard.method.waits_for_draft:
        # The ungated target needs no draft, so its time excludes the draft's.
        table["draft_s"][:] = 0.0
    latencies_s = time_by_episode(table)
    return [replace(outcome, latency_s=latencies_s[outcome.episode]) for outcome in outcomes], table


def _live_verifier(family: FamilyRollout, client: Client, deadline_ms: float) -> Verifier:
    pair, exchange = family.pair, family.pair.exchange
    if family.method.on_device:
        return family.verifier(LocalTarget(pair.target()))
    if exchange.contract.step_kind == "verify" and isinstance(exchange, VerifyingExchange):
        check_requests(pair, exchange, client)
        return RemoteVerifier(client, exchange, deadline_ms)
    return family.verifier(RemoteTarget(client, exchange, deadline_ms))


def _prepare_worker() -> None:
    """Limits a worker's libraries to one thread, and makes it end with its parent, which alone handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(_ENVIRONMENT)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this worker when its parent dies; after a kill it would otherwise wait forever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def join(on: str, cpus: int | None = None) -> bool:
    """Joins a Ray cluster, unless this process is already in one; returns whether it did, for ``ray.shutdown``.

    ``on`` is ``ray:HOST:PORT``, with the address of the cluster's head, or ``ray:auto`` for that of this machine or of
    the current Ray job; or ``ray`` for a new cluster of so many CPUs on this machine, not reachable from others,
    without dashboard and usage reports, which ends with this process. None or a refusal is a :exc:`ConfigError`.
    """
    address = on.partition(":")[2]
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not address:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Read when Ray is imported: without it Ray's processes listen on all addresses.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        options |= {"num_cpus": cpus, "include_dashboard": False}

    import ray
    from ray.exceptions import RayError

    if ray.is_initialized():
        return False
    try:
        if address not in ("", "auto"):
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S).close()
        ray.init(address=address or "local", **options)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise ConfigError(
            f"cannot join a Ray cluster ({on}): {error}; on one of its machines give the address of its head, such as "
            "ray:10.0.0.5:6379, or ray:auto"
        ) from None
    return True


class _Cluster:
    """Runs each call as a task on one CPU of a cluster, ``workers`` at a time; a lost task is retried."""

    def __init__(self, on: str, workers: int | None) -> None:
        self._joined = join(on, workers)

        import ray

        self.workers = workers or int(ray.cluster_resources().get("CPU", 0))
        self._running: list[dict[Any, Any]] = []
        options: dict[str, Any] = {"num_cpus": 1, "max_retries": _RETRIES, "runtime_env": {"env_vars": _ENVIRONMENT}}
        self._task: Any = ray.remote(**options)(_run)
        self._place = _versions(), str(Path.cwd())
        if not self.workers:
            self.leave()
            raise ConfigError("the Ray cluster has no CPU; start one of its nodes with --num-cpus")

    def each(
        self, work: Callable[[Item], Output], items: Iterable[Item], meanwhile: Callable[[], None]
    ) -> Iterator[tuple[Item, Output]]:
        import ray

        waiting, running = iter(items), dict[Any, Item]()
        self._running.append(running)
        while True:
            for item in islice(waiting, self.workers - len(running)):
                running[self._task.remote(self._place, work, item)] = item
            if not running:
                return
            done, _ = ray.wait(list(running), timeout=_LOOK_EVERY_S)
            meanwhile()
            for task in done:
                yield running.pop(task), _result(task)

    def leave(self) -> None:
        """Leaves the cluster if this pool joined it: Ray then kills the running tasks; else they finish here too."""
        import ray

        # Not ray.cancel: for a task that is just finishing, Ray 2.60 aborts this process (a race as in its #54798).
        if self._joined:
            ray.shutdown()
        elif tasks := [task for running in self._running for task in running]:
            ray.wait(tasks, num_returns=len(tasks))


def _result(task: Any) -> Any:
    import ray
    from ray.exceptions import NodeDiedError, OutOfMemoryError, RayError, RayTaskError, WorkerCrashedError

    try:
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


class _FailedError(Exception):
    """The exception that a task raised, and the address of its node."""


def _run(place: tuple[dict[str, str], str], work: Callable[[Item], Output], item: Item) -> Output:
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
        return work(item)
    # Everything has to cross the process boundary.
    except Exception as error:
        import ray

        raise _FailedError(error, ray.util.get_node_ip_address()) from error


def _versions() -> dict[str, str]:
    return {"specact": __version__, **{name: version(name) for name in _PACKAGES}}
