"""What a report says and writes, and what it does with runs that are damaged or lack something."""

from __future__ import annotations

import csv
import html
import itertools
import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.lab.recorded import record

from specact.errors import ConfigError
from specact.files import write_json
from specact.lab.evaluation.runs import find_runs, group
from specact.lab.report.report import write_report

SpecactRun = Callable[..., subprocess.CompletedProcess[str]]


def report(folder: Path, *paths: Path) -> dict[str, Any]:
    return write_report(paths, folder / "report.html", folder / "files", lambda *_: None, films=False)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(entry, (*path, str(key)))
    else:
        yield ".".join(path), value


def edit(path: Path, **values: Any) -> None:
    write_json(path, json.loads(path.read_text()) | values)


def evaluation(folder: Path, **values: Any) -> None:
    """Changes settings in a run's manifest."""
    path = folder / "manifest.json"
    edit(path, evaluation=json.loads(path.read_text())["evaluation"] | values)


@pytest.fixture
def table(runs: Path, tmp_path: Path) -> Path:
    """A copy of the run folder with the table."""
    return Path(shutil.copytree(runs / "table", tmp_path / "runs/table"))


def test_tables_beside_the_page_hold_the_numbers_of_the_summary(written: dict[str, Any], runs: Path) -> None:
    summary = json.loads((runs / "table/summary.json").read_text())
    stored = {row.pop("method"): row for row in rows(Path(written["page"]).parent / "files/ball-methods.csv")}
    assert list(stored) == ["draft", "target", "hybrid", "random", "adahi", "oracle"]
    for method, metrics in summary["methods"].items():
        expected = {name: "" if value is None else str(value) for name, value in leaves(metrics)}
        assert expected == {name: value for name, value in stored[method].items() if name in expected}
    contrasts = rows(Path(written["page"]).parent / "files/ball-contrasts.csv")
    assert [row["success.p"] for row in contrasts] == [str(row["success"]["p"]) for row in summary["contrasts"]]


def test_runs_of_earlier_versions_are_read_with_their_share_that_was_sent(table: Path) -> None:
    (run,), _ = find_runs([table])
    old = (table / "summary.json").read_text().replace('"sent"', '"transmission_rate"')
    (table / "summary.json").write_text(old)
    assert find_runs([table])[0][0].methods == run.methods and "transmission_rate" in old


def test_every_figure_is_written_in_three_forms_and_the_same_again(
    written: dict[str, Any], runs: Path, tmp_path: Path
) -> None:
    stems = {path.stem for path in map(Path, written["files"]) if path.suffix == ".svg"}
    assert stems == {f"ball-{name}" for name in ("rejection", "latency", "latency-split", "success-over-rate")}
    assert {path.stem for path in map(Path, written["files"]) if path.suffix == ".png"} == stems
    assert all(rows(Path(written["page"]).parent / "files" / f"{stem}.csv") for stem in stems)
    repeat = report(tmp_path, runs)
    for path, copy in zip(map(Path, written["files"]), map(Path, repeat["files"]), strict=True):
        assert path.read_bytes() == copy.read_bytes(), path.name


def test_figures_hold_the_numbers_of_the_runs(written: dict[str, Any], runs: Path) -> None:
    files = Path(written["page"]).parent / "files"
    realtime = json.loads((runs / "realtime/summary.json").read_text())["methods"]
    for row in rows(files / "ball-latency.csv"):
        assert float(row["per_action_ms"]) == realtime[row["method"]]["latency"]["per_action_ms"]
    low = json.loads((runs / "rate-0.3/summary.json").read_text())["methods"]["adahi"]
    over = [row for row in rows(files / "ball-success-over-rate.csv") if row["method"] == "adahi"]
    assert [float(row["wanted_rate"]) for row in over] == [0.3, 0.6]
    assert float(over[0]["sent"]) == low["sent"]
    assert float(over[0]["value"]) == low["success"]["rate"]
    bins = [row for row in rows(files / "ball-rejection.csv") if row["row"] == "bin"]
    every, primary = ([row for row in bins if row["code"] == code] for code in ("any code, R", "primary code, r"))
    # The primary code's rejection has fits of its own, over the same bins, and is never above that of any code.
    assert len(every) == 20
    for whole, part in zip(every, primary, strict=True):
        assert float(part["rejection"]) <= float(whole["rejection"]) + 1e-9 and whole["deviation"] == part["deviation"]
    fits = {(row["row"], row["code"]): row for row in rows(files / "ball-rejection.csv") if row["row"] != "bin"}
    x, y = ([float(row[name]) for row in primary] for name in ("deviation", "rejection"))
    assert float(fits["linear", "primary code, r"]["slope"]) == pytest.approx(np.polyfit(x, y, 1)[0])


