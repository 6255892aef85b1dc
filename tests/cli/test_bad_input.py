"""Wrong numbers, names and places, for each verb: one sentence, exit status 2, and nothing is written."""

import sys
from pathlib import Path

import pytest

from specact.cli import main as cli

EVAL = "eval --bundle ball --out OUT "
SWEEP = "tised sweep --bundle ball --out OUT --levers aligned=0,1 "
LATENCY = "bench latency --no-stand-in --out OUT "
SERVER = "bench server --out OUT "


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("demo --episodes 0 --out OUT", "episodes must be at least 1, got 0"),
        ("demo --seed -1 --out OUT", "seed must be at least 0"),
        ("demo --workers 0 --out OUT", "workers must be at least 1, got 0"),
        ("demo --episodes 1 --workers 1 --out FILE", "is a file, but"),
        ("data generate --env ball --out OUT.npz --noise nan", "noise at least 0 and finite, got 200 and nan"),
        ("data generate --env ball --out OUT.npz --seed -1", "seed must be at least 0, got -1"),
        ("data generate --env ball --out OUT.txt --episodes 1", "--out must be a .npz file, or a folder"),
        ("data generate --env ball --out FILE/made.npz --episodes 1", "is a file, but"),
        ("report --out OUT", "give at least one run folder, as in: specact report runs/ball"),
        ("serve --bundle ball --threads 0", "threads must be at least 1, got 0"),
        ("run --bundle ball --stop-action nan 0", "--stop-action: an action of this robot must have shape [2]"),
        ("run --bundle ball --stop-action 0", "--stop-action: an action of this robot must have shape [2]"),
        ("run --bundle ball --deadline-ms 1e300", "a deadline must lie between 0 and"),
        ("run --bundle ball --on-miss stop", "so it needs a stop_action"),
        ("run --bundle ball --rate-hz 1e-300", "--rate-hz must be at least 0.001 and at most 1000000, got 1e-300"),
        ("train --distil ball --out OUT --lessons 0", "lessons must be at least 1, got 0"),
        ("train --distil ball --out FILE", "is a file, but"),
        ("train --distil ball --out OUT --threads 0", "--threads must be at least 1, got 0"),
        ("train FOLDER --out OUT", "cannot read the recipe"),
        ("calibrate --bundle ball --out OUT --rounds 0", "rounds must be at least 1, got 0"),
        ("calibrate --bundle ball --out OUT --seed -1", "seed must be at least 0"),
        ("calibrate --bundle ball --out OUT --alpha nan", "alpha must be a number above 0 and at most 1, got nan"),
        ("calibrate --bundle ball --out OUT --workers -1", "workers must be at least 1, got -1"),
        ("calibrate --bundle ball --out FILE", "is a file, but"),
        (EVAL + "--draft-ms nan", "draft_ms must be a finite number, got nan"),
        (EVAL + "--draft-ms -1", "draft_ms must be at least 0, got -1"),
        (EVAL + "--target-ms inf", "target_ms must be a finite number, got inf"),
        (EVAL + "--kappa 0", "kappa must be above 0, got 0"),
        (EVAL + "--deadline-ms 0", "deadline_ms must be above 0, got 0"),
        (EVAL + "--env swarm --workers 1", "but the task 'swarm' has action width 10"),
        ("advise --bundle ball --budget-ms nan", "budget_ms must be a finite number, got nan"),
        ("advise --bundle ball --budget-ms 1 --link nope", "unknown link 'nope'"),
        ("advise --bundle ball --budget-ms 1 --runs FOLDER", "there is no finished run in"),
        ("eval --bundle pusht --out OUT --workers 1 --mse --data FOLDER", "there is nothing at"),
        ("reproduce adahi --out OUT --pairs ball,", "--pairs must be bundle names separated by commas, got 'ball,'"),
        (SWEEP + "--episodes 0", "episodes must be at least 1, got 0"),
        (SWEEP + "--paces nan", "paces must be at least 0 and finite, got nan"),
        (SWEEP + "--target-ms -1", "target_ms must be at least 0, got -1"),
        (SWEEP + "--execute 0", "--execute must be at least 1, got 0"),
        (SWEEP.replace("OUT", "FILE"), "is a file, but"),
        ("doctor --requests 0", "--requests must be at least 1, got 0"),
        (LATENCY + "--steps 0", "steps must be at least 2, got 0"),
        (LATENCY + "--rate nan", "rate must be a finite number, got nan"),
        (LATENCY + "--rate 0", "rate must be above 0 and below 1, got 0"),
        (LATENCY + "--draft-ms -1", "draft_ms must be at least 0, got -1"),
        (LATENCY + "--link nope", "unknown link 'nope'"),
        (SERVER + "--robots 0", "--robots must name at least one number, each at least 1"),
        (SERVER + "--seconds 0", "seconds must be above 0, got 0"),
        (SERVER + "--rounds -1", "rounds must be at least 0, got -1"),
        (SERVER + "--neighbours -3", "--neighbours must not be negative; got (-3,)"),
        (SERVER + "--steps -3", "steps must be at least 0, got -3"),
        (SERVER + "--offered-hz nan", "offered_hz must be a finite number, got nan"),
        (SERVER + "--soak-s nan", "soak_s must be a finite number, got nan"),
        (SERVER.replace("OUT", "FILE"), "is a file, but"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    sentence: str,
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    places = {name: str(tmp_path / name.lower()) for name in ("OUT", "FILE", "FOLDER")}
    # A temporary folder may have a space in its name, so that words are split before places are put in.
    words = [word.split("/") for word in command.split()]
    argv = ["/".join([places.get(first, first), *rest]) for first, *rest in words]
    monkeypatch.setattr(sys, "argv", ["specact", *argv])
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert sentence in said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "file").read_text() == "mine"
