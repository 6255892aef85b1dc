"""Speculative decoding: what is exact, on a network of random weights; and the wrong variants, seen to fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from tests.families.tokens.dots import SEEN

from specact.errors import ConfigError
from specact.families.tokens import speculative
from specact.families.tokens.policy import BINS, Cache, Reading, TokenBundle, TokenNetworks
from specact.families.tokens.speculative import (
    DRAFT,
    EMPTY,
    TAIL,
    TARGET,
    Acceptance,
    Bigram,
    Candidates,
    Decided,
    Decoded,
    GroupCandidates,
    Speculation,
    Tree,
    TreeDrafter,
    decode,
    longest_accepted,
    relaxed,
    rows_of,
    tree_of,
)

LENGTH, ACTIONS = 6, 2
STRICT = relaxed(0, LENGTH, ACTIONS, ())


def run(
    wild: TokenBundle, seen: Any, *drafters: TreeDrafter, rule: Acceptance = STRICT, tail: np.ndarray | None = None
) -> Decoded:
    (chunk,) = together(wild, [(seen, Speculation(drafters, rule, tail))])
    return chunk


def together(wild: TokenBundle, requests: Sequence[tuple[Any, Speculation]]) -> list[Decoded]:
    networks = wild.networks
    cache, prefix = networks.prefill(networks.tokens([SEEN[seen] for seen, _ in requests]))
    return decode(networks, cache, prefix, [speculation for _, speculation in requests])


class RandomTokens(TreeDrafter):
    """Proposes random chains, each to the end of the chunk."""

    def __init__(self, rng: np.random.Generator, chains: int = 1) -> None:
        self._rng, self._chains = rng, chains

    def tree(self, decided: Decided) -> Tree:
        return tree_of(self._rng.integers(BINS, size=(self._chains, decided.max_depth)).tolist())


def drafters(tokens: np.ndarray, row: Any) -> Iterator[tuple[TreeDrafter, ...]]:
    """Good ones, bad ones, chains, trees, trees with the right path in the last branch; of the passes of a window."""
    rng = np.random.default_rng(row)
    near = np.clip(tokens + rng.integers(-1, 2, (5, LENGTH)) * (rng.random((5, LENGTH)) < 0.4), 0, 255)
    yield (TreeDrafter(),)
    yield (Candidates(tokens[None]),)
    yield (Candidates(near),)
    yield (Candidates(np.concatenate([near, tokens[None]])),)
    yield Candidates(near[:1]), RandomTokens(rng, 4)
    yield (GroupCandidates(near, np.arange(LENGTH) // 2, np.arange(LENGTH) % 2 == 1),)
    yield (GroupCandidates(near, np.arange(LENGTH), np.zeros(LENGTH, np.bool_)),)
    yield (Bigram(rng.integers(0, 256, (LENGTH - 1, 256))),)
    yield (RandomTokens(rng, 8),)


def test_strict_acceptance_is_greedy_decoding_for_any_drafter(
    wild: TokenBundle, greedy: np.ndarray, clear: np.ndarray
) -> None:
    """420 windows, nine drafters, three actions: 11,340; those of windows with a near tie are not compared."""
    compared = 0
    for row in np.flatnonzero(clear):
        for group in drafters(greedy[row], row):
            chunk = run(wild, row, *group)
            np.testing.assert_array_equal(chunk.tokens, greedy[row])
            assert not chunk.bias.any() and chunk.finite
            compared += LENGTH // ACTIONS
    assert compared > 10_000, "actions"


def shifted(tree: Tree, wanted: np.ndarray, rule: Acceptance, start: int) -> speculative.Path:
    """Every node is held against what the target wants after it, not in its place."""
    off = tree.tokens - wanted[1:]
    nodes = max((path[: rule.accepted(off[path], start)] for path in tree.paths), key=len, default=EMPTY.tokens)
    return speculative.Path(nodes, off[nodes], bool(len(tree)))


BATCH = 24


def mixed(greedy: np.ndarray, rows: Sequence[Any]) -> list[tuple[Any, Speculation]]:
    """Windows of every drafter, three rules and a tail in turn; trees of one node and of 40 side by side."""
    rules = STRICT, relaxed(20, LENGTH, ACTIONS, (1,)), relaxed(150, LENGTH, ACTIONS, (1,), (0, 1), 200)
    requests = []
    for number, row in enumerate(rows):
        groups = list(drafters(greedy[row], row))
        tail = np.full(LENGTH, 77) if number % 4 == 3 else None
        requests.append((row, Speculation(groups[number % len(groups)], rules[number // 3 % 3], tail)))
    return requests


def test_windows_of_a_batch_are_decoded_as_alone(wild: TokenBundle, greedy: np.ndarray, clear: np.ndarray) -> None:
    """More than 200 windows, with drafters that draw from equal streams; two of them may fall otherwise.

    A relaxed rule leaves greedy decoding's path, which is known to have no near tie; less than one in a hundred of the
    others has one.
    """
    rows, differing = np.flatnonzero(clear), 0
    assert len(rows) > 200
    for first in range(0, len(rows) - BATCH, BATCH):
        part = rows[first : first + BATCH].tolist()
        alone = [together(wild, [request])[0] for request in mixed(greedy, part)]
        for chunk, single in zip(together(wild, mixed(greedy, part)), alone, strict=True):
            same = all(
                np.array_equal(getattr(chunk, name), getattr(single, name)) for name in ("tokens", "sources", "bias")
            )
            names = ("accepted", "read", "rejected", "finite")
            same &= [getattr(chunk, name) for name in names] == [getattr(single, name) for name in names]
            differing += not (same and np.allclose(chunk.features[0], single.features[0], atol=1e-4))
    assert differing <= 2


def not_greedy(wild: TokenBundle, greedy: np.ndarray, clear: np.ndarray) -> int:
    """How many windows of one batch, whose drafters take turns, are not decoded greedily."""
    rows = np.flatnonzero(clear).tolist()
    groups = [list(drafters(greedy[row], row)) for row in rows]
    requests = [(row, Speculation(group[row % len(group)], STRICT)) for row, group in zip(rows, groups, strict=True)]
    tokens = np.array([chunk.tokens for chunk in together(wild, requests)])
    return int((tokens != greedy[rows]).any(axis=1).sum())


def first_rows(self: Cache, entries: np.ndarray, chosen: list[np.ndarray]) -> None:
    """Keeps the first entries, not those of the accepted tokens."""
    keep(self, entries, [np.arange(len(rows)) for rows in chosen])


def blind(self: TokenNetworks, cache: Cache, tokens: np.ndarray, places: np.ndarray, among: np.ndarray) -> Reading:
    """Real tokens attend to padding."""
    padding = ~among[..., 0]
    return read(self, cache, tokens, places, among | padding[:, None])


def first(self: Cache, rows: np.ndarray) -> Cache:
    """The rows of other windows."""
    return select(self, np.arange(len(rows)))


keep, read, select = Cache.keep, TokenNetworks.read, Cache.select


@pytest.mark.parametrize(
    ("place", "name", "wrong"),
    [(speculative, "longest_accepted", shifted), (Cache, "keep", first_rows), (TokenNetworks, "read", blind),
     (Cache, "select", first)],
)  # fmt: skip
def test_strict_batches_are_greedy_and_mistakes_are_noticed(
    wild: TokenBundle, greedy: np.ndarray, clear: np.ndarray, monkeypatch: pytest.MonkeyPatch, place: Any, name: str,
    wrong: Any,
) -> None:  # fmt: skip
    """Another place, a stale row of the cache, padding that is seen, rows of other windows."""
    assert not_greedy(wild, greedy, clear) == 0
    monkeypatch.setattr(place, name, wrong)
    try:
        assert not_greedy(wild, greedy, clear) > 3
    except ValueError as error:  # no room in a row of another window
        assert wrong is first and "broadcast" in str(error)


def test_a_window_that_is_not_finite_says_so_alone(wild: TokenBundle, greedy: np.ndarray) -> None:
    networks = wild.networks
    prefix = networks.tokens(SEEN[:6])
    prefix[2] = np.nan
    speculations = [Speculation((Candidates(greedy[row][None]),), STRICT) for row in range(6)]
    with np.errstate(invalid="ignore"):
        chunks = decode(networks, *networks.prefill(prefix), speculations)
    assert [chunk.finite for chunk in chunks] == [row != 2 for row in range(6)]
    for row in (0, 1, 3, 4, 5):
        np.testing.assert_array_equal(chunks[row].tokens, run(wild, row, Candidates(greedy[row][None])).tokens)


@pytest.mark.parametrize("count", range(1, LENGTH + 1))
def test_the_beginning_of_the_right_chunk_is_accepted_whole(
    wild: TokenBundle, greedy: np.ndarray, clear: np.ndarray, count: int
) -> None:
    """After the end of a candidate the target goes on by itself; the last token is its own in any case."""
    drafted = min(count, LENGTH - 1) - 1
    for row in np.flatnonzero(clear)[:40]:
        begun = np.where(np.arange(LENGTH) < count, greedy[row], -1)
        chunk = run(wild, row, Candidates(begun[None]))
        np.testing.assert_array_equal(chunk.tokens, greedy[row])
        np.testing.assert_array_equal(chunk.sources, [TARGET, *[DRAFT] * drafted, *[TARGET] * (LENGTH - 1 - drafted)])
        assert chunk.accepted == [drafted, *[0] * (LENGTH - 2 - drafted)] and chunk.rejected == LENGTH


def test_accepted_tokens_keep_the_drafted_value_within_the_tolerance(wild: TokenBundle, greedy: np.ndarray) -> None:
    gripper = relaxed(4, LENGTH, ACTIONS, (1,))
    drafted = 0
    for row in range(60):
        offered = np.clip(greedy[row] + np.array([0, 0, 3, 0, -4, 0]), 0, 255)
        chunk = run(wild, row, Candidates(offered[None]), rule=gripper)
        taken = chunk.sources == DRAFT
        np.testing.assert_array_equal(chunk.tokens[taken], offered[taken])
        assert (np.abs(chunk.bias) <= gripper.each).all() and not chunk.bias[~taken].any()
        drafted += int(taken[2::2].sum())
    assert drafted > 0


def test_a_wider_tolerance_never_accepts_less_of_the_same_verification() -> None:
    """2,000 random trees and logits; the second rule is a group's."""
    rng = np.random.default_rng(5)
    for _ in range(2000):
        count = int(rng.integers(1, 12))
        parents = np.array([int(rng.integers(-1, node)) if node else -1 for node in range(count)])
        tree = Tree(rng.integers(100, 120, count), parents)
        wanted, start = rng.integers(100, 120, count + 1), int(rng.integers(1, 12))
        sizes = [
            len(longest_accepted(tree, wanted, relaxed(bins, 24, 4, (3,)), start).nodes) for bins in (0, 3, 9, 15, 255)
        ]
        assert sizes == sorted(sizes)
        groups = [relaxed(15, 24, 4, (3,), (0, 0, 0, 1), total) for total in (0, 10, 30)]
        lengths = [len(longest_accepted(tree, wanted, rule, start).nodes) for rule in groups]
        assert lengths == sorted(lengths)


