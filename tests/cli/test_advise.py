"""``specact advise`` on real evaluations of the ball pair: what it finds, leaves out and says is missing."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

pytest.importorskip("mujoco")

from specact import load_pair
from specact.cli import advise
from specact.cli.advise import Advise, Device, composed_parts, runs_of, ways_of
from specact.errors import ConfigError
from specact.lab.evaluation.budget import measure_parts
from specact.lab.evaluation.evaluation import Evaluation
from specact.lab.evaluation.run import evaluate
from specact.lab.rollout.pool import Pool

METHODS = ("draft", "head_draft", "target", "hybrid", "random_learned", "learned")
# Stated, so that no answer depends on a clock: what this device would take.
PARTS = {
    "draft": 1.0, "head_draft": 2.0, "target": 8.0, "gate random": 0.1, "gate deviation": 0.1, "gate uncertainty": 0.5,
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
    device = Device(budget_ms=budget_ms, runs=() if run is None else (run,), **options)
    pair = load_pair("ball")
    runs, left_out = runs_of(pair, device.runs)
    assert not left_out
    return advise.answer(device, pair, runs, {"": PARTS}, 12.0)


def test_a_target_that_fits_runs_on_the_device(run: Path) -> None:
    for folder in (run, None):
        found = answer(folder, 8.0)
        assert found["target_fits"]
        assert found["advice"].startswith("the target fits on the device")
    slower = answer(run, 8.0, kappa=2.0)
    assert not slower["target_fits"]
    assert "times on the device: run this command there, without --kappa" in slower["missing"]


def test_the_head_as_the_draft_needs_no_gate_and_less_a_server(run: Path) -> None:
    """True rates of about .97, .97 and .66 for head, target and draft."""
    found = answer(run, 2.1)
    assert found["advice"].startswith("the learned gate's head on the draft as the draft, alone")
    assert "no gate is needed" in found["advice"]
    cheaper = answer(run, 1.5)
    assert "head" not in cheaper["advice"].split(";")[0] and "alone" not in cheaper["advice"]
    assert answer(run, 0.5)["advice"].startswith("the target on a server at every inference")
    assert found["no_server_from_ms"] <= 8.0


def test_what_was_given_is_not_told_as_measured(run: Path) -> None:
    said = json.dumps(answer(run, 2.1))
    assert "4321" in (run / "manifest.json").read_text()
    assert "4321" not in said
    target = next(way for way in answer(run, 2.1)["ways"] if way["method"] == "target")
    assert target["mean_ms"] == 12.0 + PARTS["target"]


def test_gates_stand_beside_chance_with_their_privileges(run: Path) -> None:
    ways = {way["method"]: way for way in answer(run, 2.1)["ways"]}
    assert ways.keys() == {*METHODS, "target_on_device"}
    assert ways["learned"]["device_ms"] == PARTS["draft"] + PARTS["gate learned"]
    assert ways["learned"]["over_chance"]["low"] <= ways["learned"]["over_chance"]["mean"]
    assert all(way["over_chance"] is None for name, way in ways.items() if name != "learned")
    assert ways["target_on_device"]["success"] == ways["target"]["success"]
    assert (ways["target"]["asked"], ways["target_on_device"]["asked"]) == (1.0, 0.0)


def test_what_is_missing_comes_with_a_command_that_measures_it(run: Path, tiny_bundle: Path) -> None:
    from specact.cli.main import VERBS

    nothing = answer(None, 0.5)
    assert nothing["advice"].startswith("which draft or gate is enough cannot be said")
    assert nothing["ways"] == []
    wanted = next(text for text in nothing["missing"] if text.startswith("success of"))
    assert "draft, head_draft, target, hybrid, random, adahi, uncertainty, random_learned, learned:" in wanted
    assert "success of random, adahi, uncertainty:" in " ".join(answer(run, 0.5)["missing"])
    late = Device(budget_ms=0.5, link="lte")
    told = advise.answer(late, load_pair("ball"), [], {"": PARTS}, 51.0)["missing"]
    assert any("longer than a control step" in text for text in told)
    headless = {part: ms for part, ms in PARTS.items() if "head" not in part and "learned" not in part}
    told += advise.answer(Device(budget_ms=0.5), load_pair(tiny_bundle), [], {"": headless}, 12.0)["missing"]
    assert any(text.startswith("a learned gate: specact calibrate") for text in told)
    commands = [
        shlex.split(found) for text in (*nothing["missing"], *told) for found in re.findall("specact [^;]+", text)
    ]
    assert {words[1] for words in commands} <= set(VERBS)


def test_runs_of_other_weights_or_with_a_deadline_are_left_out(run: Path, tmp_path: Path) -> None:
    pair = load_pair("ball")
    for name, key, value in (
        ("other", "fingerprint", "0" * 12), ("stale", "offset", "draft"), ("elsewhere", "env", "pusht"),
        ("decoded", "decoding", "specvla"),
    ):  # fmt: skip
        folder = Path(shutil.copytree(run, tmp_path / name))
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["evaluation"][key] = value
        (folder / "manifest.json").write_text(json.dumps(manifest))
    runs, left_out = runs_of(pair, [tmp_path])
    assert runs == [] and len(left_out) == 4
    assert left_out[tmp_path / "other"] == "it is of other weights (ball)"


def test_runs_of_a_flow_policy_are_read_and_its_target_takes_the_time_of_a_whole_round(tmp_path: Path) -> None:
    pair = load_pair("ball-chase-flow")
    what = Evaluation(pair.source.name_or_path, None, ("full", "flash", "block"), 2, shard=2)
    evaluate(what, tmp_path / "run", lambda *told: None, Pool(1))
    runs, left_out = runs_of(pair, (tmp_path / "run",))
    assert len(runs) == 1 and not left_out
    parts = measure_parts(pair, rounds=20)
    assert parts["target"] > 10.0 * parts["gate random"]  # ten steps of a network, and no network at all
    device = Device(budget_ms=100.0 * parts["target"], runs=(tmp_path / "run",))
    decoded = composed_parts(pair, runs)
    assert decoded.keys() == {"full", "flash", "block"}
    found = advise.answer(device, pair, runs, {"": parts, **decoded}, 12.0)
    costs = {(way["method"], way["on_device"]): way["device_ms"] for way in found["ways"]}
    # The block alone runs on the device, and so can full rounds; their success is the same there.
    assert costs.keys() == {("full", False), ("full", True), ("flash", False), ("block", False)}
    assert costs["block", False] > 3.0 * parts["draft"]
    assert costs["full", True] == decoded["full"]["target"] > 10.0 * costs["full", False]
    (missing,) = [line for line in found["missing"] if line.startswith("success of")]
    assert missing.startswith("success of full_2, full_1: specact eval")


def test_fewer_steps_of_a_flow_policy_on_the_device_are_advised(tmp_path: Path) -> None:
    pair = load_pair("ball-chase-flow")
    evaluate(
        Evaluation(pair.source.name_or_path, None, ("full", "full_1"), 4, shard=4),
        tmp_path / "run",
        lambda *_: None,
        Pool(1),
    )
    runs, _ = runs_of(pair, (tmp_path / "run",))
    decoded = {"full": {"target": 9.0, "ask": 0.1}, "full_1": {"target": 1.0, "ask": 0.1}}
    for budget_ms, wanted in ((0.5, "the target on a server"), (2.0, "the target on the device (full_1)")):
        device = Device(budget_ms=budget_ms, runs=(tmp_path / "run",))
        found = advise.answer(device, pair, runs, {"": {"target": 9.0, "ask": 0.1}, **decoded}, 12.0)
        assert found["advice"].startswith(wanted)
    assert found["no_server_from_ms"] == 1.0


def test_a_target_that_fits_and_fails_is_not_advised(run: Path) -> None:
    """The target of this run fits, and a tenth of the draft's successes are its own."""
    pair = load_pair("ball")
    runs, _ = runs_of(pair, (run,))
    ways = ways_of(runs, {"": PARTS})
    bad = {"0/" + str(k): k % 10 == 0 for k in range(40)}
    worse = [replace(way, successes={0: bad}) if way.method in ("target", "target_on_device") else way for way in ways]
    for given, wanted in (
        (ways, "the target fits on the device: run it there"),
        (worse, "the target fits on the device, but more succeeds with"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("specact.cli.advise.ways_of", lambda *_, given=given: given)
            told = advise.answer(Device(budget_ms=8.0, runs=(run,)), pair, runs, {"": PARTS}, 12.0)["advice"]
        assert told.startswith(wanted)


def test_two_endings_of_an_episode_are_refused(run: Path, tmp_path: Path) -> None:
    other, pair = Path(shutil.copytree(run, tmp_path / "other")), load_pair("ball")
    assert ways_of(runs_of(pair, (run, other))[0], {"": PARTS}), "the same endings twice are none"
    (path,) = (other / "episodes" / "draft").glob("*.parquet")
    table = pq.read_table(path)
    index = table.schema.get_field_index("success")
    pq.write_table(table.set_column(index, "success", pc.invert(table["success"])), path)
    runs, _ = runs_of(pair, (run, other))
    with pytest.raises(ConfigError, match=r"episode 5/0 .* of draft in .*other ended otherwise"):
        ways_of(runs, {"": PARTS})


def test_the_same_episodes_twice_count_once(run: Path) -> None:
    pair = load_pair("ball")
    runs, _ = runs_of(pair, (run,))
    again = [*runs, replace(runs[0])]
    twice = advise.answer(Device(budget_ms=2.1), pair, again, {"": PARTS}, 12.0)
    assert {way["episodes"] for way in twice["ways"]} == {40}


def test_it_is_printed_with_what_other_policies_need(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Advise("ball", Device(budget_ms=1e6, runs=(run,), kappa=3.0)).run()
    said = capsys.readouterr().out
    assert "on the device, not measured: 3 times as long, as given" in said
    assert "link wifi-paper, modelled: 12." in said
    assert "advice: the target fits on the device" in said
    assert re.search(r"^for other policies of ball, with .* of their target's time: ", said, re.MULTILINE)
    assert re.search(r"^ ?learned 0\.4 +0\.\d\d ", said, re.MULTILINE)
    Advise("ball", Device(budget_ms=0.0, json=True)).run()
    assert json.loads(capsys.readouterr().out)["target_fits"] is False
