"""Goals of a study: held to what they say, in runs whose numbers are known."""

from pathlib import Path
from typing import Any

from specact.report.goals import goals_of
from specact.report.runs import Run
from specact.report.studies import group


def run(
    bundle: str, rate: float, contrast: tuple[float, float] = (0.0, 1.0), limit: str | None = None, **success: float
) -> Run:
    """A run of methods with these success rates; the first of ``contrast`` is the best gate's over random, with p."""
    methods: dict[str, Any] = {
        name: {
            "success": {"rate": value},
            "score": {"mean": value},
            "true_skip_ratio": value,
            "transmission_rate": rate,
            "gate_efficiency": {"learned": 0.85, "adahi": 0.2}.get(name),
            "choice_efficiency": 0.9 if name == "learned" else None,
            "inferences": 10,
        }
        for name, value in success.items()
    }
    rows = [
        {"first": first, "second": "random", "success": {"difference": contrast[0], "p": contrast[1]}}
        for first in ("adahi", "learned")
    ]
    summary = {
        "bundle": bundle, "rate": rate, "realtime": False, "episodes": 10, "methods": methods, "contrasts": rows,
    }  # fmt: skip
    evaluation = {"env": "ball", "fingerprint": bundle, "gates": {"max_skips": limit}}
    return Run(Path(f"{bundle}-{rate}"), {"evaluation": evaluation}, summary)


def test_goals_are_met_or_not_by_their_numbers() -> None:
    runs = [
        run("ball", 0.6, hybrid=0.9, random=0.7, adahi=0.88, learned=0.895, oracle=0.9),
        run("ball", 0.2, hybrid=0.9, random=0.7, adahi=0.69, learned=0.75, oracle=0.8),
        run("ball-distilled", 0.4, (0.05, 0.01), hybrid=0.9, random=0.8, adahi=0.8, learned=0.88, oracle=0.9),
        run("ball-undertrained", 0.6, hybrid=0.9, random=0.5, adahi=0.4, oracle=0.9),
    ]
    found = {(goal.bundle, goal.rate, goal.what.split(":")[0]): goal for goal in goals_of(group(runs))}
    skips = "ADAHI skips better than random"
    assert found["ball", 0.6, skips].met
    assert "+21" in found["ball", 0.6, skips].beside
    assert not found["ball-undertrained", 0.6, skips].met
    share = found["ball", 0.6, "success of the best gate at least 99% of hybrid's"]
    assert share.met and share.reached == "99.4%" and share.beside == "learned; the oracle 100.0%"
    efficiency = found["ball", 0.2, "efficiency of the learned gate at least 0.8"]
    assert efficiency.met and efficiency.reached == "0.85" and efficiency.beside.endswith("among the steps it met 0.90")
    assert found["ball-distilled", 0.4, "success of the best gate at least 97% of hybrid's"].met
    assert found["ball-distilled", 0.4, "success of the best gate above random's at the same rate"].met
    assert ("ball-undertrained", 0.6, "success of the best gate at least 99% of hybrid's") not in found


def test_a_difference_inside_its_interval_is_not_called_better() -> None:
    runs = [run("ball-distilled", 0.4, (0.05, 0.06), hybrid=0.9, random=0.8, learned=0.88, oracle=0.9)]
    above = [goal for goal in goals_of(group(runs)) if "above random" in goal.what]
    assert [goal.met for goal in above] == [False]
    worse = [run("ball-distilled", 0.4, (-0.05, 0.01), hybrid=0.9, random=0.8, learned=0.7, oracle=0.9)]
    assert not any(goal.met for goal in goals_of(group(worse)) if "above random" in goal.what)


def test_the_best_of_two_gates_has_to_be_twice_as_sure() -> None:
    for p, met in ((0.02, True), (0.03, False)):
        runs = [run("ball-distilled", 0.4, (0.05, p), hybrid=0.9, random=0.8, adahi=0.8, learned=0.88, oracle=0.9)]
        assert [goal.met for goal in goals_of(group(runs)) if "above random" in goal.what] == [met]


def test_an_efficiency_that_is_undefined_is_not_met_and_says_so() -> None:
    made = run("ball", 0.2, hybrid=0.9, random=0.7, learned=0.75, oracle=0.8)
    made.methods["learned"]["gate_efficiency"] = None
    (goal,) = goals_of(group([made]))
    assert not goal.met and goal.reached.startswith("undefined")


def test_goals_come_kind_by_kind() -> None:
    pairs = [run(name, 0.6, hybrid=0.9, random=0.7, adahi=0.8, learned=0.9, oracle=0.9) for name in ("ball", "swarm")]
    found = [(goal.what.split()[0], goal.bundle) for goal in goals_of(group(pairs))]
    assert found == [(kind, name) for kind in ("ADAHI", "efficiency", "success") for name in ("ball", "swarm")]


def test_a_gate_that_sends_more_is_not_better_at_the_same_rate() -> None:
    for more, met in ((0.02, True), (0.05, False)):
        made = run("ball-distilled", 0.4, (0.05, 0.001), hybrid=0.9, random=0.8, learned=0.88, oracle=0.9)
        made.methods["learned"]["transmission_rate"] += more
        assert [goal.met for goal in goals_of(group([made])) if "above random" in goal.what] == [met]


def test_a_run_of_adahi_alone_is_held_to_nothing() -> None:
    """As the study makes it for rejection over deviation, with more episodes than the table beside it."""
    table = run("ball", 0.6, hybrid=0.9, random=0.7, adahi=0.88, learned=0.895, oracle=0.9)
    assert goals_of(group([table, run("ball", 0.6, adahi=0.88)])) == goals_of(group([table]))


def test_a_run_without_the_limit_on_skips_is_held_to_efficiency_alone() -> None:
    runs = [
        run("swarm", 0.6, hybrid=0.9, random=0.7, adahi=0.88, learned=0.895, oracle=0.9),
        run("swarm", 0.6, limit="unlimited", random=0.7, learned=0.6, oracle=0.6),
    ]
    free = [goal for goal in goals_of(group(runs)) if goal.bundle == "swarm, no limit on skips"]
    assert [goal.what for goal in free] == ["efficiency of the learned gate at least 0.8"]
