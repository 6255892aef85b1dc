"""The command line as its users meet it: exit status, one sentence, pure JSON."""

from __future__ import annotations

import os
import subprocess
import sys
from inspect import isclass
from pathlib import Path

import pytest
from tests.cli.conftest import Typed, strictly

from specact import __version__, load_pair
from specact.cli.eval import FLOW, conclusion
from specact.cli.main import VERBS, load_verb
from specact.cli.output import progress_bars, progress_lines
from specact.lab.data.readers import read

INTERVAL = {"mean", "low", "high"}
METHOD = {
    "success", "score", "control_steps", "inferences", "sent", "true_skip_ratio", "acceptance",
    "primary_rejection", "gated_loss", "action_change_loss", "gate_efficiency", "choice_efficiency", "draft_entropy",
    "target_entropy", "latency", "missed", "cost",
}  # fmt: skip
SUMMARY = {
    "env", "episodes", "seed", "bundle", "rate", "link", "score", "methods", "contrasts", "calibration", "gates",
    "seconds", "realtime",
}  # fmt: skip


def test_help_names_every_verb_and_the_version_is_said(typed: Typed) -> None:
    helped = typed("--help")
    assert helped.status == 0 and all(verb in helped.out for verb in VERBS)
    assert typed("--version") == (0, f"specact {__version__}\n", "")


@pytest.mark.parametrize("words", [["list", "links"], ["completion", "bash"]], ids=" ".join)
def test_a_reader_that_has_gone_is_no_error(words: list[str], environment: dict[str, str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "specact", *words]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, env=environment, timeout=600)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_reader_that_goes_before_the_last_line_is_no_error_either(environment: dict[str, str]) -> None:
    script = (
        "import builtins, fcntl, os, sys; said, (reading, writing) = print, os.pipe()\n"
        "fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 1 << 20); os.dup2(writing, 1); os.close(writing)\n"
        "def last(*words, **how): said(*words, **how); os.close(reading)\n"
        "builtins.print, sys.argv = last, ['specact', 'completion', 'bash']\n"
        "from specact.cli.main import main; main()"
    )
    buffered = {name: value for name, value in environment.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, env=buffered, timeout=600)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize("how", ["closed", "pipe", "terminal"])
def test_what_nobody_reads_on_stderr_ends_no_run_and_loses_no_result(how: str) -> None:
    reading, writing = os.openpty() if how == "terminal" else os.pipe()
    os.close(reading)
    script = (
        "from specact.cli.output import progress_lines, remark; lines = progress_lines(0.0)\n"
        "for step in range(3): lines('steps', step, 2); remark('a warning', warn=True)\n"
        "print('the summary')"
    )
    command = ["sh", "-c", 'exec "$@"' + " 2>&-" * (how == "closed"), "sh", sys.executable, "-c", script]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=writing, timeout=600, check=False)
    os.close(writing)
    assert (done.returncode, done.stdout) == (0, b"the summary\n")


def test_progress_is_a_line_now_and_then_where_nobody_sees_bars(capsys: pytest.CaptureFixture[str]) -> None:
    often, rarely = progress_lines(0.0), progress_lines(3600.0)
    for done in range(3):
        often("episodes", done, 2)
        rarely("episodes", done, 2)
    assert capsys.readouterr().err.split("\n") == ["episodes: 0 of 2", "episodes: 1 of 2", "episodes: 2 of 2", ""]
    with progress_bars() as update:
        update("episodes", 1, 2)
    assert capsys.readouterr().err == ""


