"""Every way to decode a token policy, in closed loop, with drafters that are trained here."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experiments.grid import Run
from experiments.tokens import POLICIES, first_errors, joined, plan
from experiments.tokens.gain import measure_gain
from experiments.tokens.methods import METHODS
from msgspec import structs
from tests.decodings import DECODINGS
from tests.lab.train.test_drafters import LENGTH, recipe_for, train_drafters, write_target
from tests.tiny import quiet

from specact.errors import ConfigError
from specact.families.tokens.pair import TokenParts
from specact.lab.evaluation.run import Evaluation, evaluate, read_table
from specact.lab.rollout.pool import Pool
from specact.lab.rollout.steps import REASONS
from specact.load import load_pair
from specact.pair import Pair
from specact.policy import SpeculativePolicy
from specact.systems.heisd import Similarity, SkipRule, VerifySkip
from specact.systems.tokens import DrafterBundle, DrafterSettings
from specact.types import StepRecord

EPISODES = 3
RAN = ("ar", "strict", "kerv", "kerv_last", "heisd_fixed", "random_tokens", "heisd_similar", "heisd_similar_random")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with its drafters beside it."""
    whole = tmp_path_factory.mktemp("tokens")
    target = write_target(whole / "small")
    # Hardly trained, and a chain: drafts are refused often enough to see what then happens.
    train_drafters(structs.replace(recipe_for(target), steps=10, top=1, nodes=4), whole / "run", quiet)
    shutil.copytree(whole / "run" / "bundles" / "drafted", whole / "small" / "drafters")
    return whole / "small"


