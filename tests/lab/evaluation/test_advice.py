"""What a device should run: what is found and missing on real evaluations, choices and costs on made-up ones."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

pytest.importorskip("mujoco")

from specact import load_pair
from specact.cli.report import Advise
from specact.errors import ConfigError
from specact.lab.evaluation.advice import (
    Way,
    advise,
    behind,
    choose,
    device_cost,
    measure_parts,
    parts_of,
    round_trip_ms,
    runs_alone,
    runs_of,
    ways_of,
    without_server,
)  # fmt: skip
from specact.lab.evaluation.run import Evaluation, evaluate
from specact.lab.evaluation.runs import Run
from specact.lab.rollout.methods import METHODS as EVERY
from specact.lab.rollout.pool import Pool

METHODS = ("draft", "head_draft", "target", "hybrid", "random_learned", "learned")
# Stated, so that no answer depends on a clock: what this device would take.
PARTS = {
    "draft": 1.0, "head_draft": 2.0, "target": 8.0, "gate random": 0.1, "gate adahi": 0.1, "gate uncertainty": 0.5,
    "gate learned": 1.2, "gate learned_action": 2.0,
}  # fmt: skip
STAND_IN_MS = 4321.0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An evaluation that was accounted with the time of somebody's stand-in for a large target."""
    out = tmp_path_factory.mktemp("advise") / "run"
    what = Evaluation("ball", None, METHODS, 40, seed=5, rate=0.4, target_ms=STAND_IN_MS, shard=40)
    evaluate(what, out, lambda *told: None, Pool(1))
    return out


def answer(run: Path | None, budget_ms: float, **options: Any) -> dict[str, Any]:
    pair = load_pair("ball")
    runs, left_out = runs_of(pair, () if run is None else (run,))
    assert not left_out
    return advise(pair, runs, budget_ms, {"": PARTS}, **options)


def test_a_target_that_fits_runs_on_the_device(run: Path) -> None:
    for folder in (run, None):
        advice = answer(folder, 8.0)
        assert advice["target_fits"] and advice["advice"].startswith("the target fits on the device")
    slower = answer(run, 8.0, kappa=2.0)
    assert not slower["target_fits"] and any("--kappa" in text for text in slower["missing"])


def test_the_head_as_the_draft_needs_no_gate_and_less_a_server(run: Path) -> None:
    """True rates of about .97, .97 and .66 for head, target and draft."""
    advice, cheaper = answer(run, 2.1), answer(run, 1.5)
    assert advice["advice"].startswith("the learned gate's head on the draft as the draft, alone")
    assert "no gate is needed" in advice["advice"] and advice["no_server_from_ms"] <= 8.0
    assert "head" not in cheaper["advice"].split(";")[0] and "alone" not in cheaper["advice"]
    assert answer(run, 0.5)["advice"].startswith("the target on a server at every inference")


def test_gates_stand_beside_chance_with_their_privileges_and_given_times_are_not_used(run: Path) -> None:
    advice = answer(run, 2.1)
    assert "4321" in (run / "manifest.json").read_text() and "4321" not in json.dumps(advice)
    ways = {way["method"]: way for way in advice["ways"]}
    assert ways.keys() == {*METHODS, "target_on_device"}
    assert ways["target"]["mean_ms"] == round_trip_ms(load_pair("ball"), "wifi-paper") + PARTS["target"]
    assert ways["learned"]["device_ms"] == PARTS["draft"] + PARTS["gate learned"]
    assert ways["learned"]["over_chance"]["low"] <= ways["learned"]["over_chance"]["mean"]
    assert all(way["over_chance"] is None for name, way in ways.items() if name != "learned")
    assert ways["target_on_device"]["success"] == ways["target"]["success"]
    assert (ways["target"]["asked"], ways["target_on_device"]["asked"]) == (1.0, 0.0)


