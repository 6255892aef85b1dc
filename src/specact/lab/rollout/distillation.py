"""Distillation data for a gate or a draft, from rollouts of the pair under gates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from specact.errors import ConfigError
from specact.families.codes.bundle import Bundle
from specact.gates.settings import GateSettings
from specact.lab.data.distillation import DistillationData, join
from specact.lab.envs import env_of
from specact.lab.rollout.pool import Pool
from specact.lab.rollout.rollout import COMPOSITION, Shard
from specact.lab.rollout.steps import SEEN

# Episode numbers nobody evaluates, calibrates or checks on; every round has a million of its own.
_FIRST_EPISODE, _ROUND = 10_000_000, 1_000_000
_SHARD = 10


def collect(
    bundle: Bundle,
    gates: Sequence[GateSettings],
    wanted: int,
    number: int,
    pool: Pool,
    advance: Callable[[int], None],
    seed: int = 0,
    env: str | None = None,
) -> DistillationData:
    """Rolls a pair out under each of several gates in turn and keeps what both policies say at every inference.

    Args:
        bundle: the pair; without camera and without a sequential secondary head.
        gates: whose states are wanted.
        wanted: at least so many inferences, in whole batches of episodes.
        number: of this round; every round has other episodes.
        pool: where.
        advance: told the number of inferences so far.
        seed: of everything random.
        env: where; the pair's own environment if None.

    Raises:
        ConfigError: for a pair that cannot be learned from.
    """
    if bundle.observation.images or bundle.spec.sequential:
        raise ConfigError(
            f"the bundle {bundle.name!r} has a camera or a sequential secondary head; gates and drafts can be trained "
            "only for state observations and independent codebooks"
        )
    batches: list[DistillationData] = []
    first = _FIRST_EPISODE + number * _ROUND
    where = env or env_of(bundle, None)
    while (done := sum(map(len, batches))) < wanted:
        advance(done)
        shards = []
        # As many shards at once as keep any pool busy; their number does not depend on the machine.
        for gate in [gate for gate in gates for _ in range(4)]:
            episodes = tuple(range(first, first + _SHARD))
            shards.append(
                Shard(
                    str(bundle.path), bundle.fingerprint, where, COMPOSITION, gate, episodes, seed, "loopback",
                    draft_s=0.0, target_s=0.0, learning=True,
                )
            )  # fmt: skip
            first += _SHARD
        tables = {shard.episodes[0]: table for shard, (_, table) in pool.run(shards)}
        batches += [_data(tables[key]) for key in sorted(tables)]
    advance(wanted)
    return join(batches)


def collector(
    wanted: int, pool: Pool, progress: Callable[[str, int, int], None], env: str | None = None
) -> Callable[[Bundle, Sequence[GateSettings], int], DistillationData]:
    """:func:`collect` as training asks for it: of a pair, under gates, for the round of this number.

    Args:
        wanted: inferences in every round, at least.
        pool: where.
        progress: told (which round, inferences so far, in all).
        env: where; the pair's own environment if None.

    Raises:
        ConfigError: for less than one inference.
    """
    if wanted < 1:
        raise ConfigError(f"lessons must be at least 1, got {wanted}")

    def roll(pair: Bundle, gates: Sequence[GateSettings], number: int) -> DistillationData:
        said = f"lessons {number + 1}"
        return collect(pair, gates, wanted, number, pool, lambda done: progress(said, done, wanted), env=env)

    return roll


def _data(table: dict[str, NDArray[Any]]) -> DistillationData:
    columns = ("episode", "draft_probs", "target_probs", "target_offsets")
    seen = {name.removeprefix(SEEN): column for name, column in table.items() if name.startswith(SEEN)}
    return DistillationData(observation=seen, **{name: table[name] for name in columns})
