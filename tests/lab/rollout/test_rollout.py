"""Evaluations of the tiny bundle: reproducible to the bit, paired, and with every number accounted for."""

import json
import math
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.tiny import KilledError, quiet

from specact import load_pair
from specact.errors import ConfigError
from specact.gates.calibration import read_calibration
from specact.gates.settings import GateSettings
from specact.lab.envs.ball import TASK as BALL
from specact.lab.envs.ball import BallEnv
from specact.lab.evaluation.metrics import SUCCESS_AT, add_gate_efficiency, method_metrics
from specact.lab.evaluation.run import Evaluation, evaluate, read_gates, read_table
from specact.lab.rollout.methods import load_method
from specact.lab.rollout.pool import Pool
from specact.lab.rollout.rollout import Shard, run_shard
from specact.lab.rollout.statistics import choice_efficiency
from specact.lab.rollout.steps import OBSERVATION, REASONS, Audit, Table
from specact.links.link import LINKS
from specact.types import Origin, StepRecord

METHODS = (
    "draft", "target", "target_on_device", "hybrid", "random", "plain_random", "adahi", "gated_target", "oracle",
)  # fmt: skip
DRAFT_MS, GATE_MS, TARGET_MS = 2.0, 0.5, 11.0


def evaluation(bundle: Path, **changes: Any) -> Evaluation:
    settings: dict[str, Any] = {
        "bundle": str(bundle), "env": None, "methods": METHODS, "episodes": 5, "draft_ms": DRAFT_MS,
        "gate_ms": GATE_MS, "target_ms": TARGET_MS, "shard": 2, "calibration_episodes": 3,
    }  # fmt: skip
    return Evaluation(**settings | changes)


@dataclass(frozen=True)
class Made:
    folder: Path
    summary: dict[str, Any]

    def steps(self, method: str) -> Table:
        return read_table(self.folder / "steps" / method)

    def episodes(self, method: str) -> Table:
        return read_table(self.folder / "episodes" / method)