def test_what_is_missing_comes_with_a_command_that_measures_it(run: Path, tiny_bundle: Path) -> None:
    from specact.cli.main import VERBS

    nothing = answer(None, 0.5)
    assert nothing["advice"].startswith("which draft or gate is enough cannot be said") and nothing["ways"] == []
    wanted = next(text for text in nothing["missing"] if text.startswith("success of"))
    assert "draft, head_draft, target, hybrid, random, adahi, uncertainty, random_learned, learned:" in wanted
    assert "success of random, adahi, uncertainty:" in " ".join(answer(run, 0.5)["missing"])
    said = [*nothing["missing"], *answer(None, 0.5, link="lte")["missing"]]
    assert any("longer than a control step" in text for text in said)
    headless = {part: ms for part, ms in PARTS.items() if "head" not in part and "learned" not in part}
    said += advise(load_pair(tiny_bundle), [], 0.5, {"": headless})["missing"]
    assert any(text.startswith("a learned gate: specact calibrate") for text in said)
    commands = [shlex.split(command) for text in said for command in re.findall("specact [^;]+", text)]
    assert {words[1] for words in commands} <= set(VERBS)


def test_runs_of_other_weights_or_with_a_deadline_are_left_out(run: Path, tmp_path: Path) -> None:
    for key, value in (("fingerprint", "0" * 12), ("env", "pusht"), ("decoding", "specvla")):
        manifest = Path(shutil.copytree(run, tmp_path / key)) / "manifest.json"
        values = json.loads(manifest.read_text())
        values["evaluation"][key] = value
        manifest.write_text(json.dumps(values))
    runs, left_out = runs_of(load_pair("ball"), [tmp_path])
    assert runs == [] and left_out.keys() == {tmp_path / name for name in ("fingerprint", "env", "decoding")}


def test_a_flow_policys_target_takes_the_time_of_a_whole_round_and_fewer_steps_are_advised(tmp_path: Path) -> None:
    pair = load_pair("ball-chase-flow")
    methods = ("full", "full_1", "flash", "block")
    evaluate(Evaluation("ball-chase-flow", None, methods, 4, shard=4), tmp_path / "run", lambda *_: None, Pool(1))
    runs, left_out = runs_of(pair, (tmp_path / "run",))
    assert len(runs) == 1 and not left_out
    measured = parts_of(pair, runs)
    parts = measured[""]
    assert parts["target"] > 10.0 * parts["gate random"]  # ten steps of a network, and no network at all
    assert measured.keys() == {"", *methods}
    advice = advise(pair, runs, 100.0 * parts["target"], measured)
    costs = {(way["method"], way["on_device"]): way["device_ms"] for way in advice["ways"]}
    # The block alone runs on the device, and so can full rounds; their success is the same there.
    full = {(name, on_device) for name in ("full", "full_1") for on_device in (False, True)}
    assert costs.keys() == {*full, ("flash", False), ("block", False)}
    assert costs["block", False] > 3.0 * parts["draft"]
    assert costs["full", True] == measured["full"]["target"] > 10.0 * costs["full", False]
    assert any(line.startswith("success of full_2: specact eval") for line in advice["missing"])
    runs = [replace(runs[0], summary=runs[0].summary | {"methods": {m: runs[0].methods[m] for m in methods[:2]}})]
    stated = {name: {"target": ms, "ask": 0.1} for name, ms in (("", 9.0), ("full", 9.0), ("full_1", 1.0))}
    for budget_ms, wanted in ((0.5, "the target on a server"), (2.0, "the target on the device (full_1)")):
        advice = advise(pair, runs, budget_ms, stated)
        assert advice["advice"].startswith(wanted) and advice["no_server_from_ms"] == 1.0


