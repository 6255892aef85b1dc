"""The contrasts of a table, each with its p-value among all of them."""

import numpy as np
import pytest

from specact.lab.evaluation.metrics import contrasts
from specact.lab.rollout.methods import load_method
from specact.lab.rollout.statistics import contrast, holm
from specact.lab.rollout.steps import Table


def outcomes(**rates: float) -> dict[str, Table]:
    """40 episodes per method that succeed at these rates, and a score that is not the success."""
    rng = np.random.default_rng(0)
    made = {}
    for method, rate in rates.items():
        success = rng.random(40) < rate
        made[method] = {"success": success, "score": success + rng.random(40)}
    return made


def test_a_table_is_one_family_for_each_end_point() -> None:
    tables = outcomes(draft=0.2, target=0.9, hybrid=0.9, random=0.6, adahi=0.8)
    rows = contrasts(map(load_method, tables), tables)
    assert [(row["first"], row["second"]) for row in rows] == [
        ("target", "draft"), ("hybrid", "target"), ("adahi", "random"), ("adahi", "hybrid"),
    ]  # fmt: skip
    for end_point in ("success", "score"):
        values = {name: table[end_point].astype(float) for name, table in tables.items()}
        alone = [contrast(values[row["first"]], values[row["second"]]).p for row in rows]
        assert [row[end_point]["p"] for row in rows] == alone
        assert [row[end_point]["p_holm"] for row in rows] == pytest.approx(holm(alone))
    # Of four contrasts the smallest p counts four times.
    least = min(rows, key=lambda row: float(row["success"]["p"]))["success"]
    assert least["p_holm"] == pytest.approx(4 * least["p"])


def test_a_learned_gate_is_held_to_the_random_gate_with_its_own_privileges_and_to_its_head() -> None:
    few = ("random", "learned", "head_draft", "draft")
    methods = (*few, "random_learned", "head_random", "adahi", "uncertainty")
    assert load_method("learned").rivals_among(few) == ["random", "head_draft"]
    assert load_method("learned").rivals_among(methods) == ["random_learned", "head_draft", "head_random", "adahi"]
    assert contrasts([load_method("learned")], outcomes(learned=0.5)) == []


def test_a_gate_of_ones_own_is_held_to_a_random_one_at_its_rate_and_to_asking_always() -> None:
    gate = "specact.systems.adahi:ActionDeviation"
    tables = outcomes(**{gate: 0.8, "hybrid": 0.9, f"random_{gate}": 0.6, "random": 0.6})
    rows = contrasts([load_method(name) for name in tables], tables)
    assert [row["second"] for row in rows if row["first"] == gate] == [f"random_{gate}", "hybrid"]
    control = load_method(f"random_{gate}")
    assert (control.gate, control.rate_of, control.limits_of) == ("random", gate, gate)
    del tables[f"random_{gate}"]
    assert [row["second"] for row in contrasts([load_method(gate)], tables)] == ["random", "hybrid"]
