"""FreqCache and its controls on the same observations."""

from __future__ import annotations

from typing import Any

import pytest
from experiments.freqcache import REUSE, compare_variants, measure_pans
from tests.systems.test_freqcache import window

from specact.load import load_pair
from specact.pair import Pair


@pytest.fixture(scope="module")
def pair() -> Pair[Any]:
    return load_pair("metaworld-flow")


def test_pans_of_smooth_scenes_are_found_or_refused_and_without_a_window_they_are_wrong_with_confidence() -> None:
    """On other scenes than those that the least confidence was chosen by, whose seed is 101."""
    windowed, bare = measure_pans(7, 20).values()
    assert windowed[0]["exact"] == windowed[0]["confident"] == 1.0
    assert windowed[1]["confident"] > 0.9
    assert windowed[5]["confident"] == 0.0, "at 6 pixels nothing can be told"
    for row in windowed:
        assert row["wrong"] == 0.0
        assert row["unrelated"] < 0.1
    for row in bare[1:]:
        assert row["exact"] < 0.2
        assert row["wrong"] > 0.2


def test_standing_pictures_cost_nothing_and_changing_ones_do(pair: Pair[Any]) -> None:
    still = compare_variants(pair, [[window(0)] * 3], 1)
    assert still["inferences"] == 2
    assert still["cameras"]["image.gripper"] == {"confident": 1.0, "moved": 0.0}
    for name in REUSE:
        assert 0.0 < still["variants"][name]["reused"] <= 1.0
        assert still["variants"][name]["cosine"] == pytest.approx(1.0, abs=1e-5)
        assert still["variants"][name]["distance"] < 1e-3
    changing = compare_variants(pair, [[window(0), window(1), window(2)]], 1)["variants"]
    assert changing["freqcache"]["reused"] < still["variants"]["freqcache"]["reused"], "no motion to be sure of"
    assert changing["freqcache_frozen"]["reused"] == 1.0
    assert changing["freqcache_frozen"]["distance"] > 0.01 > still["variants"]["freqcache_frozen"]["distance"]