@pytest.fixture(scope="module")
def made(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("evaluation") / "run"
    return Made(folder, evaluate(evaluation(tiny_bundle), folder, quiet, Pool(1)))


def contents(folder: Path) -> dict[str, Any]:
    """The bytes of the tables, and the summary but for how long it took."""
    summary = json.loads((folder / "summary.json").read_text()) | {"seconds": 0}
    tables = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.parquet")}
    return tables | {"summary": summary}


SMALL: dict[str, Any] = {"methods": ("random", "hybrid", "adahi"), "episodes": 3, "calibration_episodes": 2}


@pytest.fixture(scope="module")
def whole(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller evaluation that was never stopped, on one process."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    evaluate(evaluation(tiny_bundle, **SMALL), folder, quiet, Pool(1))
    return folder


def test_two_processes_give_the_bits_of_one(whole: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    with Pool(2) as pool:
        evaluate(evaluation(tiny_bundle, **SMALL), tmp_path / "run", quiet, pool)
    assert contents(tmp_path / "run") == contents(whole)


@pytest.mark.parametrize(("where", "done"), [("hybrid", 2), ("calibrating adahi", 6)])
def test_a_killed_evaluation_ends_like_one_never_stopped(
    whole: Path, tiny_bundle: Path, tmp_path: Path, where: str, done: int
) -> None:
    def progress(what: str, count: int, total: int) -> None:
        if what == where and count >= done:
            raise KilledError

    with pytest.raises(KilledError):
        evaluate(evaluation(tiny_bundle, **SMALL), tmp_path / "run", progress, Pool(1))
    assert not (tmp_path / "run" / "summary.json").exists()
    # The shard under way when it was killed had written its steps, but not its outcomes.
    (tmp_path / "run" / "steps" / "hybrid" / "000002.partial").write_bytes(b"torn")
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.parquet")}
    assert kept
    evaluate(evaluation(tiny_bundle, **SMALL), tmp_path / "run", quiet, Pool(1))
    assert contents(tmp_path / "run") == contents(whole)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept, "finished shards were run again"


def test_a_folder_of_another_run_or_a_damaged_one_is_refused(whole: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    for changes in ({"seed": 1}, {"rate": 0.5}, {"link": "loopback"}):
        with pytest.raises(ConfigError, match="another run"):
            evaluate(evaluation(tiny_bundle, **SMALL | changes), folder, quiet, Pool(1))
    assert contents(folder) == contents(whole)
    (folder / "manifest.json").write_text('{"evaluation": {')
    with pytest.raises(ConfigError, match="damaged"):
        evaluate(evaluation(tiny_bundle, **SMALL), folder, quiet, Pool(1))


@pytest.mark.parametrize("methods", [("adahii",), (), ("draft", "draft")])
def test_methods_that_make_no_sense_are_refused(tiny_bundle: Path, methods: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="method"):
        evaluation(tiny_bundle, methods=methods)


def test_every_method_meets_the_same_starts(tiny_bundle: Path) -> None:
    """In other shards and another order: an episode's start is its own."""
    first: dict[tuple[str, int], Any] = {}
    for method, episodes in (("draft", (0, 1, 2)), ("hybrid", (2, 0)), ("target", (1,))):
        gate = "never" if method == "draft" else "always"
        _, table = run_shard(shard_of(tiny_bundle, method, gate, episodes, learning=True))
        seen = np.hstack([table[f"{OBSERVATION}{name}"].reshape(len(table["step"]), -1) for name in ("state", "goal")])
        starts = table["step"] == 0
        first |= {(method, episode): row for episode, row in zip(table["episode"][starts], seen[starts], strict=True)}
    for method, episode in (("hybrid", 2), ("hybrid", 0), ("target", 1)):
        assert np.array_equal(first[method, episode], first["draft", episode])
    assert not np.array_equal(first["draft", 0], first["draft", 1])


def shard_of(bundle: Path, method: str, gate: str, episodes: tuple[int, ...], **changes: Any) -> Shard:
    settings: dict[str, Any] = {"link": "wifi-paper", "draft_s": 0.002, "target_s": 0.011}
    made = Shard.of(load_pair(bundle), "ball", load_method(method), GateSettings(gate), episodes, 7)
    return replace(made, **settings | changes)


@pytest.mark.parametrize(("method", "gate"), [("hybrid", "always"), ("draft", "never")])
def test_logged_quantities_are_those_of_the_distributions(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, method: str, gate: str
) -> None:
    records: list[StepRecord] = []
    add = Audit.add

    def spy(self: Audit, made: Any, drafts: Any, targets: Any) -> None:
        records.extend(made)
        add(self, made, drafts, targets)

    monkeypatch.setattr(Audit, "add", spy)
    _, table = run_shard(shard_of(tiny_bundle, method, gate, (0, 1)))
    parts = load_pair(tiny_bundle).parts
    assert len(records) == len(table["step"]) > 20
    for i, record in enumerate(records):
        row = {name: column[i] for name, column in table.items()}
        assert (row["episode"], row["step"]) == (record.address.episode, record.address.step)
        # Asked again, one window at a time.
        q, p = (policy.infer(record.proposal.window).probs for policy in (parts.draft, parts.target))
        for k, code in enumerate(record.proposal.evidence.codes):
            assert row[f"rejection_{k}"] == pytest.approx(max(0.0, 1.0 - p[k, code] / q[k, code]), abs=1e-4)
            assert row[f"drafted_{k}"] == code
            assert row[f"tv_{k}"] == pytest.approx(np.maximum(p[k] - q[k], 0).sum(), abs=1e-4)
        assert row["rejection"] == pytest.approx(1.0 - (1.0 - row["rejection_0"]) * (1.0 - row["rejection_1"]))
        assert row["draft_entropy"] == pytest.approx(-(q * np.log(q)).sum(), abs=1e-3)
        assert row["target_entropy"] == pytest.approx(-(p * np.log(p)).sum(), abs=1e-3)
        if record.outcome is not None:
            verdict = record.outcome.evidence
            for k in range(2):
                assert row[f"rejection_{k}"] == pytest.approx(verdict.rejection[k], abs=1e-12)
                assert (row[f"accepted_{k}"], row[f"executed_{k}"]) == (verdict.accepted[k], verdict.codes[k])
        origin = Origin.ACCEPTED if row["accepted_0"] and row["accepted_1"] else Origin.REPLACED
        assert row["origin"] == (Origin.DRAFTED if method == "draft" else origin)
    assert table["rejection"].mean() > 0.05, "these two policies agree so well that nothing is tested"


def test_gated_loss_is_what_is_skipped_times_what_of_it_was_wrong(made: Made) -> None:
    for name, m in made.summary["methods"].items():
        if m["true_skip_ratio"] is None:
            assert m["sent"] == (0.0 if name == "target_on_device" else 1.0)
            assert m["gated_loss"] == 0.0
            continue
        wanted = (1 - m["sent"]) * (1 - m["true_skip_ratio"])
        assert m["gated_loss"] == pytest.approx(wanted), name
        steps = made.steps(name)
        assert m["gated_loss"] == pytest.approx(np.where(steps["transmitted"], 0.0, steps["rejection"]).mean())
        assert m["sent"] == np.mean(steps["transmitted"])


def test_latencies_add_up(made: Made) -> None:
    """What decides takes time too: a gate of either kind, and no gate that always or never asks."""
    link = LINKS["wifi-paper"]
    for name in METHODS:
        steps, episodes = made.steps(name), made.episodes(name)
        sent = steps["transmitted"]
        decides = name in ("random", "plain_random", "adahi", "gated_target")
        assert np.allclose(steps["draft_s"], 0.0 if name.startswith("target") else DRAFT_MS / 1e3)
        assert np.allclose(steps["gate_s"], GATE_MS / 1e3 if decides else 0.0)
        assert np.allclose(steps["target_s"], np.where(sent, TARGET_MS / 1e3, 0.0))
        assert (steps["network_s"][~sent] == 0.0).all()
        far = steps["network_s"][sent]
        assert (far == 0.0).all() if name == "target_on_device" else (far > link.rtt_ms / 2e3).all()
        total = steps["draft_s"] + steps["gate_s"] + steps["network_s"] + steps["target_s"]
        for row, episode in enumerate(episodes["episode"]):
            mine = total[steps["episode"] == episode]
            assert episodes["latency_s"][row] == pytest.approx(mine.sum())
            assert episodes["steps"][row] == len(mine), "execute is 1: one inference per action"
        latency = made.summary["methods"][name]["latency"]
        assert latency["per_action_ms"] == pytest.approx(1e3 * total.sum() / episodes["steps"].sum())
        parts = sum(latency[f"{part}_ms"] for part in ("draft", "gate", "network", "target"))
        assert parts == pytest.approx(latency["per_action_ms"])
        assert latency["inference_p50_ms"] == pytest.approx(1e3 * np.median(total))


def test_the_target_on_the_device_is_the_target_without_a_link_and_slower_there(
    made: Made, tiny_bundle: Path, tmp_path: Path
) -> None:
    here, remote = made.summary["methods"]["target_on_device"], made.summary["methods"]["target"]
    for name in ("success", "score", "control_steps"):
        assert here[name] == remote[name]
    assert (here["sent"], remote["sent"]) == (0.0, 1.0)
    assert here["latency"]["per_action_ms"] == pytest.approx(TARGET_MS)
    methods = ("adahi", "target_on_device", "target")
    what = evaluation(tiny_bundle, methods=methods, episodes=1, kappa=3.0)
    metrics = evaluate(what, tmp_path, quiet, Pool(1))["methods"]
    assert metrics["adahi"]["latency"]["draft_ms"] == pytest.approx(3 * DRAFT_MS)
    assert metrics["adahi"]["latency"]["gate_ms"] == pytest.approx(3 * GATE_MS)
    assert metrics["target_on_device"]["latency"]["target_ms"] == pytest.approx(3 * TARGET_MS)
    assert metrics["target"]["latency"]["target_ms"] == pytest.approx(TARGET_MS)


def test_a_method_costs_the_networks_that_it_evaluates(made: Made, tiny_bundle: Path) -> None:
    sizes = load_pair(tiny_bundle).parts.manifest.parameters
    nothing: dict[str, float] = {f"{part}_parameters": 0 for part in ("draft", "head", "target")}
    nothing |= {f"{part}_ms": 0.0 for part in ("draft", "gate", "head", "target")}
    draft = {"draft_parameters": sizes["draft"], "draft_ms": DRAFT_MS}
    target = {"target_parameters": sizes["target"], "target_ms": TARGET_MS}
    expected = {
        "draft": draft, "target": target, "target_on_device": target, "hybrid": draft | target,
        "adahi": draft | target | {"gate_ms": GATE_MS},
    }  # fmt: skip
    for name, parts in expected.items():
        assert made.summary["methods"][name]["cost"] == nothing | parts


@pytest.mark.parametrize("max_skips", [None, 2])
def test_random_has_the_privileges_of_adahi_and_its_rate(
    made: Made, tiny_bundle: Path, tmp_path: Path, max_skips: int | None
) -> None:
    """The first step and, with a limit, the one after the longest run of skips are forced; the rate is the same."""
    summary, folder = made.summary, made.folder
    if max_skips is not None:
        options = (f"adahi.max_skips={max_skips}",)
        what = evaluation(tiny_bundle, methods=("random", "adahi"), gate_options=options, link="loopback")
        summary, folder = evaluate(what, tmp_path, quiet, Pool(1)), tmp_path
    steps, gate = read_table(folder / "steps" / "random"), read_gates(folder)["random"]
    assert gate.max_skips == max_skips
    first, forced = (steps["reason"] == REASONS.index(reason) for reason in ("first", "max_skips"))
    assert np.array_equal(first, steps["step"] == 0)
    assert forced.any() == (max_skips is not None)
    assert np.array_equal(steps["transmitted"], first | forced | (steps["score"] > 1.0 - gate.threshold))
    achieved = summary["methods"]["adahi"]["sent"]
    assert gate.threshold < achieved
    n = len(steps["transmitted"])
    assert abs(steps["transmitted"].mean() - achieved) < 5 * math.sqrt(achieved * (1 - achieved) / n)


def test_random_alone_runs_at_the_rate_asked_for(made: Made, tiny_bundle: Path, tmp_path: Path) -> None:
    evaluate(evaluation(tiny_bundle, methods=("plain_random",), episodes=1, rate=0.25), tmp_path, quiet, Pool(1))
    steps = read_table(tmp_path / "steps" / "plain_random")
    assert np.array_equal(steps["transmitted"], steps["score"] > 0.75)
    # Beside ADAHI, at the rate that it achieved.
    steps, achieved = made.steps("plain_random"), made.summary["methods"]["adahi"]["sent"]
    assert np.array_equal(steps["transmitted"], steps["score"] > 1.0 - achieved)


def test_gates_ask_first_and_then_where_the_score_says(made: Made) -> None:
    for name in ("adahi", "gated_target", "oracle"):
        steps = made.steps(name)
        gate = "oracle" if name == "oracle" else "adahi"
        threshold = made.summary["calibration"][gate]["threshold"]
        first = steps["reason"] == REASONS.index("first")
        assert np.array_equal(first, steps["step"] == 0)
        scored = steps["reason"] == REASONS.index("score")
        assert np.array_equal(steps["transmitted"][scored], steps["score"][scored] > threshold)
    oracle = made.steps("oracle")
    np.testing.assert_allclose(oracle["score"], oracle["rejection"], atol=1e-12)


def test_the_oracle_is_what_a_choice_is_measured_by(made: Made) -> None:
    methods = made.summary["methods"]
    assert methods["oracle"]["gate_efficiency"] == pytest.approx(1.0, abs=0.5)
    assert methods["oracle"]["gated_loss"] < methods["random"]["gated_loss"]
    assert methods["random"]["gate_efficiency"] == pytest.approx(0.0, abs=1e-12)
    assert methods["oracle"]["choice_efficiency"] > 0.9  # an episode's first step is no choice
    assert abs(methods["random"]["choice_efficiency"]) < 0.3
    for name in ("hybrid", "target"):  # nothing is skipped
        metrics, rejection = methods[name], made.steps(name)["rejection"].mean()
        assert metrics["acceptance"]["all"] == pytest.approx(1.0 - rejection) and rejection > 0.05
        assert metrics["action_change_loss"] is metrics["gate_efficiency"] is metrics["choice_efficiency"] is None
    assert methods["draft"]["action_change_loss"] > 0


@pytest.mark.parametrize(
    ("rejection", "sent", "expected"),
    [
        ((0.0, 0.2, 0.8, 1.0), (0, 0, 1, 1), 1.0), ((0.0, 0.2, 0.8, 1.0), (1, 1, 0, 0), -1.0),
        ((0.0, 0.2, 0.8, 1.0), (1, 0, 0, 1), 0.0), ((0.0, 0.2, 0.8, 1.0), (0, 1, 0, 1), 0.25),
        ((0.3, 0.3, 0.3, 0.3), (0, 0, 1, 1), None), ((0.0, 0.2, 0.8, 1.0), (1, 1, 1, 1), None),
        ((0.0, 0.2, 0.8, 1.0), (0, 0, 0, 0), None),
    ],
)  # fmt: skip
def test_the_choice_among_the_steps_that_were_met(
    rejection: tuple[float, ...], sent: tuple[int, ...], expected: float | None
) -> None:
    efficiency = choice_efficiency(np.array(rejection), np.array(sent, bool))
    assert efficiency == (None if expected is None else pytest.approx(expected))


def test_a_stricter_threshold_of_success_is_counted_from_the_score(made: Made) -> None:
    outcomes = {
        "success": np.array([True, True, True, False]), "score": np.array([0.96, 0.95, 0.9, 0.5]),
        "steps": np.ones(4, int), "latency_s": np.ones(4),
    }  # fmt: skip
    metrics = method_metrics(outcomes, made.steps("adahi"), success_at=SUCCESS_AT["pusht"])
    assert (metrics["success"]["k"], metrics["success"]["n"]) == (3, 4)
    stricter = metrics["success_at"]["0.95"]  # above it, as gym-pusht has it
    assert (stricter["k"], stricter["n"], stricter["rate"]) == (1, 4, 0.25)
    assert 0.0 < stricter["low"] < 0.25 < stricter["high"] < 1.0
    assert "success_at" not in made.summary["methods"]["adahi"]


def test_a_rate_that_a_gate_cannot_hold_is_refused_before_anything_runs(tiny_bundle: Path, tmp_path: Path) -> None:
    what = Evaluation(str(tiny_bundle), None, ("draft", "adahi"), 2, rate=0.2, gate_options=("max_skips=2",))
    with pytest.raises(ConfigError, match=r"cannot hold a rate of 0\.2"):
        evaluate(what, tmp_path / "run", quiet, Pool(1))
    assert not (tmp_path / "run").exists()


class Counted(BallEnv):
    """Counts the episodes that begin in states of a benchmark, and in drawn ones."""

    begun: ClassVar[Counter[str]] = Counter()

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__(**options)
        self.kind = kind

    def reset(self, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        self.begun[self.kind] += 1
        return super().reset(**options)


JUDGED = replace(BALL, make=partial(Counted, "judged"), states=500)
DRAWN = replace(BALL, make=partial(Counted, "drawn"), benchmark=JUDGED)


def test_gates_are_calibrated_in_other_states_than_those_of_the_benchmark(tiny_bundle: Path, tmp_path: Path) -> None:
    what = evaluation(tiny_bundle, env=f"{__name__}:DRAWN@benchmark", methods=("adahi",), episodes=4)
    Counted.begun.clear()
    evaluate(what, tmp_path / "run", quiet, Pool(1))
    assert Counted.begun["judged"] == 4 and Counted.begun["drawn"] >= 2 * what.calibration_episodes
    with pytest.raises(ConfigError, match="no initial states of a benchmark"):
        evaluate(replace(what, env="ball@benchmark"), tmp_path / "other", quiet, Pool(1))


@pytest.mark.parametrize(("oracles_rejection", "expected"), [((0.0, 1.0), 0.8), ((0.495, 0.505), None)])
def test_where_the_oracle_gains_next_to_nothing_there_is_no_efficiency(
    oracles_rejection: tuple[float, float], expected: float | None
) -> None:
    """At a rate of .5 random loses .25 and the oracle, which skips the first step, 0 or .2475."""
    methods = {name: {"sent": 0.5, "gated_loss": loss} for name, loss in (("random", 0.25), ("learned", 0.05))}
    oracle = {"rejection": np.array(oracles_rejection), "reason": np.full(2, REASONS.index("score"))}
    add_gate_efficiency(map(load_method, methods), methods, oracle)
    assert methods["learned"]["gate_efficiency"] == (None if expected is None else pytest.approx(expected))


def test_a_run_that_goes_on_where_another_ended_has_the_episodes_of_a_longer_one(
    made: Made, tiny_bundle: Path, tmp_path: Path
) -> None:
    # In the same shards: another batch may differ in last bits.
    what = evaluation(tiny_bundle, methods=("draft", "hybrid"), first=2, episodes=3)
    evaluate(what, tmp_path, quiet, Pool(1))
    for name in ("draft", "hybrid"):
        longer, rest = made.episodes(name), read_table(tmp_path / "episodes" / name)
        assert rest["episode"].tolist() == [2, 3, 4]
        np.testing.assert_array_equal(rest["score"], longer["score"][2:])


def test_a_calibration_made_later_does_not_change_a_run_under_way(
    made: Made, bundle_copy: Path, tmp_path: Path
) -> None:
    """Else half of a method's shards run with one threshold and half with another."""
    what, folder = evaluation(bundle_copy, methods=("adahi",)), tmp_path / "run"
    summary = evaluate(what, folder, quiet, Pool(1))
    bundle = load_pair(bundle_copy)
    stored = read_calibration(folder / "calibration" / "adahi-0.60.json", bundle)
    changed = replace(stored, settings=replace(stored.settings, threshold=1e9))
    changed.save(bundle_copy / "calibration")
    repeat = evaluate(what, folder, quiet, Pool(1))
    assert repeat["calibration"] == summary["calibration"]


def test_a_bundle_that_was_exported_again_is_not_the_one_remembered(bundle_copy: Path) -> None:
    run_shard(shard_of(bundle_copy, "draft", "never", (0,)))
    manifest = json.loads((bundle_copy / "manifest.json").read_text())
    shutil.copy(bundle_copy / "target.onnx", bundle_copy / "draft.onnx")
    manifest["fingerprints"]["draft"] = manifest["fingerprints"]["target"]
    if "files" in manifest:
        manifest["files"]["draft.onnx"] = manifest["files"]["target.onnx"]
    (bundle_copy / "manifest.json").write_text(json.dumps(manifest))
    _, table = run_shard(shard_of(bundle_copy, "draft", "never", (0,)))
    assert (table["rejection"] < 1e-6).all(), "draft and target are the same network now"