def test_a_target_that_fits_and_fails_is_not_advised(run: Path) -> None:
    """The target of this run fits, and a tenth of the draft's successes are its own."""
    pair, ((original,), _) = load_pair("ball"), runs_of(load_pair("ball"), (run,))

    class Worse(Run):
        def outcomes(self, method: str) -> Any:
            table = super().outcomes(method)
            return table | ({"success": table["episode"] % 10 == 0} if method == "target" else {})

    worse = Worse(original.folder, original.manifest, original.summary)
    advice = advise(pair, [worse], 8.0, {"": PARTS})
    assert advice["advice"].startswith("the target fits on the device, but more succeeds with")


def test_the_same_episodes_twice_count_once_and_two_endings_of_one_are_refused(run: Path, tmp_path: Path) -> None:
    pair, copy = load_pair("ball"), Path(shutil.copytree(run, tmp_path / "other"))
    runs, _ = runs_of(pair, (run, copy))
    assert {way.episodes for way in ways_of(runs, {"": PARTS})} == {40}
    (path,) = (copy / "episodes" / "draft").glob("*.parquet")
    table = pq.read_table(path)
    index = table.schema.get_field_index("success")
    pq.write_table(table.set_column(index, "success", pc.invert(table["success"])), path)
    with pytest.raises(ConfigError, match=r"5/0 .* of draft in .*other"):
        ways_of(runs_of(pair, (run, copy))[0], {"": PARTS})


