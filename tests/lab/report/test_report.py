"""What a report says and writes, and what it does with runs that are damaged or lack something."""

from __future__ import annotations

import csv
import html
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Timer
from typing import Any

import numpy as np
import pytest

from specact.errors import ConfigError
from specact.files import write_json
from specact.lab.report.report import Report, write_report
from specact.lab.report.runs import Run, find_runs, group

SpecactRun = Callable[..., subprocess.CompletedProcess[str]]


def report(folder: Path, *paths: Path) -> Report:
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


def test_a_stopped_report_does_not_wait_for_films_that_have_not_begun(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        copy = tmp_path / f"runs/{number}"
        shutil.copytree(runs / "table", copy)
        manifest = json.loads((copy / "manifest.json").read_text())
        manifest["evaluation"]["fingerprint"] = str(number)
        write_json(copy / "manifest.json", manifest)
    begun, stopped = list[Run](), Event()

    def slow(run: Run) -> None:
        begun.append(run)
        stopped.wait(timeout=60.0)

    def interrupted(*_: object) -> None:
        Timer(0.5, stopped.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr("specact.lab.report.report.show_film", slow)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    with pytest.raises(KeyboardInterrupt):
        write_report([tmp_path / "runs"], tmp_path / "report.html", tmp_path / "files", interrupted)
    assert len(begun) <= 1


def test_tables_beside_the_page_hold_the_numbers_of_the_summary(written: Report, runs: Path) -> None:
    summary = json.loads((runs / "table/summary.json").read_text())
    found = {row.pop("method"): row for row in rows(written.page.parent / "files/ball-methods.csv")}
    assert list(found) == ["draft", "target", "hybrid", "random", "adahi", "oracle"]
    for method, metrics in summary["methods"].items():
        expected = {name: "" if value is None else str(value) for name, value in leaves(metrics)}
        assert expected == {name: value for name, value in found[method].items() if name in expected}
    contrasts = rows(written.page.parent / "files/ball-contrasts.csv")
    assert [row["success.p"] for row in contrasts] == [str(row["success"]["p"]) for row in summary["contrasts"]]


def test_every_figure_is_written_in_three_forms(written: Report) -> None:
    stems = {path.stem for path in written.files if path.suffix == ".svg"}
    assert stems == {
        f"ball-{name}"
        for name in (
            "rejection", "latency", "throughput", "throughput-cdf", "latency-split", "success-over-rate",
            "true-skip-over-rate", "efficiency-over-rate",
        )
    }  # fmt: skip
    for stem in stems:
        assert (written.page.parent / "files" / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
        assert rows(written.page.parent / "files" / f"{stem}.csv")
    assert all(path.is_file() for path in written.files)


def test_figures_hold_the_numbers_of_the_runs(written: Report, runs: Path) -> None:
    files = written.page.parent / "files"
    realtime = json.loads((runs / "realtime/summary.json").read_text())["methods"]
    for row in rows(files / "ball-latency.csv"):
        assert float(row["per_action_ms"]) == realtime[row["method"]]["latency"]["per_action_ms"]
    low = json.loads((runs / "rate-0.3/summary.json").read_text())["methods"]["adahi"]
    over = [row for row in rows(files / "ball-success-over-rate.csv") if row["method"] == "adahi"]
    assert [float(row["wanted_rate"]) for row in over] == [0.3, 0.6]
    assert float(over[0]["transmission_rate"]) == low["transmission_rate"]
    assert float(over[0]["value"]) == low["success"]["rate"]
    bins = [row for row in rows(files / "ball-rejection.csv") if row["row"] == "bin"]
    assert len(bins) == 20
    assert [float(row["deviation"]) for row in bins] == sorted(float(row["deviation"]) for row in bins)
    # The primary code's rejection has fits of its own, over the same bins, and is never above that of any code.
    assert all(float(row["primary_rejection"]) <= float(row["rejection"]) + 1e-9 for row in bins)
    fits = {(row["row"], row["code"]): row for row in rows(files / "ball-rejection.csv") if row["row"] != "bin"}
    assert set(fits) == {(row, code) for row in ("linear", "logarithmic", "steps") for code in ("any", "primary")}
    x, y = ([float(row[name]) for row in bins] for name in ("deviation", "primary_rejection"))
    assert float(fits["linear", "primary"]["slope"]) == pytest.approx(np.polyfit(x, y, 1)[0])
    assert "Of the primary code, as in the paper (r): linear fit" in written.page.read_text(encoding="utf-8")


def test_the_same_runs_give_the_same_figures(written: Report, runs: Path, tmp_path: Path) -> None:
    again = report(tmp_path, runs)
    for one, other in zip(written.files, again.files, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name


def test_times_are_measured_ones_where_there_are_any(written: Report, runs: Path, tmp_path: Path) -> None:
    assert "Measured over real sockets" in written.page.read_text(encoding="utf-8")
    accounted = report(tmp_path, runs / "table")
    assert "Accounted in virtual time, not measured" in accounted.page.read_text(encoding="utf-8")
    assert any("--realtime" in str(gap) for gap in accounted.missing["ball"])
    assert any("--rate" in str(gap) for gap in accounted.missing["ball"])
    assert not any("--realtime" in str(gap) for gap in written.missing["ball"])


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
    assert written.runs == 1
    reasons = {one.folder.name: one.reason for one in written.skipped}
    assert set(reasons) == {"cut", "unfinished", "old", "nowhere"}
    assert "summary.json is damaged" in reasons["cut"]
    assert "not finished" in reasons["unfinished"] and "specact eval table" in reasons["unfinished"]
    assert "lacks latency" in reasons["old"]
    assert "no such folder" in reasons["nowhere"]
    page = written.page.read_text(encoding="utf-8")
    assert all(html.escape(reason) in page for reason in reasons.values())


def test_a_damaged_table_costs_its_figures_only(runs: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs / "table", tmp_path / "run"))
    next((folder / "steps/adahi").glob("*.parquet")).write_bytes(b"half a file")
    written = report(tmp_path, folder)
    assert any("steps/adahi holds no readable table" in str(gap) for gap in written.missing["ball"])
    names = {path.name for path in written.files}
    assert "ball-methods.csv" in names and "ball-latency.svg" in names
    assert "ball-rejection.svg" not in names


def test_a_run_of_few_methods_is_reported(runs: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs / "table", tmp_path / "run"))
    summary = json.loads((folder / "summary.json").read_text())
    draft = summary["methods"]["draft"] | {"gate_efficiency": None}
    write_json(folder / "summary.json", summary | {"methods": {"draft": draft, "a new one": draft}, "contrasts": []})
    for kind in ("steps", "episodes"):
        shutil.copytree(folder / kind / "draft", folder / kind / "a new one")
    written = report(tmp_path, folder)
    text = " ".join(map(str, written.missing["ball"]))
    assert "no method adahi:" in text and "methods that were not run: head_draft, target" in text
    assert [row["method"] for row in rows(tmp_path / "files/ball-methods.csv")] == ["draft", "a new one"]


def test_it_says_that_nothing_can_be_drawn(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "nothing")
    written = write_report([runs / "table"], tmp_path / "r.html", tmp_path / "files", lambda *_: None)
    assert any("cannot draw the environment (nothing: " in gap.what for gap in written.missing["ball"])
    assert "cannot draw the environment" in written.page.read_text(encoding="utf-8")


def test_runs_are_grouped_by_what_they_are(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs, tmp_path / "runs")
    for name, weights in (("other", "0123456789abcdef"), ("more", None)):
        folder = Path(shutil.copytree(runs / "table", tmp_path / "runs" / name))
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["evaluation"]["seed"] = 9
        manifest["evaluation"]["fingerprint"] = weights or manifest["evaluation"]["fingerprint"]
        write_json(folder / "manifest.json", manifest)
    found, skipped = find_runs([tmp_path / "runs", tmp_path / "runs" / "table"])
    assert len(found) == 5 and skipped == []
    one, other = sorted(group(found), key=lambda study: len(study.runs))
    assert one.title == "ball (0123456789abcdef)" and one.slug != other.slug
    assert other.realtime is not None and other.realtime.folder.name == "realtime"
    assert [run.folder.name for run in other.sweep] == ["rate-0.3", "table"], "another seed is another sweep"
    assert other.table.folder.name in ("table", "more")


def test_a_long_run_of_one_method_joins_the_sweep_and_loses_nothing(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs, tmp_path / "runs")
    folder = Path(shutil.copytree(runs / "table", tmp_path / "runs" / "long"))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["evaluation"] |= {"episodes": 100, "methods": ["adahi"], "mse": True, "shard": 7, "demonstrations": 3}
    write_json(folder / "manifest.json", manifest)
    summary = json.loads((folder / "summary.json").read_text())
    adahi = summary["methods"]["adahi"] | {"gate_efficiency": None, "inferences": 10_000}
    write_json(folder / "summary.json", summary | {"episodes": 100, "methods": {"adahi": adahi}, "contrasts": []})
    written = report(tmp_path, tmp_path / "runs")
    over = [row for row in rows(tmp_path / "files/ball-success-over-rate.csv") if row["method"] == "adahi"]
    assert [row["episodes"] for row in over] == ["4", "100"]
    over = [row for row in rows(tmp_path / "files/ball-efficiency-over-rate.csv") if row["method"] == "adahi"]
    assert [row["episodes"] for row in over] == ["6"]
    assert f"freely decided steps of {folder}" in written.page.read_text(encoding="utf-8")


def test_no_run_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no finished run in .*specact eval --bundle ball"):
        report(tmp_path, tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_the_command_says_what_it_wrote(specact_run: SpecactRun, runs: Path, tmp_path: Path) -> None:
    done = specact_run("report", runs / "table", "--out", tmp_path / "r.html", "--no-films", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["page"] == str(tmp_path / "r.html") and said["runs"] == 1 and said["skipped"] == []
    assert {Path(path).parent for path in said["files"]} == {tmp_path / "r_files"}
    assert all(Path(path).is_file() for path in said["files"])
