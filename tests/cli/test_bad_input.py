"""Wrong numbers, names and places, for each verb: one sentence, exit status 2, and nothing is written."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from specact.cli import main as cli

Refused = Callable[[str, str], None]

ROBOT = "run --robot my_robot:Arm "
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
        ("data generate --env metaworld --out OUT.npz", "have instructions, which an .npz file does not hold; name a"),
        ("run --env ball --policy ball-chase-flow --seed -1", "--seed must be at least 0"),
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
        (SWEEP.replace("aligned=0,1", "split=99 --links lan"), "'ball' can be cut from 0 to 8, not at 99"),
        (SWEEP.replace("aligned=0,1", "quantisation=1 nave"), "unknown lever 'nave'"),
        (SWEEP.replace("aligned=0,1", "quantisation=1 --hardware nope"), "unknown hardware"),
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
def test_a_wrong_argument_is_one_sentence(refused: Refused, command: str, sentence: str) -> None:
    refused(command, sentence)


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (
            "run --bundle ball --seconds 60",
            "--seconds is for a real robot (--robot); for a simulated one use --episodes",
        ),
        (ROBOT + "--bundle ball --episodes 5", "--episodes is for a simulated robot; with --robot use --seconds"),
        (ROBOT + "--bundle ball --env ball", "--env is for a simulated robot; leave it out with --robot"),
        (ROBOT + "--policy ball#target --live", "--live is for a simulated robot; leave it out with --robot"),
        ("run --bundle ball --gate always --rate 0.4", "--rate has no effect with --gate always"),
        ("run --bundle ball --latency-budget-ms 9 --rate 0.4", "--rate has no effect with --latency-budget-ms"),
        ("run --policy ball#target --ca FILE", "--ca is for a server, and ball#target runs on this device"),
        ("run --policy ball#target --jpeg-quality 9", "--jpeg-quality is for a server"),
        ("run --policy ball#target --steps 2", "--steps is for a flow policy, and ball#target is none"),
        ("run --policy ws://127.0.0.1:9 --steps 2", "--steps is for inference on this device"),
        ("run --policy ball#target --on-miss hold_last --stop-action 0 0", "--on-miss hold_last is for a pair"),
        ("serve --bundle ball --steps 2", "--steps is for a flow policy, and ball is none"),
        (
            "serve --policy my_policy:policy --threads 2",
            "--threads is for networks on ONNX Runtime, and my_policy:policy",
        ),
        (EVAL + "--decoding kerv", "ball is no token policy and no flow policy, and only these have decodings"),
        (EVAL + "--recipe FILE", "--recipe is of demonstrations; add --offline"),
        (EVAL + "--deadline-ms 9", "--deadline-ms is for real sockets; add --realtime"),
        (EVAL + "--wire json", "--wire is for real sockets; add --realtime"),
        (EVAL + "--demonstrations 9", "--demonstrations is for --mse"),
        (EVAL + "--realtime --target-ms 9", "--target-ms is an accounted time; with --realtime all are measured"),
        (EVAL + "--offline --episodes 9", "--episodes has no effect along demonstrations"),
        ("train FILE --out OUT --lessons 9", "--lessons is for --distil without a recipe"),
        ("train FILE --out OUT --target ball", "--target is for --distil without a recipe"),
        ("train --distil ball --out OUT --data FOLDER", "--data is for a recipe; leave it out with --distil alone"),
        ("train --distil ball --out OUT --jobs 2", "--jobs is for a recipe; leave it out with --distil alone"),
        ("calibrate --bundle ball --out OUT --data FOLDER", "--data is of demonstrations; add --offline"),
        ("calibrate --bundle ball --out OUT --lessons 9", "--lessons is for a learned gate"),
        ("calibrate --bundle ball --out OUT --offline --episodes 9", "--episodes is for a simulator"),
        (SWEEP + "--links lan", "--links is for a server, and no lever queries one"),
        (SWEEP + "--target-ms 9", "--target-ms is for a server, and no lever queries one"),
        (SWEEP + "--steps 2", "--steps is for a flow policy alone, and ball is a pair"),
        (LATENCY + "--rate-hz 9", "--rate-hz is for --deadline-ms"),
        (LATENCY + "--deadline-ms 9 --draft-ms 9", "--draft-ms has no effect with --deadline-ms"),
        ("data generate --env ball --out OUT.npz --pixels 9", "--pixels is for a folder"),
        ("doctor --requests 9", "--requests is for --server"),
        ("proxy --end server", "--end is for --netem"),
        ("proxy --netem eth0 --seed 1", "--seed is for the relay"),
        ("reproduce flow --out OUT --no-films", "--no-films does not apply to the study flow"),
        ("reproduce split --out OUT --data FOLDER --pairs ball", "--pairs does not apply to the study split"),
    ],
    ids=str,
)
def test_an_option_without_an_effect_is_refused(refused: Refused, command: str, sentence: str) -> None:
    refused(command, sentence)


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command, and checks that it is refused with a sentence and writes nothing."""
    return partial(_check_refused, tmp_path, monkeypatch, capsys)


def _check_refused(
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
