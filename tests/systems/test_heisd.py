"""Entries that are retrieved by what was seen."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specact.errors import BundleError, ConfigError, MissingExtraError, ObservationError
from specact.records import read_record
from specact.systems import heisd
from specact.systems.heisd import Entries, Index, SkipRule, load_entries, unit


def entries(count: int = 60, seed: int = 0) -> Entries:
    rng = np.random.default_rng(seed)
    return Entries(
        unit(rng.normal(size=(count, 12))),
        rng.integers(256, size=(count, 8)),
        np.arange(count) // 10,
        np.arange(count) % 10,
    )


@pytest.mark.parametrize("graph", [False, True])
def test_the_nearest_come_first_with_their_tokens_and_place(graph: bool) -> None:
    known = entries()
    index = Index(known, graph=graph)
    for seed in range(10):
        query = np.random.default_rng(100 + seed).normal(size=12)
        cosines = known.features @ query / np.linalg.norm(query)
        order = np.argsort(-cosines)
        for count in (1, 5, 1000):
            found = index.nearest(query, count)
            best = order[:count]
            np.testing.assert_array_equal(found.tokens, known.tokens[best])
            np.testing.assert_array_equal(found.episodes * 10 + found.steps, best)
            np.testing.assert_allclose(found.similarities, cosines[best], atol=1e-6)
    # By cosine: how long a feature is does not matter.
    np.testing.assert_array_equal(index.nearest(query).tokens, index.nearest(100.0 * query).tokens)
    assert index.nearest(known.features[17]).similarities[0] == pytest.approx(1.0)
    assert (index.nearest(known.features[17]).episodes[0], index.nearest(known.features[17]).steps[0]) == (1, 7)


def test_equal_features_come_in_their_order() -> None:
    known = entries(200)
    same = np.random.default_rng(1).permutation(200) < 60
    known = replace(known, features=known.features[np.where(same, 0, 1)], steps=np.arange(200))
    index = Index(known)
    assert index.nearest(known.features[same][0], 60).steps.tolist() == np.flatnonzero(same).tolist()


def test_a_feature_that_points_nowhere_is_refused() -> None:
    for feature in (np.zeros(12), np.full(12, np.nan), np.full(12, np.inf)):
        with pytest.raises(ObservationError, match="0 or not finite"):
            Index(entries()).nearest(feature)
    np.testing.assert_allclose(np.linalg.norm(unit(np.full((3, 2), 1e30, np.float32)), axis=1), 1.0, rtol=1e-6)


def test_entries_come_back_from_their_file_as_they_were(tmp_path: Path) -> None:
    known = entries()
    known.save(tmp_path / "entries.safetensors")
    found = load_entries(tmp_path / "entries.safetensors")
    for name, part in vars(known).items():
        # Features are kept in half precision.
        np.testing.assert_allclose(getattr(found, name), part, rtol=0.0, atol=1e-3 if name == "features" else 0.0)
        assert getattr(found, name).dtype == part.dtype


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "entries.safetensors"
    with pytest.raises(BundleError, match="holds no entries"):
        load_entries(file)
    entries().save(file)
    intact, parts = file.read_bytes(), load_file(file)
    for damaged in (b"", intact[:-1], intact[:50], b"x" + intact, bytes(len(intact))):
        file.write_bytes(damaged)
        with pytest.raises(BundleError, match="holds no entries"):
            load_entries(file)
    features = parts["features"].copy()
    features[3, 4] = np.nan
    for changed in (
        {"features": features},
        {"features": 2.0 * parts["features"]},
        {"features": parts["features"].astype(np.float64)},
        {"features": parts["features"][:-1]},
        {"features": parts["features"].ravel()},
        {"tokens": parts["tokens"].astype(np.int64)},
        {"tokens": parts["tokens"][:, :0]},
        {"steps": parts["steps"][:, None]},
        {"more": parts["steps"]},
        {name: part[:0] for name, part in parts.items()},
    ):
        save_file({**parts, **changed}, file)
        with pytest.raises(BundleError, match="holds no entries"):
            load_entries(file)
    save_file({name: part for name, part in parts.items() if name != "steps"}, file)
    with pytest.raises(BundleError, match="holds no entries"):
        load_entries(file)
    file.write_bytes(intact)
    load_entries(file)


def test_entries_that_are_none_are_refused() -> None:
    known = entries()
    for tokens in (known.tokens + 200, known.tokens - 200):
        with pytest.raises(ConfigError, match="0 to 255"):
            replace(known, tokens=tokens)
    with pytest.raises(ConfigError, match="length 1"):
        replace(known, features=2.0 * known.features)


def test_a_rule_is_kept_as_it_is_and_refused_out_of_range() -> None:
    rule = SkipRule(0.9, 3)
    assert read_record(asdict(rule), SkipRule, "rule") == rule
    for values in ((1.1, 3), (0.9, -1)):
        with pytest.raises(ConfigError):
            SkipRule(*values)


def clustered(count: int, seed: int) -> Entries:
    """Features of count steps of 40 places that are always the same."""
    centres, rng = np.random.default_rng(0).normal(size=(40, 48)), np.random.default_rng(seed)
    features = unit(centres[rng.integers(40, size=count)] + 0.5 * rng.normal(size=(count, 48)))
    numbers = np.arange(count)
    return Entries(features, np.zeros((count, 2), np.int64), numbers, numbers)


def recall(approximate: Index, exact: Index, queries: np.ndarray, count: int) -> float:
    """The share of the nearest that is found."""
    return float(np.mean([
        np.isin(exact.nearest(query, count).steps, approximate.nearest(query, count).steps).mean() for query in queries
    ]))  # fmt: skip


def test_a_graph_finds_almost_all_and_answers_the_same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    known, queries = clustered(3000, 1), clustered(150, 2).features
    exact, graph, again = Index(known), Index(known, graph=True), Index(known, graph=True)
    assert recall(graph, exact, queries, 5) > 0.97
    for query in queries[:50]:
        np.testing.assert_array_equal(graph.nearest(query, 5).steps, again.nearest(query, 5).steps)
    # What is asked for is what is searched for: the nearest to something else are not these.
    other = Index(replace(known, features=known.features[::-1]), graph=True)
    assert recall(graph, exact, queries, 5) > 5 * recall(other, exact, queries, 5)
    monkeypatch.setattr(heisd, "_GRAPH_DEGREE", 2)
    monkeypatch.setattr(heisd, "_EF_SEARCH", 1)
    assert recall(Index(known, graph=True), exact, queries, 5) < 0.9


def test_where_the_graph_leads_to_too_few_it_compares_all(monkeypatch: pytest.MonkeyPatch) -> None:
    known = clustered(200, 1)
    graph = Index(known, graph=True)
    import voyager

    class Torn:
        def query(self, *_: object, **__: object) -> None:
            raise voyager.RecallError("fewer")

    monkeypatch.setattr(graph, "_graph", Torn())
    feature = known.features[3]
    np.testing.assert_array_equal(graph.nearest(feature, 7).steps, Index(known).nearest(feature, 7).steps)


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "voyager", None)
    with pytest.raises(MissingExtraError, match=r"specact\[retrieval\]"):
        Index(clustered(5, 1), graph=True)
