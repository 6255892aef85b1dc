"""What each verb refuses: one sentence that names what is wrong, exit status 2, and nothing is written."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.conftest import Typed

from specact.cli.main import OLD, VERBS, parse

Refused = Callable[..., None]


EVAL = "eval ball --out OUT "
SWEEP = "tised sweep --bundle ball --out OUT --levers aligned=0,1 "


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("runn", "'run'"),
        ("data record --env ball --out OUT.npz", "OUT.npz"),
        ("report --out OUT", "run folder"),
        ("run ball --stop-action nan 0", "--stop-action"),
        ("run ball --hold soon", "'soon'"),
        ("run ball --gate always --rate 0.4", "--rate"),
        ("data generate --env ball", "record"),
        ("data info generate.npz", "generate.npz"),
        ("run ball --robot no_such_arm:Arm --episodes 2", "--episodes"),
        ("run ball --seconds 3", "--seconds"),
        ("run ball --execution late --audit-rate 0.1", "--audit-rate"),
        ("run ball --split FOLDER --sampling server", "--sampling"),
        ("run ball --activations uint8", "--activations"),
        ("run ball --split FOLDER@four", "FOLDER@four"),
        ("play ball#target --execution=inpainting", "--execution rtc"),
        ("run ball --server ws://127.0.0.1:1 --episodes 1", "ws://127.0.0.1:1"),
        ("run metaworld-draft", "specact play"),
        ("play ball", "ball#draft"),
        ("play ws://127.0.0.1:1 --steps 3", "--steps"),
        ("play ball-chase-flow --stop-action 7 7", "--stop-action"),
        ("play ball#target --steps 2 --episodes 1", "--steps"),
        ("play ball#target --robot no_such_arm:Arm --live", "--live"),
        ("export FOLDER --out OUT", "specact train"),
        ("distil ball --out FILE", "FILE"),
        ("calibrate ball --out OUT --gate-options alpha=2", "alpha"),
        ("calibrate ball --out OUT --gate adahii", "'adahi'"),
        ("calibrate ball --out OUT --rate nan", "rate"),
        ("offline calibrate ball --out OUT --rate 60", "60"),
        ("offline eval ball --out OUT --rate 1", "rate"),
        ("run ball --rate nan", "rate"),
        ("offline eval metaworld-flow --out OUT", "--recipe"),
        (EVAL + "--env swarm --workers 1", "'swarm'"),
        (EVAL + "--methods draft,adahii", "'adahi'"),
        (EVAL + "--methods heisd_similiar", "'heisd_similar'"),
        (EVAL + "--methods oracle --realtime", "oracle"),
        ("eval ball --methods adahii", "'adahi'"),
        (EVAL + "--deadline-ms 50", "--realtime"),
        ("train nope.toml", "nope.toml"),
        ("serve nope", "'nope'"),
        ("calibrate ball --out OUT --lessons 9", "--lessons"),
        ("doctor --requests 9", "--server"),
        ("play ball#target --jpeg-quality 9", "--jpeg-quality"),
        ("advise --bundle ball --budget-ms 1 --link nope", "'nope'"),
        ("reproduce adahi --out OUT", "python -m experiments"),
        ("list bundels", "'bundles'"),
        ("completion fish", "'fish'"),
        ("run ball --epsodes 3", "perhaps --episodes"),
        ("tised swep", "perhaps sweep"),
        ("tised", "sweep, analyse, levers"),
        ("pair --drft x", "perhaps --draft"),
        ("run --pair=ball", "leave out --pair"),
        ("pair --draft x", "--out"),
        ("run ball --rate soon", "'soon'"),
        ("run ball --stop-action 0 0 pusht", "'0 0 pusht'"),
        ("run ball --execution", "synchronous or late"),
        ("offline calibrat ball", "perhaps calibrate"),
        ("data", "record"),
        (SWEEP + "--paces nan", "paces"),
        (SWEEP.replace("OUT", "FILE"), "FILE"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_one_sentence(refused: Refused, command: str, named: str) -> None:
    refused(command, named)


@pytest.mark.parametrize(("old", "new"), OLD.items(), ids=str)
def test_what_is_gone_says_what_to_type_now(refused: Refused, old: str, new: str) -> None:
    refused(f"eval {old}" if old.startswith("--") else old, new)


@pytest.mark.parametrize("verb", ["demo", "run", "doctor", "calibrate", "eval", "serve"])
def test_a_pair_may_be_named_as_it_was(verb: str) -> None:
    out = ["--out", "x"] if verb in ("calibrate", "eval") else []
    for old in (("--bundle", "pusht"), ("--bundle=pusht",)):
        assert parse([verb, *out, *old]) == parse([verb, "pusht", *out])


def test_what_is_wrong_does_not_hang_on_how_the_parser_prints_it(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(columns: str) -> str:
        monkeypatch.setattr("tests.cli.conftest.COLUMNS", columns)
        return typed("run", "ball", "--epsodes", "3").remarks

    assert said("30") == said("1000")
    # Of a parser without its events: its own words, and the same status.
    monkeypatch.delattr("tyro._errors")
    done = typed("run", "ball", "--epsodes", "3")
    assert done.status == 2 and "--epsodes" in done.remarks


def test_every_help_fits_on_one_screen(environment: dict[str, str]) -> None:
    script = (
        "import sys; sys.argv = ['specact', '', '--help']\n"
        "from specact.cli.main import VERBS, parse\n"
        "for verb in VERBS:\n"
        "    print('\\nof', verb)\n"
        "    try: parse([verb, '--help'])\n"
        "    except SystemExit: pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment | {"COLUMNS": "100"}, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    helps = {text.split()[0]: text.splitlines() for text in done.stdout.split("\nof ")[1:]}
    assert helps.keys() == VERBS.keys()
    lines = {name: sum(1 + len(line) // 101 for line in helps[name]) for name in VERBS}
    assert {name: count for name, count in lines.items() if count > 40} == {}


@pytest.fixture
def refused(typed: Typed, tmp_path: Path) -> Refused:
    """Runs a command, and checks that it is refused with a sentence and writes nothing."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    places = {name: str(tmp_path / name.lower()) for name in ("OUT", "FILE", "FOLDER")}

    def placed(text: str) -> str:
        name, end, rest = re.match(r"(\w*)(\W?)(.*)", text).groups()  # type: ignore[union-attr]
        return places.get(name, name) + end + rest

    def check(command: str, named: str) -> None:
        # A temporary folder may have a space in its name, so that words are split before places are put in.
        typed(*map(placed, command.split())).refuses(placed(named))
        assert not (tmp_path / "out").exists()
        assert (tmp_path / "file").read_text() == "mine"

    return check