def test_times_are_measured_ones_where_there_are_any(written: dict[str, Any], runs: Path, tmp_path: Path) -> None:
    assert "Measured over real sockets" in Path(written["page"]).read_text(encoding="utf-8")
    accounted = report(tmp_path, runs / "table")
    assert "Accounted in virtual time, not measured" in Path(accounted["page"]).read_text(encoding="utf-8")
    assert all(any(option in str(gap) for gap in accounted["missing"]["ball"]) for option in ("--realtime", "--rate"))
    assert not any("--realtime" in str(gap) for gap in written["missing"]["ball"])


def test_damaged_and_unfinished_runs_are_named_with_the_reason(runs: Path, tmp_path: Path) -> None:
    for name in ("whole", "cut", "unfinished", "old"):
        shutil.copytree(runs / "table", tmp_path / name)
    (tmp_path / "cut/summary.json").write_text((runs / "table/summary.json").read_text()[:1000])
    (tmp_path / "unfinished/summary.json").unlink()
    summary = json.loads((runs / "table/summary.json").read_text())
    del summary["methods"]["adahi"]["latency"]
    write_json(tmp_path / "old/summary.json", summary)
    write_json(tmp_path / "bundle/manifest.json", {"format": 1, "name": "a bundle is no run"})
    written = report(tmp_path, tmp_path, tmp_path / "nowhere")
    assert written["runs"] == 1
    reasons = {Path(entry["folder"]).name: entry["reason"] for entry in written["skipped"]}
    assert set(reasons) == {"cut", "unfinished", "old", "nowhere"}
    assert "not valid JSON" in reasons["cut"] and "latency" in reasons["old"]
    assert "not finished" in reasons["unfinished"] and "specact eval table" in reasons["unfinished"]
    page = html.unescape(Path(written["page"]).read_text(encoding="utf-8"))
    assert all(reason in page for reason in reasons.values())


def test_a_damaged_table_costs_its_figures_only(table: Path, tmp_path: Path) -> None:
    next((table / "steps/adahi").glob("*.parquet")).write_bytes(b"half a file")
    written = report(tmp_path, table)
    assert any("steps/adahi" in str(gap) for gap in written["missing"]["ball"])
    names = {path.name for path in map(Path, written["files"])}
    assert {"ball-methods.csv", "ball-latency.svg"} <= names and "ball-rejection.svg" not in names


def test_a_run_of_another_family_is_reported(table: Path, tmp_path: Path) -> None:
    methods = json.loads((table / "summary.json").read_text())["methods"]
    names = ("success", "score", "inferences", "sent", "latency", "action_change_loss")
    others = {name: {part: methods["draft"][part] for part in names} | {"distance": 0.5, "full": 0.25}
              for name in ("full", "flash")}  # fmt: skip
    edit(table / "summary.json", methods=others, contrasts=[], link="none")
    for kind in ("steps", "episodes"):
        for name in others:
            shutil.copytree(table / kind / "draft", table / kind / name)
    written = report(tmp_path, table)
    page = Path(written["page"]).read_text(encoding="utf-8")
    assert "Measured in one process" in page and "share of rounds that denoised" in page and "true skip" not in page
    assert not any("--rate" in str(gap) for gap in written["missing"]["ball"])
    assert "ball-latency-split.svg" in {path.name for path in map(Path, written["files"])}


def test_runs_are_grouped_by_what_they_are(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs, tmp_path / "runs")
    for name, weights in (("other", {"fingerprint": "0123456789abcdef"}), ("more", {})):
        evaluation(Path(shutil.copytree(runs / "table", tmp_path / "runs" / name)), seed=9, **weights)
    all_runs, skipped = find_runs([tmp_path / "runs", tmp_path / "runs" / "table"])
    assert len(all_runs) == 5 and skipped == []
    alone, rest = sorted(group(all_runs), key=lambda study: len(study.runs))
    assert alone.title == "ball (0123456789abcdef)" and alone.slug != rest.slug
    assert rest.realtime is not None and rest.realtime.folder.name == "realtime"
    assert [run.folder.name for run in rest.sweep] == ["rate-0.3", "table"], "another seed is another sweep"


