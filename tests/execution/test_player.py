"""How a step's chunk is executed: single actions, and verdicts that are waited for, come late or come too late."""

import math
import time
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pytest

from specact.errors import ConfigError
from specact.execution.player import NO_OUTCOME, WAIT, ChunkPlayer, LateVerdicts, check_late
from specact.load import load_pair
from specact.observation import Window
from specact.pair import Pending
from specact.rng import StepAddress
from specact.types import Chunk, Miss, OffloadTimes, Origin, Outcome, Proposal

SHAPES = [(1, 1), (4, 4), (4, 1), (5, 2), (6, 3), (7, 3), (8, 8), (3, 2)]


def test_late_verdicts_of_which_none_can_be_in_time_are_refused() -> None:
    """Of n actions the last is begun n - 1 control steps after the first: with one action no verdict is in time."""
    pair, calls = load_pair("ball"), list[StepAddress]()
    assert pair.execute == 5

    class Slow:
        def __init__(self, seconds: float, result: object = None) -> None:
            self.seconds, self.outcome = seconds, result

        def submit(self, proposal: Proposal, address: StepAddress) -> Pending[Any]:
            calls.append(address)
            time.sleep(self.seconds)
            return Pending(lambda: self.outcome)

    with pytest.raises(ConfigError, match=r"--rate-hz.*execute \d+ actions or more"):
        check_late(Slow(0.05), pair, 0.01)
    assert len(calls) == 5 == len(set(calls)), "none of five"
    with pytest.raises(ConfigError, match=r"execute 2 actions or more") as caught:
        check_late(Slow(0.0), replace(pair, execute=1), 3600.0)
    assert "--rate-hz" not in str(caught.value)
    check_late(Slow(0.0), pair, 3600.0)
    check_late(Slow(0.05, Miss("refused", OffloadTimes())), pair, 0.01)


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
def test_drop_plays_the_newest_chunk_and_average_the_mean_of_all_that_reach_the_step(n: int, execute: int) -> None:
    source = chunks(n, 9, seed=n)
    before = [(drafted.copy(), executed.copy()) for drafted, executed in source]
    newest, means = (play(ChunkPlayer(execute, overlap), source, execute) for overlap in ("drop", "average"))
    for t, ((drafted, executed), (drafted_too, mean)) in enumerate(zip(newest, means, strict=True)):
        np.testing.assert_array_equal(executed, source[t // execute][1][t % execute])
        votes = [source[i][1][t - i * execute] for i in range(len(source)) if 0 <= t - i * execute < n]
        np.testing.assert_allclose(mean, np.mean(votes, axis=0), rtol=1e-6, atol=1e-6)
        for action in (drafted, drafted_too):  # what the draft wants *now*
            np.testing.assert_array_equal(action, source[t // execute][0][t % execute])
        assert mean.dtype == np.float32
    np.testing.assert_array_equal(source, before)  # playing changes no chunk


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
    for mine, expected in zip(play(used, source, 2), play(fresh, source, 2), strict=True):
        np.testing.assert_array_equal(mine[1], expected[1])


def test_a_shorter_chunk_is_played_to_its_end() -> None:
    player = ChunkPlayer(4, "drop")
    drafted, executed = chunks(6, 1, seed=0)[0]
    player.put(drafted, executed[:2])
    actions = [player.next()[1], player.next()[1]]
    np.testing.assert_array_equal(np.stack(actions), executed[:2])
    assert player.empty
    player.put(drafted, executed)
    player.next()
    # A late verdict that keeps less than what was played asks for the next chunk at once.
    assert player.replace(executed[:1]) == 0 and player.empty
    player.put(drafted, executed)
    assert player.replace(executed[:3]) == 3 and not player.empty


# ---- verdicts ------------------------------------------------------------------------------------------------------


HERE = StepAddress(1, 2, 3, 4)
ACTIONS = np.zeros((2, 1), np.float32)
PROPOSAL = Proposal(Window({"state": np.zeros((1, 1), np.float32)}), ACTIONS)
OUTCOME = Outcome(ACTIONS, np.full(2, Origin.ACCEPTED, np.uint8), 1, 1, OffloadTimes())


UNSENT = Miss("held_back", OffloadTimes(), sent=False)


@dataclass
class Scripted:
    """A verifier whose answer is there once the test says so; it knows what it was asked, and whether it was read."""

    leaves: bool = True
    ready: bool = False
    calls: list[StepAddress] = field(default_factory=list)
    read: int = 0

    def submit(self, proposal: Proposal, address: StepAddress) -> Pending[Outcome]:
        self.calls.append(address)
        return Pending(self._result, lambda: self.ready, self.leaves)

    def _result(self) -> Outcome | Miss:
        self.read += 1
        return OUTCOME if self.leaves else UNSENT


def late_verdicts(max_age_s: float = math.inf, seen_s: float = 1.0) -> tuple[LateVerdicts, Scripted]:
    """Late verdicts with one under way."""
    verdicts, verifier = LateVerdicts(max_age_s), Scripted()
    assert verdicts.free
    assert verdicts.ask(verifier, PROPOSAL, HERE, seen_s) is NO_OUTCOME
    assert not verdicts.free
    return verdicts, verifier


def test_waiting_asks_and_has_the_answer() -> None:
    verifier = Scripted()
    assert WAIT.ask(verifier, PROPOSAL, HERE, 0.0).result() is OUTCOME
    assert verifier.calls == [HERE] and verifier.read == 1
    assert WAIT.free and not WAIT.late


@pytest.mark.parametrize("max_age_s", [0.0, -0.0, -1.0, -math.inf, math.nan])
def test_verdicts_that_could_never_be_used_are_refused(max_age_s: float) -> None:
    with pytest.raises(ConfigError, match="max_age_s"):
        LateVerdicts(max_age_s)


def test_a_late_verdict_arrives_once_when_it_is_there() -> None:
    verdicts, verifier = late_verdicts()
    assert verifier.calls == [HERE]
    assert verdicts.arrived(9.0, HERE) is None and not verdicts.free and verifier.read == 0
    verifier.ready = True
    assert verdicts.arrived(9.0, HERE) == (OUTCOME, True)
    assert verdicts.free and verdicts.arrived(9.0, HERE) is None and verifier.read == 1


@pytest.mark.parametrize(("now", "used"), [(1.0, True), (1.5, True), (math.nextafter(1.5, 2.0), False), (9.0, False)])
def test_it_is_of_use_until_its_observation_is_older_than_that(now: float, used: bool) -> None:
    verdicts, verifier = late_verdicts(max_age_s=0.5, seen_s=1.0)
    verifier.ready = True
    assert verdicts.arrived(now, HERE) == (OUTCOME, used)
    assert verifier.read == 1 and verdicts.free


@pytest.mark.parametrize("wanted", [None, *(HERE._replace(**{name: 9}) for name in StepAddress._fields)])
def test_it_is_of_use_for_its_own_step_alone(wanted: StepAddress | None) -> None:
    verdicts, verifier = late_verdicts()
    verifier.ready = True
    assert verdicts.arrived(1.0, wanted) == (OUTCOME, False)
    assert verifier.read == 1 and verdicts.free


def test_an_episode_does_not_hear_of_the_one_before() -> None:
    verdicts, verifier = late_verdicts()
    verdicts.reset()
    verifier.ready = True
    assert verdicts.free and verdicts.arrived(1.0, HERE) is None and verifier.read == 0


def test_a_request_that_cannot_leave_is_a_miss_at_once() -> None:
    verdicts, verifier = LateVerdicts(1.0), Scripted(leaves=False, ready=True)
    assert verdicts.ask(verifier, PROPOSAL, HERE, 0.0).result() is UNSENT
    assert verifier.calls == [HERE] and verdicts.free and verdicts.arrived(0.0, HERE) is None
