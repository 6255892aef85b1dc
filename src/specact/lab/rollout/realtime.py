"""Episodes in real time over sockets: a server process, an emulated link, and one robot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any

from specact.lab.envs import load_task
from specact.lab.envs.robot import SimulatedRobot
from specact.lab.rollout.families import FamilyRollout, rollout_of
from specact.lab.rollout.pool import Result
from specact.lab.rollout.processes import linked, serving
from specact.lab.rollout.rollout import Outcome, Shard, begin, run_together, time_by_episode
from specact.lab.rollout.steps import Audit
from specact.pair import LocalTarget, Pair, Verifier
from specact.remote.client import Client
from specact.remote.endpoint import Endpoint
from specact.remote.target import RemoteTarget, RemoteVerifier, check_requests
from specact.wire.exchange import VerifyingExchange


class RealTime:
    """Runs shards one after the other against its own server process; has the interface of a pool.

    The simulated world waits during inference, as in virtual time, but every time is measured.

    Args:
        pair: the server serves its target.
        link: see :func:`~specact.links.link.load_link`; shapes a relay on loopback.
        deadline_ms: of every request.
        seed: of the link's randomness.
    """

    def __init__(self, pair: Pair[Any], link: str, deadline_ms: float, seed: int) -> None:
        self._pair, self._link, self._deadline_ms = pair, link, deadline_ms
        self._seed = seed
        self._open = ExitStack()

    def __enter__(self) -> RealTime:
        with self._open:
            target = self._pair.source.target
            named = () if target is None else ("--target", target)
            server = self._open.enter_context(serving(self._pair.source.name_or_path, *named))
            # A separate process, because threads of this one would be delayed by its own work.
            relay = self._open.enter_context(linked(server.port, self._link, self._seed))
            endpoint = Endpoint("ws", "127.0.0.1", relay.port)
            self._client = self._open.enter_context(Client(endpoint, self._pair.exchange.contract, "evaluation"))
            self._client.connect(30.0)
            self._open = self._open.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def run(self, shards: Sequence[Shard]) -> Iterator[tuple[Shard, Result]]:
        """Yields every shard with its result."""
        for shard in shards:
            yield shard, self._run(shard)

    def _run(self, shard: Shard) -> Result:
        family = rollout_of(self._pair, shard.method)
        world, audit = SimulatedRobot(load_task(shard.env, family.pair.observation)), Audit(family)
        verifier, outcomes = self._verifier(family), list[Outcome]()
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

    def _verifier(self, family: FamilyRollout) -> Verifier:
        pair, exchange = family.pair, family.pair.exchange
        if family.method.on_device:
            return family.verifier(LocalTarget(pair.target()))
        if exchange.contract.step_kind == "verify" and isinstance(exchange, VerifyingExchange):
            check_requests(pair, exchange)
            return RemoteVerifier(self._client, exchange, self._deadline_ms)
        return family.verifier(RemoteTarget(self._client, exchange, self._deadline_ms))
