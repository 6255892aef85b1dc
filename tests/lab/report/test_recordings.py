"""What a report says of recordings: numbers, origins and times beside those of runs, and what they do not hold."""

from __future__ import annotations

import csv
import itertools
import re
from collections import Counter
from pathlib import Path

import pytest
from tests.lab.recorded import record

from specact.errors import ConfigError
from specact.lab.report.report import Report, write_report


def report(folder: Path, *paths: Path) -> Report:
    return write_report(paths, folder / "report.html", folder / "files", lambda *_: None, films=False)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def text_of(written: Report) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", written.page.read_text()))


def test_the_page_tells_what_was_recorded(tmp_path: Path) -> None:
    truth = record(tmp_path / "run.mcap", blind=frozenset({3}))
    written = report(tmp_path, tmp_path / "run.mcap")
    ticks = list(itertools.chain(*truth.ticks))
    records = [tick.record for tick in ticks if tick.record is not None]
    sent = sum(each.decision.transmit for each in records)
    said = text_of(written)
    assert (written.runs, written.recordings) == (0, 1) and "Report on 1 recording" in said
    assert "3 of 4, mean score 0.750" in said and f"{len(ticks):,}, 0 more were dropped" in said
    assert "shape 4" in said and f"{sent}, {sent / len(records):.3f} of all" in said
    steps = rows(tmp_path / "files/run-steps.csv")
    assert len(steps) == len(ticks)
    origins = {row["origin"]: int(row["actions"]) for row in rows(tmp_path / "files/run-origins.csv")}
    assert origins == Counter(row["origin"] for row in steps) and {"drafted", "replaced", "fallback"} == set(origins)
    stages = [row["stage"] for row in rows(tmp_path / "files/run-stages.csv")]
    assert stages == ["draft", "gate", "encode", "network", "queue", "target", "finish", "all"]
    scores = rows(tmp_path / "files/run-scores.csv")
    assert [float(row["score"]) for row in scores] == [each.decision.score for each in records]
    assert (tmp_path / "files/run-actions.svg").exists() and len(written.missing["Recording run.mcap"]) == 1


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
    assert (written.runs, written.recordings) == (1, 1)
    assert "Report on 1 run of 1 bundle and 1 recording" in text_of(written)
    # The bundle is called ball, too; neither overwrites the files of the other.
    assert (tmp_path / "files/ball-methods.csv").exists() and (tmp_path / "files/ball--steps.csv").exists()
    (skipped,) = written.skipped
    assert skipped.folder == tmp_path / "notes.txt" and "no recording" in skipped.reason
    with pytest.raises(ConfigError, match=r"notes\.txt"):
        report(tmp_path, tmp_path / "notes.txt")
