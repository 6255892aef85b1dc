"""FreqCache and its controls on the same observations."""

from __future__ import annotations

from typing import Any

import pytest
from experiments.freqcache import REUSE, compare_variants
from tests.systems.test_freqcache import window

from specact.load import load_pair
from specact.pair import Pair


@pytest.fixture(scope="module")
def pair() -> Pair[Any]:
    return load_pair("metaworld-flow")


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
