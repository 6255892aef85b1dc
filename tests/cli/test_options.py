"""``--config FILE``: options of a verb from a TOML file."""

from __future__ import annotations

from pathlib import Path

import pytest

from specact.cli.main import load_verb, parse
from specact.cli.options import CONFIGURED
from specact.errors import ConfigError

FILE = """
server = "ws://127.0.0.1:8601"
deadline-ms = 250
port = 8700

[run]
pair = "pusht"
rate = 0.4
live = true
json = false
stop_action = [0.0, -0.5]
record = "run.mcap"

[serve]
policy = "ball"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "robot.toml"
    path.write_text(FILE)
    return path


def test_a_verb_takes_its_options_from_a_file_and_what_is_typed_goes_first(file: Path) -> None:
    options = parse(["run", "--config", str(file)])
    typed = "--server ws://127.0.0.1:8601 --deadline-ms 250 --rate 0.4 --live --stop-action 0.0 -0.5 --record run.mcap"
    assert options == parse(["run", "pusht", "--config", str(file), *typed.split()])
    override = parse(["run", f"--config={file}", "ball", "--rate", "0.2", "--stop_action", "1", "1"])
    assert (override.pair, override.rate, override.session.fallback.stop_action) == ("ball", 0.2, (1.0, 1.0))
    assert override.server == options.server and override.session.tuning.live
    # A pair may be typed anywhere; the values of options are none.
    words = ["--episodes", "2", "--live", "ball", f"--config={file}"]
    assert (parse(["run", *words]).pair, parse(["run", *words[:2], *words[-1:]]).pair) == ("ball", "pusht")
    assert parse(["run", "--stop-action", "1", "1", f"--config={file}"]).pair == "pusht"
    # The same file for another machine: what only a robot knows is not the server's.
    served = parse(["serve", "--config", str(file)])
    assert (served.policy, served.address.port) == ("ball", 8700)
    assert parse(["doctor", "--config", str(file)]).server == "ws://127.0.0.1:8601"


def test_a_pair_that_is_typed_behind_a_list_is_not_lost(file: Path) -> None:
    with pytest.raises(ConfigError, match="'1 1 ball'"):
        parse(["run", "--stop-action", "1", "1", "ball", f"--config={file}"])


def test_a_verb_of_two_words_takes_them_too(file: Path) -> None:
    file.write_text('episodes = 2\n[offline]\npair = "pusht"\nrate = 0.4\ndata = "demos"')
    options = parse(["offline", "calibrate", "--config", str(file), "--rate", "0.3"])
    assert (options.pair, options.rate, str(options.demonstrations.data)) == ("pusht", 0.3, "demos")
    assert parse(["offline", "calibrate", "ball", f"--config={file}"]).pair == "ball"
    file.write_text("[offline]\nrat = 1")
    with pytest.raises(ConfigError, match=r"'rat'.*'rate'"):
        parse(["offline", "calibrate", "ball", f"--config={file}"])


@pytest.mark.parametrize("verb", [verb for verb in CONFIGURED if verb != "offline"])
def test_the_help_of_each_tells_of_it(verb: str) -> None:
    assert "config" in load_verb(verb).__dataclass_fields__


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("sever = 1", ["'sever'", "'server'"]),
        ("[run]\nrat = 1", ["'rat'", "'rate'"]),
        ("[run]\nport = 1", ["'port'"]),
        ("[run]\nrate = 2", ["rate", "1.0"]),
        ("deadline-ms = 'soon'", ["deadline_ms", "'soon'"]),
        ("execution = 'lately'", ["execution", "'late'"]),
        ("config = 'other.toml'", ["'config'"]),
        ("run = 1", ["run", "table"]),
        ("[runn]\nrate = 0.4", ["'runn'"]),
        ("rate = ", ["TOML"]),
    ],
)
def test_an_error_names_the_file_and_the_key(file: Path, text: str, named: list[str]) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse(["run", "ball", "--config", str(file)])
    assert all(part in str(caught.value) for part in [str(file), *named]), caught.value


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        parse(["play", "ball#target", "--config", "nowhere.toml"])
