"""Somebody's own code by name: what is found, and what is said of everything that is not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from specact.errors import ConfigError
from specact.imports import is_plugin, load_object, make_object

MODULE = """
import math
VALUE = 3
LIST = [1]
class Arm:
    def observe(self): ...
    def act(self, action): ...
class Absent:
    def __init__(self): raise OSError("no such device: /dev/arm0")
class Needy:
    def __init__(self, port): ...
"""


@pytest.fixture
def here(plugs: Path) -> Path:
    """The current directory, with modules in it."""
    (plugs / "plug_mine.py").write_text(MODULE)
    (plugs / "plug_package").mkdir()
    (plugs / "plug_package" / "inner.py").write_text("VALUE = 4")
    (plugs / "plug_broken.py").write_text("1 / 0")
    (plugs / "plug_needs.py").write_text("import plug_of_nobody")
    (plugs / "plug_ends.py").write_text("raise SystemExit(3)")
    return plugs


def number(value: Any) -> bool:
    return isinstance(value, int)


@pytest.mark.parametrize(("name", "value"), [("plug_mine:VALUE", 3), ("plug_package.inner:VALUE", 4)])
def test_modules_of_the_current_directory_are_found(here: Path, name: str, value: int) -> None:
    assert is_plugin(name) and load_object(name, "number", number) == value
    path = sys.path.copy()
    load_object(name, "number", number)
    assert sys.path == path


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("plug_mine", "MODULE:NAME"),
        ("C:\\arms:VALUE", "MODULE:NAME"),
        ("plug_nobody:VALUE", "'plug_nobody'"),
        ("plug_broken:VALUE", "ZeroDivisionError"),
        ("plug_needs:VALUE", "'plug_of_nobody'"),
        ("plug_ends:VALUE", "SystemExit"),
        ("plug_mine:VALU", "'VALU'"),
        ("plug_mine:LIST", r"'plug_mine:LIST' is [1]. It must be a number; plug_mine has VALUE"),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence(here: Path, name: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_object(name, "number", number)
    assert said in str(raised.value)


def test_a_class_is_called_without_arguments(here: Path) -> None:
    assert type(make_object("plug_mine:Arm", "robot", ("observe", "act"))).__name__ == "Arm"


@pytest.mark.parametrize(("name", "said"), [("Absent", "/dev/arm0"), ("Needy", "'port'"), ("VALUE", "robot")])
def test_what_cannot_be_made_is_one_sentence(here: Path, name: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_object(f"plug_mine:{name}", "robot", ("observe", "act"))
    assert said in str(raised.value)


@pytest.mark.parametrize(("stop", "notes"), [("stopped.append(1)", 0), ("raise OSError('no bus')", 1)])
def test_a_robot_that_is_refused_does_not_keep_its_torque(here: Path, stop: str, notes: int) -> None:
    (here / f"plug_torque{notes}.py").write_text(
        f"stopped = []\nclass Mute:\n    def observe(self): pass\n    def stop(self): {stop}\n"
    )
    with pytest.raises(ConfigError, match="has no method 'act'") as raised:
        make_object(f"plug_torque{notes}:Mute", "robot", ("observe", "act"))
    assert len(getattr(raised.value, "__notes__", ())) == notes
    assert len(sys.modules[f"plug_torque{notes}"].stopped) == 1 - notes