def test_it_is_printed_with_what_other_policies_need(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Advise(pair="ball", budget_ms=1e6, runs=(run,), kappa=3.0).run()
    said = capsys.readouterr().out
    assert re.search(r"^kappa +3$", said, re.MULTILINE) and re.search(r"round trip +12\..* ms$", said, re.MULTILINE)
    assert re.search(r"^advice +the target fits on the device", said, re.MULTILINE)
    assert re.search(r"^others +for other policies of ball, with .* of their target's time: ", said, re.MULTILINE)
    assert re.search(r"^learned 0\.4 +[\d.]+ ", said, re.MULTILINE), said
    # How chunks are played at this delay.
    assert re.search(r"^ball-chase at pace 0\.1 +synchronous +1 ", said, re.MULTILINE), said
    Advise(pair="ball", budget_ms=0.0, json=True).run()
    assert json.loads(capsys.readouterr().out)["target_fits"] is False


# --- choices on made-up results ---

N = 60


def way(method: str, rate: float, cost: float, *lost: Iterable[int]) -> Way:
    """A way that loses these episodes, of N at each training seed."""
    won = {seed: {str(k): k not in set(episodes) for k in range(N)} for seed, episodes in enumerate(lost)}
    return Way("draft", method, rate, rate, cost, won)


DRAFT = way("draft", 0.0, 0.2, *3 * [range(20)])
HEAD = way("head_draft", 0.0, 0.5, *3 * [range(1)])
CHANCE = way("random_learned", 0.4, 0.22, *3 * [range(6)])
LEARNED = way("learned", 0.4, 0.5, *3 * [range(2)])
HYBRID = way("hybrid", 1.0, 0.2, *3 * [range(1)])
REMOTE = replace(way("target", 1.0, 0.0, *3 * [range(1)]), draft="")
TARGET = replace(way("target_on_device", 0.0, 1.0, *3 * [range(1)]), draft="")
WAYS = (TARGET, REMOTE, HYBRID, LEARNED, CHANCE, HEAD, DRAFT)


def chosen(ways: Sequence[Way], budget: float) -> str:
    choice = choose(ways, budget)
    assert choice is not None
    return choice.way.method


def test_the_simplest_that_is_not_shown_to_be_worse_is_chosen() -> None:
    assert choose((TARGET, DRAFT), 0.1) is None, "nothing fits"
    assert chosen(WAYS, 0.1) == "target", "nothing but asking fits"
    # The draft alone is shown to be worse. What is verified at random loses .083, more than the margin.
    assert chosen(WAYS, 0.3) == "target"
    assert chosen((LEARNED, HYBRID, CHANCE, DRAFT), 0.5) == "learned"
    assert chosen(WAYS, 0.5) == "head_draft", "no gate is needed"
    assert chosen(WAYS, 1.0) == "target_on_device", "what fits needs neither draft nor server"
    # One episode of 180 is no difference: then chance needs less than a score, and what is cheaper comes first.
    almost = replace(CHANCE, successes=way("learned", 0.4, 0.5, range(2), range(2), range(3)).successes)
    assert chosen((LEARNED, almost), 1.0) == "random_learned"
    # A draft that was lucky at one seed and failed at the others: all episodes taken for alike would not show it.
    lucky = way("draft", 0.0, 0.2, range(3), range(30), range(30))
    assert chosen((lucky, HYBRID), 1.0) == "hybrid"
    # Paired, four episodes of sixty are a difference; as if they were others' episodes, they are none.
    paired = way("draft", 0.0, 0.2, range(5), range(5), range(5))
    assert behind(paired, HYBRID) is not None
    assert chosen((paired, HYBRID), 1.0) == "hybrid"


def test_a_choice_says_whether_a_gate_is_needed() -> None:
    assert "no gate is needed" in str(choose((DRAFT,), 1.0))
    assert "no gate is needed" not in str(choose((LEARNED, CHANCE), 1.0))


def test_from_which_budget_on_nobody_needs_a_server() -> None:
    assert without_server(WAYS) == 0.5
    assert without_server((TARGET, REMOTE, DRAFT)) == 1.0
    assert without_server((REMOTE, DRAFT, HYBRID)) is None
    # A larger budget that buys more with a server ends what a smaller one could do without.
    dear = way("learned", 0.4, 0.8, *3 * [[]])
    assert without_server((replace(HEAD, successes=way("", 0, 0, *3 * [range(5)]).successes), dear, TARGET)) == 1.0


def test_as_many_successes_as_episodes_are_no_certainty_and_others_episodes_are_not_compared() -> None:
    every = way("draft", 0.0, 0.2, [], [])
    assert every.success.high == 1.0 and 0.95 < every.success.low < 1.0
    assert behind(DRAFT, replace(HYBRID, successes={0: {"another": True}})) is None
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
    without, choice = choose((DRAFT, CHANCE), 0.5), choose((DRAFT, CHANCE, lucky), 0.5)
    assert choice == without and choice is not None and choice.best is CHANCE


def test_descriptions_name_how_chunks_are_decoded() -> None:
    for name, rate, told in (
        ("full_1", 1.0, "the target on a server at every inference (full_1), without a draft"),
        ("block", 0.0, "the draft (block) alone"), ("specvla", 1.0, "the draft (specvla), every inference verified"),
        ("heisd_fixed", 0.3, "the draft (heisd_fixed), 30% verified by the gate fixed_skip"),
        ("unchecked", 0.5, "the draft (unchecked), 50% verified at random"),
    ):  # fmt: skip
        assert str(way(name, rate, 1.0, [0])) == told
    here = replace(way("full_1", 0.0, 1.0, [0]), decoded_on_device=True)
    assert str(here) == "the target on the device (full_1)" and here.on_device
    assert {name for name in EVERY if runs_alone(name)} == {"ar", "full", "full_5", "full_2", "full_1"}


def test_the_parts_of_real_pairs_are_timed(tiny_bundle: Path) -> None:
    parts = measure_parts({"": load_pair("ball")}, rounds=5)[""]
    assert all(ms > 0.0 for ms in parts.values())
    costs = {
        name: device_cost(name, parts, 0.0)
        for name, method in EVERY.items()
        if not (name.startswith("oracle") or method.decoding)
    }
    assert costs["target"] == 0.0 < costs["draft"] < costs["random"]
    assert device_cost("target", parts, 1.0) == parts["ask"]
    without = measure_parts({"": load_pair(tiny_bundle)}, rounds=5)[""]
    assert parts.keys() - without.keys() == {"head_draft", "gate learned", "gate learned_action"}