def test_the_longest_path_wins_and_of_equal_ones_the_first() -> None:
    """Each token is held against what follows its own path."""
    #            0 -> 1 -> 2        3 -> 4
    tree = Tree(np.array([10, 11, 99, 10, 12]), np.array([-1, 0, 1, -1, 3]))
    wanted = np.array([10, 11, 12, 0, 12, 13])
    path = longest_accepted(tree, wanted, STRICT, 1)
    np.testing.assert_array_equal(path.nodes, [0, 1])
    assert path.rejected, "node 2 was refused"
    assert not longest_accepted(Tree(tree.tokens[3:], np.array([-1, 0])), wanted[[0, 4, 5]], STRICT, 1).rejected
    # What the target wants after a wrong token is not right after another one.
    tempting = Tree(np.array([9, 20, 10, 20]), np.array([-1, 0, -1, 2]))
    np.testing.assert_array_equal(longest_accepted(tempting, np.array([10, 20, 0, 21, 0]), STRICT, 1).nodes, [2])
    nothing = longest_accepted(EMPTY, wanted[:1], STRICT, 1)
    assert not nothing.nodes.size and not nothing.rejected


def test_a_tail_takes_the_place_of_everything_from_the_first_refused_token(
    wild: TokenBundle, greedy: np.ndarray, clear: np.ndarray
) -> None:
    tail = np.full(LENGTH, 77)
    for row in np.flatnonzero(clear)[:40]:
        offered = greedy[row].copy()
        offered[3] = (offered[3] + 100) % 256
        chunk = run(wild, row, Candidates(offered[None]), tail=tail)
        np.testing.assert_array_equal(chunk.tokens, [*greedy[row][:3], 77, 77, 77])
        np.testing.assert_array_equal(chunk.sources, [TARGET, DRAFT, DRAFT, TAIL, TAIL, TAIL])
        assert chunk.rejected == 3 and len(chunk.accepted) == 1
        # Nothing refused: the tail is not needed.
        np.testing.assert_array_equal(run(wild, row, Candidates(greedy[row][None]), tail=tail).tokens, greedy[row])


