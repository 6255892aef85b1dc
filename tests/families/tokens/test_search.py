"""The two ways to find the nearest features."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from specact.errors import MissingExtraError
from specact.families.tokens import search
from specact.families.tokens.retrieval import unit
from specact.families.tokens.search import ExactSearch, GraphSearch, Search


def clustered(count: int, seed: int) -> np.ndarray:
    """Features of count steps of 40 places that are always the same."""
    centres = np.random.default_rng(0).normal(size=(40, 48))
    rng = np.random.default_rng(seed)
    return unit(centres[rng.integers(40, size=count)] + 0.5 * rng.normal(size=(count, 48)))


def recall(approximate: Search, exact: Search, queries: np.ndarray, count: int) -> float:
    """The share of the nearest that is found."""
    found = [np.isin(exact.nearest(query, count), approximate.nearest(query, count)).mean() for query in queries]
    return float(np.mean(found))


def test_exact_search_finds_the_nearest() -> None:
    features, queries = clustered(300, 1), clustered(40, 2)
    exact = ExactSearch(features)
    for count in (1, 5, 300):
        for query in queries:
            distances = np.linalg.norm(features - query, axis=1)
            found = exact.nearest(query, count)
            assert len(set(found.tolist())) == count
            assert distances[found].max() <= np.sort(distances)[count - 1] + 1e-6


def test_a_graph_finds_almost_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    features, queries = clustered(3000, 1), clustered(150, 2)
    exact, graph = ExactSearch(features), GraphSearch(features)
    assert recall(graph, exact, queries, 5) > 0.97
    # What is asked for is what is searched for: the nearest to something else are not these.
    assert recall(graph, exact, queries, 5) > 5 * recall(GraphSearch(features[::-1]), exact, queries, 5)
    monkeypatch.setattr(search, "_GRAPH_DEGREE", 2)
    monkeypatch.setattr(search, "_EF_SEARCH", 1)
    assert recall(GraphSearch(features), exact, queries, 5) < 0.9


def test_a_graph_answers_the_same_every_time() -> None:
    features, queries = clustered(500, 1), clustered(50, 2)
    first, second = GraphSearch(features), GraphSearch(features)
    for query in queries:
        np.testing.assert_array_equal(first.nearest(query, 5), second.nearest(query, 5))


def test_where_the_graph_leads_to_too_few_it_compares_all(monkeypatch: pytest.MonkeyPatch) -> None:
    features = clustered(200, 1)
    graph = GraphSearch(features)
    assert sorted(graph.nearest(features[3], 200).tolist()) == list(range(200))
    import voyager

    class Torn:
        def query(self, *_: object, **__: object) -> None:
            raise voyager.RecallError("fewer")

    monkeypatch.setattr(graph, "_graph", Torn())
    np.testing.assert_array_equal(graph.nearest(features[3], 7), ExactSearch(features).nearest(features[3], 7))


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "voyager", None)
    with pytest.raises(MissingExtraError, match=r"specact\[retrieval\]"):
        GraphSearch(clustered(5, 1))
