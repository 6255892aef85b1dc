"""The study: what is planned, and that a stopped one goes on and never mixes two."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from specact.cli.reproduce import reproduce
from specact.errors import ConfigError
from specact.families.codes.bundle import load_bundle
from specact.families.head import HEAD
from specact.lab.evaluation import study
from specact.lab.evaluation.study import PAIRS, Size, plan
from specact.lab.rollout.methods import load_method

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_the_plan_covers_every_pair_and_is_broad_before_it_is_deep() -> None:
    pairs = [pair for pair in PAIRS if pair in ("ball", "swarm", "kitchen", "pusht")]
    chapters = plan(pairs, seed=1, quick=False, data=None)
    folders = [chapter.folder for chapter in chapters]
    assert len(set(folders)) == len(folders)
    assert folders[: len(pairs)] == [f"{pair}/table" for pair in pairs]
    by_folder = {chapter.folder: chapter.evaluation for chapter in chapters}
    wanted = {"ball": 500, "swarm": 300, "pusht": 200, "kitchen": 30}
    for pair, episodes in wanted.items():
        what = by_folder[f"{pair}/table"]
        assert what.episodes == episodes
        # What the head is worth without a gate, and chance with the privileges of either gate, stand in every table.
        assert {"draft", "head_draft", "head_random", "target_on_device", "random", "random_learned"} < {*what.methods}
        assert by_folder[f"{pair}/rate-0.4"].rate == 0.4
        if pair != "kitchen":
            assert by_folder[f"{pair}/real-time"].realtime
            assert {"draft", "head_draft"} < {*by_folder[f"{pair}-distilled/rate-0.4"].methods}
            assert f"{pair}-undertrained/table" in folders
    for pair in ("ball", "swarm"):
        assert all(what.episodes >= 300 for folder, what in by_folder.items() if folder.startswith(f"{pair}/rate-0.4"))
    rates = [0.2, 0.3, 0.4, 0.8]
    assert {f"ball/rate-{rate}" for rate in rates} < set(folders)
    # At most four skips in a row are a rate of .2 already, whatever the deviation says.
    assert "swarm/rate-0.4" in folders
    assert not {"swarm/rate-0.2", "pusht/rate-0.2"} & set(folders)
    for pair in ("swarm", "pusht"):
        assert load_bundle(pair).recommended_gates["max_skips"] is not None
        assert not {"adahi", "random"} & {*by_folder[f"{pair}/rate-0.2-unlimited"].methods}
    # Demonstrations that an expert makes can be had anywhere.
    assert by_folder["ball/table"].mse
    assert not by_folder["pusht/table"].mse


def test_no_method_is_asked_for_a_head_that_its_bundle_lacks() -> None:
    for chapter in plan(PAIRS, seed=1, quick=False, data=None):
        if not (load_bundle(chapter.evaluation.bundle).path / HEAD).exists():
            assert not any(load_method(name).needs_head for name in chapter.evaluation.methods)


def test_errors_along_demonstrations_are_asked_for_where_they_can_be_had_in_time() -> None:
    whole = {c.folder: c.evaluation for c in plan(["ball", "swarm"], seed=1, quick=False, data=None)}
    quick = {c.folder: c.evaluation for c in plan(["ball", "swarm"], seed=1, quick=True, data=None)}
    assert [whole[f"{pair}/table"].demonstrations for pair in ("ball", "swarm")] == [100, 100]
    assert quick["ball/table"].demonstrations == 4
    assert not quick["swarm/table"].mse


def test_an_unknown_pair_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'bal'"):
        reproduce("adahi", out=tmp_path / "study", pairs="ball,bal")
    assert not (tmp_path / "study").exists()


def test_a_study_resumes_and_refuses_to_become_another(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real thing with the smallest numbers: every chapter of one pair, the page, and a second call."""
    monkeypatch.setattr(study, "_QUICK", Size(3, (0.4,), 2, (), 0, rejection=3, real=1, undertrained=2, calibration=2))
    out = tmp_path / "study"
    reproduce("adahi", out=out, pairs=str(tiny_bundle), quick=True, films=False, workers=1)
    page = (out / "report.html").read_text()
    assert "tiny" in page
    folders = [chapter.folder for chapter in plan([str(tiny_bundle)], seed=1, quick=True, data=None)]
    written = {folder: (out / folder / "summary.json").stat().st_mtime_ns for folder in folders}
    summary = json.loads((out / "tiny" / "table" / "summary.json").read_text())
    assert all(metrics["mse"]["episodes"] == 2 for metrics in summary["methods"].values())
    (out / folders[-1] / "summary.json").unlink()
    capsys.readouterr()
    reproduce("adahi", out=out, pairs=str(tiny_bundle), quick=True, films=False, workers=1)
    assert f"{len(folders)} runs, {len(folders) - 1} of them done" in capsys.readouterr().err
    for folder in folders[:-1]:
        assert (out / folder / "summary.json").stat().st_mtime_ns == written[folder]
    with pytest.raises(ConfigError, match="holds another run"):
        reproduce("adahi", out=out, pairs=str(tiny_bundle), quick=True, films=False, seed=2, workers=1)