def test_candidates_of_a_group_are_combined_and_a_gripper_is_not() -> None:
    chunks = np.array([[1, 2, 3, 4, 5, 6, 7, 8], [1, 12, 13, 14, 15, 16, 17, 18]])
    groups, strict = np.array([0, 0, 0, 1, 2, 2, 2, 3]), np.arange(8) % 4 == 3
    decided = Decided(np.array([1]), np.zeros((1, 4), np.float32), 8)

    def paths(chunks: np.ndarray) -> set[tuple[int, ...]]:
        (tree,) = GroupCandidates(chunks, groups, strict).grow([decided])
        return {tuple(tree.tokens[path].tolist()) for path in tree.paths}

    assert paths(chunks) == {
        (2, 3, 4, 5, 6, 7), (2, 3, 4, 15, 16, 17), (12, 13, 14, 5, 6, 7), (12, 13, 14, 15, 16, 17)
    }  # fmt: skip
    (small,) = GroupCandidates(chunks, groups, strict, nodes=7).grow([decided])
    assert len(small) <= 7
    many = np.random.default_rng(0).integers(0, 256, (5, 8))
    (large,) = GroupCandidates(many, groups, strict).grow([decided])
    assert 44 < len(large) <= 50
    # A group in which a candidate ends is left out.
    assert paths(np.where(np.arange(8) < [[5], [2]], chunks, -1)) == {(2, 3, 4)}