@pytest.fixture(scope="module")
def out(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run")
    # The target drafts for itself where a draft policy is asked for.
    methods = tuple(METHODS[name] for name in RAN)
    what = Evaluation(str(folder), None, methods, EPISODES, draft=str(folder), rate=0.4, calibration_episodes=4)
    summary = evaluate(what, run, quiet, Pool(1))
    assert tuple(summary["methods"]) == RAN and summary["link"] == "none", "times are measured"
    return run


def test_a_method_is_a_cell_and_what_runs_at_its_rate_is_with_it(tmp_path: Path) -> None:
    ran = {cell.name: [method.name for method in cell.work.args[0].resolved]  # type: ignore[attr-defined]
           for cell in plan(Run(tmp_path)) if "/methods/" in cell.name}  # fmt: skip
    for policy in POLICIES:
        methods = [name for cell, names in ran.items() if cell.startswith(f"{policy}/") for name in names]
        assert len(set(methods)) == len(methods) > 20
    assert ran["kitchen-tokens/methods/heisd_similar"] == ["heisd_similar", "heisd_similar_random"]
    assert all(METHODS[names[0]].rate_of is None and cell.endswith(f"/{names[0]}") for cell, names in ran.items())


def test_contrasts_are_of_the_outcomes_of_all_cells() -> None:
    """Of one that ran again, the new ones."""

    def cell(name: str, *won: int) -> dict[str, Any]:
        return {"methods": {name: {"rate": sum(won)}}, "outcomes": {name: {"success": won, "score": won}}}

    cells = {"specvla": cell("specvla", 1, 0, 1, 1), "ar": cell("ar", 1, 1, 1, 1)}
    results = joined(cells)
    assert list(results["methods"]) == ["ar", "specvla"], "in the order of the page"
    (row,) = results["contrasts"]
    assert (row["first"], row["second"], row["success"]["difference"]) == ("specvla", "ar", -0.25)
    rerun = joined(cells | {"ar": cell("ar", 0, 0, 0, 0)})
    assert rerun["contrasts"][0]["success"]["difference"] == 0.75


def steps(out: Path, method: str) -> dict[str, np.ndarray]:
    return read_table(out / "steps" / method)


def test_episodes_of_a_shard_are_those_of_shards_of_one(folder: Path, out: Path, tmp_path: Path) -> None:
    """Every column but the times; a near tie between two tokens may fall otherwise in one of the 15 episodes."""
    methods = ("ar", "strict", "kerv", "heisd_fixed", "random_tokens")
    alone = Evaluation(
        str(folder), methods=tuple(METHODS[name] for name in methods), episodes=EPISODES, draft=str(folder), shard=1
    )
    evaluate(alone, tmp_path / "run", quiet, Pool(1))
    differing = 0
    for method in methods:
        single, all_together = steps(tmp_path / "run", method), steps(out, method)
        names = [name for name in single if not name.endswith("_s")]
        assert {name.rsplit("_", 1)[-1] for name in single} >= {"step", "transmitted", "passes", "compensated", "s"}
        for episode in range(EPISODES):
            rows = [table["episode"] == episode for table in (single, all_together)]
            pairs = [(single[name][rows[0]], all_together[name][rows[1]]) for name in names]
            differing += not all(
                len(a) == len(b) and np.allclose(a, b, rtol=0.0, atol=1e-5, equal_nan=True) for a, b in pairs
            )
    assert differing <= 1


def test_verification_goes_where_features_are_least_alike(out: Path) -> None:
    """At a calibrated rate, beside chance at the rate that was reached."""
    gated, chance = steps(out, "heisd_similar"), steps(out, "heisd_similar_random")
    free = gated["reason"] == REASONS.index("score")
    sent, skipped = (gated["score"][free & (gated["transmitted"] == sent)] for sent in (True, False))
    assert sent.min() >= skipped.max() and len(sent) > 5 < len(skipped)
    assert 0.1 < gated["transmitted"].mean() < 0.8
    # Four standard errors of a share of so many inferences.
    apart = abs(chance["transmitted"].mean() - gated["transmitted"].mean())
    assert apart < 4.0 * 0.5 / np.sqrt(len(chance["transmitted"]))
    (stored,) = (out / "calibration").iterdir()
    assert stored.name == "similarity-0.40-heisd_similar.json"


def test_what_there_is_to_gain_is_judged_on_the_same_inferences(folder: Path) -> None:
    pair = load_pair(str(folder), draft=str(folder))
    assert isinstance(pair.parts, TokenParts)
    gains = measure_gain(pair, ("ar", "strict", "specvla", "strict_draft", "kerv", "kerv_chunk_tail"), 1, 0)
    assert len({row["inferences"] for row in gains.values()}) == 1
    assert gains["ar"]["passes"] == LENGTH and gains["ar"]["relative"] == 1.0
    assert all(0.0 < row["proposal"] < row["relative"] for row in gains.values())
    assert gains["strict"]["greedy"] > 0.99 and gains["strict_draft"]["passes"] == 2.0
    assert gains["specvla"]["passes"] <= gains["strict"]["passes"]
    assert gains["kerv"]["compensated"] > 0.0
    whole = gains["kerv_chunk_tail"]["executed"]
    assert gains["kerv"]["executed"] < whole == gains["ar"]["executed"] == 1.0, "a compensated action ends a chunk"


def test_first_errors_are_those_of_an_inference_and_of_its_first_action(folder: Path, tmp_path: Path) -> None:
    errors = first_errors(str(folder), 2, tmp_path, Run(tmp_path, quick=True))
    assert (errors["tokens"], errors["history"], errors["plain_steps"], errors["ahead"]) == (LENGTH, 10, 4, 1)
    for name in ("specvla", "kerv"):
        rejected = steps(tmp_path, name)["rejected"]
        assert errors[f"{name}_first"]["mean"] == pytest.approx(rejected.mean())
        of_action = np.minimum(rejected, errors["of_action"]).mean()
        assert errors[f"{name}_first_of_action"]["mean"] == pytest.approx(of_action)
        assert 1.0 <= of_action <= rejected.mean() <= LENGTH


def test_a_decoding_with_a_head_needs_drafters(folder: Path) -> None:
    with pytest.raises(ConfigError, match="needs drafters"):
        measure_gain(load_pair(str(folder)).composed(drafters=None), ("specvla",), 1, 0)


def driven(pair: Pair[Any], gate: VerifySkip, count: int = 30) -> list[StepRecord]:
    """A robot that stands still: the scene always looks as it did."""
    policy, records = SpeculativePolicy(pair, gate), []
    window = pair.observation.zeros()
    for _ in range(count):
        for _ in range(pair.execute):
            policy.act_on(window)
        assert policy.record is not None
        records.append(policy.record)
    return records


def test_verification_is_skipped_while_the_scene_looks_the_same_but_not_for_long(folder: Path) -> None:
    loaded = load_pair(str(folder))
    assert isinstance(loaded.parts, TokenParts) and loaded.parts.drafters is not None
    drafters, pair = loaded.parts.drafters, loaded.composed(decoding=DECODINGS["heisd_no_switch"])
    for reach in (0, 1, 3):
        records = driven(pair, VerifySkip(0.01, reach=reach))
        sent = [record.decision.transmit for record in records]
        assert sent == [number % (reach + 1) == 0 for number in range(len(records))]
    # Nothing looks so alike.
    assert all(record.decision.transmit for record in driven(pair, VerifySkip(-0.5, reach=3), 5))
    # The drafters' own bounds.
    settings = replace(drafters.settings, skip=SkipRule(0.5, 2))

    def fitted(settings: DrafterSettings) -> DrafterBundle:
        assert isinstance(drafters, DrafterBundle)
        return replace(drafters, spec=replace(drafters.spec, settings=settings))

    calibrated = pair.composed(drafters=fitted(settings))
    gate = VerifySkip.for_pair(calibrated, 0.0)
    assert (gate.threshold, gate.reach) == (0.5, 2)
    assert VerifySkip.for_pair(calibrated, 0.0, reach=5).reach == 5
    # Where the head drafts, nothing is skipped.
    slow = pair.composed(decoding=DECODINGS["heisd"], drafters=fitted(replace(settings, fast=2.0)))
    assert all(record.decision.transmit for record in driven(slow, VerifySkip(0.01, reach=3), 5))


def test_a_pair_without_drafters_cannot_skip() -> None:
    for kind in (VerifySkip, Similarity):
        with pytest.raises(ConfigError, match=r"no drafters beside it, .* choose a token policy with drafters"):
            kind.for_pair(load_pair("ball"), 0.0)
        with pytest.raises(ConfigError, match=r"is decoded without its memory, .* such as heisd_no_switch"):
            kind.for_pair(load_pair("relocate-tokens", decoding="last"), 0.0)
        assert isinstance(kind.for_pair(load_pair("relocate-tokens", decoding="heisd_no_switch"), 0.0), kind)