def test_a_verb_imports_no_other_verb_and_not_the_lab(environment: dict[str, str]) -> None:
    told = (
        "import sys; from specact.cli.main import main; sys.argv = ['specact', 'run', '--help']\n"
        "try: main()\n"
        "except SystemExit: print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, env=environment, timeout=600)
    imported = set(done.stdout.splitlines()[-1].split())
    assert "specact.cli.run" in imported, done.stderr
    others = {load_verb(name).__module__ for name in VERBS if name != "run" and isclass(load_verb(name))}
    assert not [name for name in imported if name in others or name.startswith("specact.lab")]


def test_eval_writes_the_documented_summary(typed: Typed, tiny_bundle: Path, tmp_path: Path) -> None:
    words = ["eval", tiny_bundle, "--out", tmp_path / "run", "--methods", "draft,hybrid,random", "--episodes", "3",
             "--workers", "1", "--draft-ms", "1", "--target-ms", "5", "--seed", "4", "--json"]  # fmt: skip
    summary = typed(*words).summary
    assert strictly((tmp_path / "run" / "summary.json").read_text()) == summary
    assert set(summary) == SUMMARY
    assert (summary["env"], summary["episodes"], summary["seed"]) == ("ball", 3, 4)
    assert list(summary["methods"]) == ["draft", "hybrid", "random"]
    for m in summary["methods"].values():
        assert set(m) == METHOD and set(m["success"]) == {"n", "k", "rate", "low", "high"}
        assert set(m["score"]) == INTERVAL and set(m["acceptance"]) == {"codebooks", "all"}
    assert summary["methods"]["hybrid"]["sent"] == 1.0
    manifest = strictly((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["command"].startswith("specact eval ")
    assert manifest["evaluation"]["fingerprint"] == load_pair(tiny_bundle).fingerprint
    # The same command again has nothing left to do; other settings are refused.
    assert typed(*words).summary | {"seconds": 0} == summary | {"seconds": 0}
    typed(*words, "--rate", "0.5").refuses("--out")


def test_a_flow_policy_is_shown_in_its_ways_to_a_chunk(typed: Typed, tmp_path: Path) -> None:
    told = typed("demo", "pusht-flow", "--episodes", "1", "--out", tmp_path / "run", "--workers", "1", "--json").summary
    assert tuple(told["methods"]) == FLOW
    assert told["methods"]["full"]["full"] == 1.0 > told["methods"]["flash"]["full"]
    assert typed("report", tmp_path / "run", "--out", tmp_path / "page.html", "--no-films").status == 0
    assert "share of rounds that denoised" in (tmp_path / "page.html").read_text()


def test_a_demo_ends_with_what_its_tests_support() -> None:
    names = ("adahi", "hybrid", "random", "draft")
    methods = {name: {"success": {"rate": 0.9}, "sent": 0.58} for name in names}
    for episodes, high, end in ((60, 0.1, "you need no server."), (60, 0.9, "a server helps."), (4, 0.1, "is needed.")):
        test = {"difference": high, "p_holm": 0.01 if high > 0.5 else 1.0, "high": high}
        tests = [{"second": name, "success": test} for name in names[1:]]
        assert conclusion({"episodes": episodes, "methods": methods, "contrasts": tests}).endswith(end)


def test_brackets_and_colons_are_printed_as_they_are(typed: Typed, tmp_path: Path) -> None:
    path = tmp_path / "[x] and :x:"
    made = typed("data", "record", "--env", "ball", "--out", path, "--episodes", "1", "--workers", "1")
    assert made.status == 0 and "[x] and :x:" in made.out
    typed("data", "info", tmp_path / "[" / "b].npz").refuses(f"{tmp_path}/[/b].npz")
    (tmp_path / "[").mkdir()
    shown = typed("data", "info", path.rename(tmp_path / "[" / "b]"))
    assert shown.status == 0 and f"{tmp_path}/[/b]" in shown.out
    (tmp_path / "r.toml").write_text('env = "ball"\ngenerate_episodes = 2\n[tokenizer]\ncodse = 3\n')
    typed("train", tmp_path / "r.toml", "--out", tmp_path / "run").refuses("tokenizer", "'codse'", "'codes'")


def test_data_record_and_info(typed: Typed, tmp_path: Path) -> None:
    path = tmp_path / "made"
    words = ("--env", "ball", "--out", path, "--episodes", "2", "--workers", "1", "--json")
    counts = typed("data", "record", *words).summary
    assert counts["path"] == str(path) and counts["kept"] == 2 and counts["steps"] == read(path).steps
    info = typed("data", "info", path, "--json").summary
    assert (info["episodes"], info["steps"], info["format"]) == (2, counts["steps"], "lerobot")
    assert info["shapes"] == {
        name: [counts["steps"], size] for name, size in (("state", 8), ("action", 2), ("goal", 2))
    }
    assert str(counts["steps"]) in typed("data", "info", path).out


def test_train_a_tiny_recipe(typed: Typed, tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        'env = "ball"\ngenerate_episodes = 3\nchunk = 2\n[tokenizer]\ncodes = 4\nsteps = 20\nlatent = 4\n'
        "[policies.only]\nlayers = 1\nheads = 1\nwidth = 8\nhead_width = 0\nsteps = 5\nbatch = 8\n"
        '[bundles]\nmine = ["only", "only"]\n'
    )
    made = typed("train", recipe, "--out", tmp_path / "run", "--json").summary
    assert made["bundles"] == [str(tmp_path / "run" / "bundles" / "mine")]
    assert {name: line["step"] for name, line in made["metrics"].items()} == {"tokenizer": 20, "only": 5}
    assert (tmp_path / "run" / "only.safetensors").exists()
    recipe.write_text(recipe.read_text().replace("steps = 5", "steps = 6"))
    typed("train", recipe, "--out", tmp_path / "run").refuses("--out")