def test_a_long_run_of_one_method_joins_the_sweep(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs, tmp_path / "runs")
    folder = Path(shutil.copytree(runs / "table", tmp_path / "runs" / "long"))
    evaluation(folder, episodes=100, methods=["adahi"], mse=True, shard=7, demonstrations=3)
    adahi = json.loads((folder / "summary.json").read_text())["methods"]["adahi"] | {"inferences": 10_000}
    edit(folder / "summary.json", episodes=100, methods={"adahi": adahi}, contrasts=[])
    written = report(tmp_path, tmp_path / "runs")
    over = [row for row in rows(tmp_path / "files/ball-success-over-rate.csv") if row["method"] == "adahi"]
    assert [row["episodes"] for row in over] == ["4", "100"]
    assert f"freely decided steps of {folder}" in Path(written["page"]).read_text(encoding="utf-8")


def test_the_command_says_what_it_wrote(specact_run: SpecactRun, runs: Path, tmp_path: Path) -> None:
    done = specact_run("report", runs / "table", "--out", tmp_path / "r.html", "--no-films", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["page"] == str(tmp_path / "r.html") and said["runs"] == 1 and said["skipped"] == []
    assert all(Path(path).is_file() and Path(path).parent == tmp_path / "r_files" for path in said["files"])


# --- recordings ---


def text_of(written: dict[str, Any]) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", Path(written["page"]).read_text()))


def test_the_page_tells_what_was_recorded(tmp_path: Path) -> None:
    truth = record(tmp_path / "run.mcap", blind=frozenset({3}))
    written = report(tmp_path, tmp_path / "run.mcap")
    ticks = list(itertools.chain(*truth.ticks))
    records = [tick.record for tick in ticks if tick.record is not None]
    sent = sum(step.decision.transmit for step in records)
    said = text_of(written)
    assert (written["runs"], written["recordings"]) == (0, 1) and "Report on 1 recording" in said
    assert "3 of 4, mean score 0.750" in said and f"{len(ticks):,}, 0 more were dropped" in said
    assert "shape 4" in said and f"{sent}, {sent / len(records):.3f} of all" in said
    lost = int(sum(tick.late_s for tick in ticks) * 20.0 + 1e-9)
    held = sum(tick.held for tick in ticks)
    assert held >= 4 and f"stood still {(held + lost) / (len(ticks) + lost):.3f} of all periods" in said
    steps = rows(tmp_path / "files/run-steps.csv")
    assert len(steps) == len(ticks)
    origins = {row["origin"]: int(row["actions"]) for row in rows(tmp_path / "files/run-origins.csv")}
    assert origins == Counter(row["origin"] for row in steps) and {"drafted", "replaced", "fallback"} == set(origins)
    stages = [row["stage"] for row in rows(tmp_path / "files/run-stages.csv")]
    assert stages == ["draft", "gate", "encode", "network", "queue", "target", "finish", "all"]
    scores = rows(tmp_path / "files/run-scores.csv")
    assert [float(row["score"]) for row in scores] == [step.decision.score for step in records]
    assert (tmp_path / "files/run-steps.svg").exists() and len(written["missing"]["Recording run.mcap"]) == 1


def test_what_a_recording_of_a_real_robot_lacks_is_said(tmp_path: Path) -> None:
    record(tmp_path / "run.mcap", 1, judged=False)
    # Without its end.
    (tmp_path / "torn.mcap").write_bytes((tmp_path / "run.mcap").read_bytes()[:-100])
    said = text_of(report(tmp_path, tmp_path / "torn.mcap"))
    assert "nobody judges what a real robot does" in said and "the file is cut off" in said


def test_recordings_stand_beside_runs_and_other_files_are_skipped(tmp_path: Path, runs: Path) -> None:
    record(tmp_path / "ball.mcap", 1)
    (tmp_path / "notes.txt").write_text("no recording")
    written = report(tmp_path, runs / "table", tmp_path / "ball.mcap", tmp_path / "notes.txt")
    assert (written["runs"], written["recordings"]) == (1, 1)
    assert "Report on 1 run of 1 bundle and 1 recording" in text_of(written)
    # The bundle is called ball, too; neither overwrites the files of the other.
    assert (tmp_path / "files/ball-methods.csv").exists() and (tmp_path / "files/ball--steps.csv").exists()
    (skipped,) = written["skipped"]
    assert skipped["folder"] == str(tmp_path / "notes.txt") and "no recording" in skipped["reason"]
    with pytest.raises(ConfigError, match=r"notes\.txt"):
        report(tmp_path, tmp_path / "notes.txt")
