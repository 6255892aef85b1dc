"""FreqCache and its controls on the same observations, and the page of the study."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.families.freqcache.test_cached import window
from tests.tiny import quiet

from specact.errors import ConfigError
from specact.families.flash.pair import FlashPair
from specact.families.load import load_pair
from specact.lab.evaluation.cache_study import METHODS, VARIANTS, compare_variants, plan_cache, write_reuse
from specact.lab.evaluation.evaluation import Evaluation
from specact.lab.evaluation.flow_study import FlowStudy
from specact.lab.report.cache import draw_cache, methods_table, report_markdown
from specact.lab.report.drawing import style


@pytest.fixture(scope="module")
def pair() -> FlashPair:
    found = load_pair("metaworld-flow")
    assert isinstance(found, FlashPair)
    return found


def test_standing_pictures_cost_nothing_and_changing_ones_do(pair: FlashPair) -> None:
    still = compare_variants(pair, [[window(0)] * 3], 1, quiet)
    assert still["inferences"] == 2
    assert still["cameras"]["image.gripper"] == {"confident": 1.0, "moved": 0.0}
    for name in VARIANTS:
        assert 0.0 < still["variants"][name]["reused"] <= 1.0
        assert still["variants"][name]["cosine"] == pytest.approx(1.0, abs=1e-5)
        assert still["variants"][name]["distance"] < 1e-3
    changing = compare_variants(pair, [[window(0), window(1), window(2)]], 1, quiet)["variants"]
    assert changing["freqcache"]["reused"] < still["variants"]["freqcache"]["reused"], "no motion to be sure of"
    assert changing["freqcache_frozen"]["reused"] == 1.0
    assert changing["freqcache_frozen"]["distance"] > 0.01 > still["variants"]["freqcache_frozen"]["distance"]


def test_an_inference_is_the_sum_of_its_parts(pair: FlashPair) -> None:
    costs = compare_variants(pair, [[window(0)] * 2], 1, quiet)["costs"]
    parts = {name: costs[name]["ms"] for name in ("encoder", "prefix", "expert", "freqcache:prefix")}
    assert costs["full_3"]["ms"] == pytest.approx(parts["encoder"] + parts["prefix"] + 3 * parts["expert"])
    whole = parts["encoder"] + parts["freqcache:prefix"] + 10 * parts["expert"]
    assert costs["freqcache"]["ms"] == pytest.approx(whole)
    assert costs["full_10"]["relative"] == 1.0


def test_the_page_names_every_method(pair: FlashPair, tmp_path: Path) -> None:
    (chapter,) = plan_cache(seed=3, quick=True)
    assert chapter.evaluation.methods == METHODS and chapter.folder == "metaworld-flow"
    found = compare_variants(pair, [[window(0)] * 2], 3, quiet)
    reuse = {"episodes": 1, "seed": 3, "inference": {"execute": 4, **found}, "step": {"execute": 1, **found}}
    success = {"rate": 0.5, "low": 0.2, "high": 0.8}
    method = {"success": success, "reused": 0.4, "distance": 0.01, "actions_per_round": 4.0}
    contrast = {"first": "freqcache", "second": "full", "success": {"difference": 0, "low": 0, "high": 0, "p_holm": 1}}
    summary = {
        "bundle": "metaworld-flow", "env": "metaworld", "episodes": 10, "seed": 3,
        "methods": dict.fromkeys(METHODS, method), "contrasts": [contrast],
    }  # fmt: skip
    page = "\n".join(report_markdown(summary, reuse))
    assert all(f"| `{name}` |" in page and f"| `{name}` |" in methods_table() for name in METHODS)
    assert "every 4 control steps" in page and "10 paired episodes" in page
    with style():
        draw_cache(summary, reuse).savefig(tmp_path / "cache.png")


def test_a_target_that_has_nothing_to_reuse_says_so(pair: FlashPair, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="specact export --refresh"):
        compare_variants(replace(pair, refresh=None), [[window(0)]], 1, quiet)
    with pytest.raises(ConfigError, match="no flow policy"):
        write_reuse(FlowStudy(Evaluation("ball"), 1), tmp_path / "reuse.json", quiet)
