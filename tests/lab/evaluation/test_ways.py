"""What is enough within a budget: choices on made-up results, intervals over seeds, costs of real parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from specact import load_pair
from specact.lab.evaluation.advice import (
    Way,
    behind,
    choose,
    device_cost,
    measure_parts,
    runs_alone,
    without_server,
)
from specact.lab.rollout.methods import METHODS

N = 60


def way(method: str, asked: float, cost: float, *lost: Iterable[int]) -> Way:
    """A way that loses these episodes, of N at each training seed."""
    won = {seed: {str(k): k not in set(of) for k in range(N)} for seed, of in enumerate(lost)}
    return Way("draft", method, asked, asked, cost, won)


def same(lost: Iterable[int], seeds: int = 3) -> list[list[int]]:
    return [list(lost)] * seeds


DRAFT = way("draft", 0.0, 0.2, *same(range(20)))
HEAD = way("head_draft", 0.0, 0.5, *same(range(1)))
CHANCE = way("random_learned", 0.4, 0.22, *same(range(6)))
LEARNED = way("learned", 0.4, 0.5, *same(range(2)))
HYBRID = way("hybrid", 1.0, 0.2, *same(range(1)))
REMOTE = replace(way("target", 1.0, 0.0, *same(range(1))), draft="")
TARGET = replace(way("target_on_device", 0.0, 1.0, *same(range(1))), draft="")
WAYS = (TARGET, REMOTE, HYBRID, LEARNED, CHANCE, HEAD, DRAFT)


def method(ways: Sequence[Way], budget: float) -> str:
    found = choose(ways, budget)
    assert found is not None
    return found.way.method


def test_the_simplest_that_is_not_shown_to_be_worse_is_chosen() -> None:
    assert choose((TARGET, DRAFT), 0.1) is None, "nothing fits"
    assert method(WAYS, 0.1) == "target", "nothing but asking fits"
    # The draft alone is shown to be worse. What is verified at random loses .083, more than the margin.
    assert method(WAYS, 0.3) == "target"
    assert method((LEARNED, HYBRID, CHANCE, DRAFT), 0.5) == "learned"
    assert method(WAYS, 0.5) == "head_draft", "no gate is needed"
    assert method(WAYS, 1.0) == "target_on_device", "what fits needs neither draft nor server"
    # One episode of 180 is no difference: then chance needs less than a score, and what is cheaper comes first.
    almost = replace(CHANCE, successes=way("learned", 0.4, 0.5, range(2), range(2), range(3)).successes)
    assert method((LEARNED, almost), 1.0) == "random_learned"
    # A draft that was lucky at one seed and failed at the others: all episodes taken for alike would not show it.
    lucky = way("draft", 0.0, 0.2, range(3), range(30), range(30))
    assert method((lucky, HYBRID), 1.0) == "hybrid"
    # Paired, four episodes of sixty are a difference; as if they were others' episodes, they are none.
    paired = way("draft", 0.0, 0.2, range(5), range(5), range(5))
    assert behind(paired, HYBRID) is not None
    assert method((paired, HYBRID), 1.0) == "hybrid"


def test_at_most_so_much_is_asked_for() -> None:
    found = choose(WAYS, 0.3, most_rate=0.4)
    assert found is not None and found.way.method == "random_learned"
    found = choose(WAYS, 0.3, most_rate=0.0)
    assert found is not None and found.way.method == "draft"
    assert "no gate is needed" in str(found)
    found = choose((LEARNED, CHANCE), 1.0)
    assert found is not None and "no gate is needed" not in str(found)


def test_from_which_budget_on_nobody_needs_a_server() -> None:
    assert without_server(WAYS) == 0.5
    assert without_server((TARGET, REMOTE, DRAFT)) == 1.0
    assert without_server((REMOTE, DRAFT, HYBRID)) is None
    # A larger budget that buys more with a server ends what a smaller one could do without.
    dear = way("learned", 0.4, 0.8, *same([]))
    assert without_server((replace(HEAD, successes=way("", 0, 0, *same(range(5))).successes), dear, TARGET)) == 1.0


def test_as_many_successes_as_episodes_are_no_certainty() -> None:
    every = way("draft", 0.0, 0.2, [], [])
    assert every.success.high == 1.0 and 0.95 < every.success.low < 1.0


def test_episodes_that_were_not_shared_are_not_compared() -> None:
    other = replace(HYBRID, successes={0: {"another": True}})
    assert behind(DRAFT, other) is None
    assert behind(DRAFT, replace(HYBRID, successes={0: HYBRID.successes[0], 9: {"0": True}})) is not None


def test_costs_are_those_of_the_parts_that_a_method_evaluates() -> None:
    parts = {"draft": 1.0, "head_draft": 3.0, "target": 9.0, "gate random": 0.1, "gate learned": 2.5}
    free = {
        "draft": 1.0, "head_draft": 3.0, "target": 0.0, "target_on_device": 9.0, "hybrid": 1.0, "random": 1.1,
        "learned": 3.5, "head_random": 3.1,
    }  # fmt: skip
    assert {name: device_cost(name, parts, 1.0) for name in free} == free
    asking = parts | {"ask": 4.0}
    assert {name: device_cost(name, asking, 0.5) - cost for name, cost in free.items()} == pytest.approx(
        dict.fromkeys(free, 2.0) | {"target_on_device": 0.0}
    )
    assert device_cost("draft", asking, 0.0) == 1.0
    # What decodes alone asks a server, or takes the target's time.
    assert device_cost("full_1", asking, 1.0) == 4.0 and device_cost("full_1", asking, 0.0, on_device=True) == 9.0
    with pytest.raises(KeyError):
        device_cost("adahi", parts, 0.5)


def test_a_way_with_few_episodes_is_neither_chosen_nor_compared_with() -> None:
    lucky = replace(HYBRID, successes={0: dict.fromkeys(("0", "1"), True)})
    without, found = choose((DRAFT, CHANCE), 0.5), choose((DRAFT, CHANCE, lucky), 0.5)
    assert found == without and found is not None and found.best is CHANCE


def test_descriptions_name_how_chunks_are_decoded() -> None:
    told = {
        name: str(way(name, asked, 1.0, [0]))
        for name, asked in (
            ("full_1", 1.0), ("ar", 1.0), ("block", 0.0), ("specvla", 1.0), ("heisd_fixed", 0.3), ("unchecked", 0.5),
        )
    }  # fmt: skip
    assert told == {
        "full_1": "the target on a server at every inference (full_1), without a draft",
        "ar": "the target on a server at every inference (ar), without a draft",
        "block": "the draft (block) alone",
        "specvla": "the draft (specvla), every inference verified",
        "heisd_fixed": "the draft (heisd_fixed), 30% verified by the gate periodic",
        "unchecked": "the draft (unchecked), 50% verified at random",
    }
    here = replace(way("full_1", 0.0, 1.0, [0]), decoded_on_device=True)
    assert str(here) == "the target on the device (full_1)" and here.on_device
    assert {name for name in METHODS if runs_alone(name)} == {"ar", "full", "full_5", "full_2", "full_1"}


def test_the_parts_of_real_pairs_are_timed(tiny_bundle: Path) -> None:
    parts = measure_parts({"": load_pair("ball")}, rounds=5)[""]
    assert all(ms > 0.0 for ms in parts.values())
    costs = {
        name: device_cost(name, parts, 0.0)
        for name, method in METHODS.items()
        if not (name.startswith("oracle") or method.decoding)
    }
    assert costs["target"] == 0.0 < costs["draft"] < costs["random"]
    assert device_cost("target", parts, 1.0) == parts["ask"]
    without = measure_parts({"": load_pair(tiny_bundle)}, rounds=5)[""]
    assert parts.keys() - without.keys() == {"head_draft", "gate learned", "gate learned_action"}