def test_a_tree_is_the_same_from_its_rows() -> None:
    tree = Tree(np.array([10, 20, 11, 12, 21, 13, 14]), np.array([-1, -1, 0, 0, 1, 3, 3]))
    rows = rows_of(tree, 5, 6)
    np.testing.assert_array_equal(
        rows, [[5, 10, 11, -1, -1, -1], [5, 10, 12, 13, -1, -1], [5, 10, 12, 14, -1, -1], [5, 20, 21, -1, -1, -1]]
    )
    decided = Decided(np.array([7]), np.zeros((1, 4), np.float32), 6)
    (copy,) = Candidates(rows).grow([decided])
    assert {tuple(copy.tokens[path]) for path in copy.paths} == {tuple(tree.tokens[path]) for path in tree.paths}
    assert len(copy) == len(tree) and rows_of(EMPTY, 5, 6).shape == (0, 6)


def test_a_tree_shares_what_is_shared() -> None:
    tree = tree_of([[1, 2, 3], [1, 2, 4], [5]])
    np.testing.assert_array_equal(tree.tokens, [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(tree.parents, [-1, 0, 1, 1, -1])
    np.testing.assert_array_equal(tree.depths, [0, 1, 2, 2, 0])
    assert [path.tolist() for path in tree.paths] == [[0, 1, 2], [0, 1, 3], [4]]
    with pytest.raises(ValueError, match="before"):
        Tree(np.array([1, 2]), np.array([1, -1]))


def test_a_group_is_accepted_whole() -> None:
    rule = relaxed(4, 8, 4, (3,), (0, 0, 0, 1), 6)
    assert rule.accepted(np.array([4, 1, 1, 0, 2, 2, 2, 0]), 0) == 8
    assert rule.accepted(np.array([4, 1, 2, 0, 0, 0, 0, 0]), 0) == 0, "their sum is 7"
    assert rule.accepted(np.array([0, 0, 0, 0, 0, 5, 0, 0]), 0) == 4, "one is 5"
    assert rule.accepted(np.array([0, 0, 0, 1, 0, 0, 0, 0]), 0) == 3, "the gripper"
    assert rule.accepted(np.array([1, 2, 0, 5]), 1) == 3, "a path that begins within a group"


def test_groups_and_tolerances_that_are_none_are_refused() -> None:
    for groups in ((0, 0, 2, 3), (0, 0, 0), (0, 0, 1, 1), (1, 1, 1, 2)):
        with pytest.raises(ConfigError, match="groups"):
            relaxed(15, 8, 4, (3,), groups, 30)
    for bins, strict in ((-1, ()), (256, ()), (3, (4,))):
        with pytest.raises(ConfigError, match="must lie between"):
            relaxed(bins, 8, 4, strict)
