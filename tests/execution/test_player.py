"""From chunks to single actions."""

from typing import Literal

import numpy as np
import pytest

from specact.execution.player import ChunkPlayer
from specact.types import Chunk

SHAPES = [(1, 1), (4, 4), (4, 1), (5, 2), (6, 3), (7, 3), (8, 8), (3, 2)]


def chunks(n: int, count: int, seed: int) -> list[tuple[Chunk, Chunk]]:
    rng = np.random.default_rng(seed)
    return [
        (rng.normal(size=(n, 3)).astype(np.float32), rng.normal(size=(n, 3)).astype(np.float32)) for _ in range(count)
    ]


def play(player: ChunkPlayer, source: list[tuple[Chunk, Chunk]], execute: int) -> list[tuple[Chunk, Chunk]]:
    """Feeds chunks as the agent does, and checks that they are asked for when due."""
    played: list[tuple[Chunk, Chunk]] = []
    for pair in source:
        assert player.empty
        player.put(*pair)
        for _ in range(execute):
            assert not player.empty
            played.append(player.next())
    assert player.empty
    return played


@pytest.mark.parametrize(("n", "execute"), SHAPES)
def test_drop_plays_the_newest_chunk(n: int, execute: int) -> None:
    source = chunks(n, 9, seed=n)
    for t, (drafted, executed) in enumerate(play(ChunkPlayer(execute, "drop"), source, execute)):
        np.testing.assert_array_equal(drafted, source[t // execute][0][t % execute])
        np.testing.assert_array_equal(executed, source[t // execute][1][t % execute])


@pytest.mark.parametrize(("n", "execute"), SHAPES)
def test_average_is_the_mean_of_all_chunks_that_reach_the_step(n: int, execute: int) -> None:
    source = chunks(n, 9, seed=n)
    for t, (drafted, executed) in enumerate(play(ChunkPlayer(execute, "average"), source, execute)):
        votes = [source[i][1][t - i * execute] for i in range(len(source)) if 0 <= t - i * execute < n]
        np.testing.assert_allclose(executed, np.mean(votes, axis=0), rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(drafted, source[t // execute][0][t % execute])  # what the draft wants *now*
        assert executed.dtype == np.float32


@pytest.mark.parametrize("execute", [1, 2, 3])
def test_average_over_chunks_of_different_lengths_is_the_mean_of_those_that_reach_the_step(execute: int) -> None:
    """As where the target's chunks are shorter than the draft's: an older chunk may reach further than a newer one."""
    lengths = [9, 3, 4, 3, 9, 3, 3, 3, 12, 3, 3, 5]
    source = [(chunks(9, 1, seed)[0][0], chunks(n, 1, 100 + seed)[0][1]) for seed, n in enumerate(lengths)]
    outlived = 0
    for t, (_, executed) in enumerate(play(ChunkPlayer(execute, "average"), source, execute)):
        reaching = [i for i, n in enumerate(lengths) if 0 <= t - i * execute < n]
        votes = [source[i][1][t - i * execute] for i in reaching]
        np.testing.assert_allclose(executed, np.mean(votes, axis=0), rtol=1e-6, atol=1e-6)
        outlived += reaching != list(range(reaching[0], t // execute + 1))
    assert outlived > 0, "no newer chunk ended before an older one, so nothing is tested"


@pytest.mark.parametrize("overlap", ["drop", "average"])
def test_reset_forgets_the_episode(overlap: Literal["drop", "average"]) -> None:
    used, fresh = ChunkPlayer(2, overlap), ChunkPlayer(2, overlap)
    before = chunks(6, 3, seed=0)
    play(used, before, 2)
    used.put(*before[0])
    used.next()  # in the middle of a chunk
    used.reset()
    source = chunks(6, 4, seed=1)
    for mine, other in zip(play(used, source, 2), play(fresh, source, 2), strict=True):
        np.testing.assert_array_equal(mine[1], other[1])


def test_playing_changes_no_chunk() -> None:
    source = chunks(5, 6, seed=2)
    before = [(drafted.copy(), executed.copy()) for drafted, executed in source]
    play(ChunkPlayer(2, "average"), source, 2)
    for now, then in zip(source, before, strict=True):
        np.testing.assert_array_equal(now[0], then[0])
        np.testing.assert_array_equal(now[1], then[1])


def test_a_shorter_chunk_is_played_to_its_end() -> None:
    player = ChunkPlayer(4, "drop")
    drafted, executed = chunks(6, 1, seed=0)[0]
    player.put(drafted, executed[:2])
    found = [player.next()[1], player.next()[1]]
    np.testing.assert_array_equal(np.stack(found), executed[:2])
    assert player.empty
    player.put(drafted, executed)
    player.next()
    # A late verdict that keeps less than what was played asks for the next chunk at once.
    assert player.replace(executed[:1]) == 0 and player.empty
    player.put(drafted, executed)
    assert player.replace(executed[:3]) == 3 and not player.empty
