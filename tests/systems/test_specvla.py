"""The drafting head of a token policy and the trees it grows. Its weights are random: nothing here depends on them."""

from __future__ import annotations

import heapq
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from specact.errors import BundleError
from specact.families.tokens.policy import Reading, causal
from specact.families.tokens.speculative import Decided, Tree
from specact.lab.train.drafters import DrafterHead, head_graph
from specact.lab.train.export import export_checked
from specact.systems.specvla import HeadDrafter, TokenHead

LENGTH, WIDTH = 7, 16


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    made = DrafterHead(torch.randn(256, WIDTH), nn.Linear(WIDTH, 256), LENGTH, 2, 0.0).eval().requires_grad_(False)
    made.write.weight.normal_()  # some tokens are much more likely than others
    file = tmp_path_factory.mktemp("head") / "head.onnx"
    export_checked(head_graph(made), file)
    return file


@pytest.fixture(scope="module")
def head(file: Path) -> TokenHead:
    return TokenHead(file, LENGTH, WIDTH)


def decided(count: int, seed: int = 0) -> Decided:
    rng = np.random.default_rng([seed, count])
    return Decided(rng.integers(256, size=count), rng.normal(size=(count, WIDTH)).astype(np.float32), LENGTH)


def read(head: TokenHead, tokens: np.ndarray, features: np.ndarray, among: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits and features of the tokens after each, from one pass without a cache; places follow from the mask."""
    places = among.sum(-1) - 1
    seen = np.zeros((1, len(tokens), 0), np.bool_)
    output = head.read(tokens[None], features[None], places[None], seen, among[None], head.empty_cache(1))
    return output.logits[0], output.features[0]


def after(head: TokenHead, begun: Decided, path: tuple[int, ...]) -> np.ndarray:
    """Log-probabilities of the token after a path, read alone and from the start, one token after the other."""
    tokens, features = begun.tokens, begun.features
    for token in (*path, None):
        logits, predicted = read(head, tokens, features, causal(1, len(tokens))[0])
        if token is not None:
            tokens, features = np.append(tokens, token), np.concatenate([features, predicted[-1:]])
    shifted = logits[-1].astype(np.float64) - logits[-1].max()
    log_probs: np.ndarray = shifted - np.log(np.exp(shifted).sum())
    return log_probs


def grow(drafter: HeadDrafter, begun: Decided) -> Tree:
    (tree,) = drafter.grow([begun])
    return tree


def paths(tree: Tree) -> list[tuple[int, ...]]:
    """To every node, in their order."""
    nodes: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        assert parent < len(nodes), "a node comes after its parent"
        nodes.append((*(nodes[parent] if parent >= 0 else ()), token))
    return nodes


def likely(head: TokenHead, begun: Decided, path: tuple[int, ...]) -> float:
    return float(sum(after(head, begun, path[:place])[token] for place, token in enumerate(path)))


@pytest.mark.parametrize("seed", range(4))
def test_the_tree_is_the_most_likely_of_all_paths(head: TokenHead, seed: int) -> None:
    """Against a search over all 256 tokens at every place, best first, that reads each path alone.

    It is the same wherever as many are expanded as are kept: what is kept has parents that are kept.
    """
    begun, nodes = decided(2, seed), 12
    wanted: list[tuple[float, tuple[int, ...]]] = []
    queue: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    while len(wanted) <= nodes:
        cost, path = heapq.heappop(queue)
        wanted.append((cost, path))
        if len(path) < 3:
            for token, log_prob in enumerate(after(head, begun, path).tolist()):
                heapq.heappush(queue, (cost - log_prob, (*path, token)))
    branches = paths(grow(HeadDrafter(head, top=nodes, depth=3, nodes=nodes), begun))
    assert sorted(branches) == sorted(path for _, path in wanted[1:])


@pytest.mark.parametrize("nodes", [1, 2, 5, 12])
def test_stopping_early_keeps_the_tree_of_all_levels(head: TokenHead, nodes: int) -> None:
    """Levels that cannot hold one of the most likely nodes are not read."""
    reads = 0

    class Counting:
        empty_cache = staticmethod(head.empty_cache)

        @staticmethod
        def read(*inputs: np.ndarray) -> Reading:
            nonlocal reads
            reads += 1
            return head.read(*inputs)

    for seed in range(10):
        begun = decided(1, seed)
        # 200 nodes are never reached, so that all levels are read.
        every = grow(HeadDrafter(head, top=3, depth=5, nodes=200), begun)
        scores = [likely(head, begun, path) for path in paths(every)]
        wanted = {paths(every)[node] for node in np.argsort(-np.array(scores), kind="stable")[:nodes]}
        assert set(paths(grow(HeadDrafter(Counting(), top=3, depth=5, nodes=nodes), begun))) == wanted  # type: ignore[arg-type]
    assert reads < 10 * 5, "it never stopped early"


def test_a_tree_is_small_holds_its_prefixes_and_ends_with_the_chunk(head: TokenHead) -> None:
    for count, nodes in itertools.product(range(1, LENGTH), (1, 5, 50)):
        branches = paths(grow(HeadDrafter(head, nodes=nodes), decided(count)))
        assert len(set(branches)) == len(branches) <= nodes
        assert {path[:-1] for path in branches} <= {*branches, ()}
        assert max(map(len, branches), default=0) <= min(4, LENGTH - count - 1)
        assert (len(branches) == 0) == (count >= LENGTH - 1), "the last token is the target's own choice"


def test_with_one_of_each_it_is_the_greedy_chain_and_every_tree_begins_with_it(head: TokenHead) -> None:
    for seed in range(10):
        begun = decided(2, seed)
        (*_, chain) = paths(grow(HeadDrafter(head, top=1, depth=4), begun))
        assert list(chain) == [int(after(head, begun, chain[:place]).argmax()) for place in range(4)]
        assert chain[:1] in paths(grow(HeadDrafter(head), begun))


def test_trees_of_a_batch_are_those_of_each_window_alone(head: TokenHead) -> None:
    """Windows with one token decoded and with all but one side by side; their trees end at different levels."""
    begun = [decided(1 + seed % (LENGTH - 1), seed) for seed in range(40)]
    for top, depth, nodes in ((2, 6, 8), (4, 3, 30), (3, 5, 5), (1, 4, 50)):
        drafter, sizes = HeadDrafter(head, top, depth, nodes), set()
        for tree, prefix in zip(drafter.grow(begun), begun, strict=True):
            assert paths(tree) == paths(grow(drafter, prefix))
            sizes.add(len(tree))
        assert len(sizes) > 1


def test_it_depends_on_the_features_of_the_target_and_has_their_width(head: TokenHead, file: Path) -> None:
    begun, drafter = decided(3), HeadDrafter(head)
    variant = Decided(begun.tokens, begun.features[::-1].copy(), LENGTH)
    assert paths(grow(drafter, begun)) != paths(grow(drafter, variant))
    with pytest.raises(BundleError, match=r"head\.onnx.*32"):
        TokenHead(file, LENGTH, 32)
