"""docs/your-own.md: its files are those of tests/thirdparty, and all its commands and snippets run, as processes."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "your-own.md"
THIRD_PARTY = ROOT / "tests" / "thirdparty"

_BLOCK = re.compile(r"(?:^`(?P<file>[\w.]+)`:\n\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A code block: a file where it has a name, commands where it has no language."""

    file: str | None
    language: str
    text: str


def sections() -> dict[str, list[Block]]:
    """The code blocks by heading."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.MULTILINE)[1:]
    return {
        title: [Block(*found.group("file", "language", "text")) for found in _BLOCK.finditer(text)]
        for title, text in zip(parts[::2], parts[1::2], strict=True)
    }


def test_the_files_of_the_page_are_those_of_the_third_party() -> None:
    shown = {block.file: block.text for blocks in sections().values() for block in blocks if block.file}
    assert shown == {path.name: path.read_text() for path in THIRD_PARTY.iterdir() if path.is_file()}


class Reader:
    """Somebody who does what the page says, in a folder of their own."""

    def __init__(self, folder: Path, command: list[str], environment: dict[str, str]) -> None:
        self._folder, self._command, self._environment = folder, command, environment | {"OMP_NUM_THREADS": "1"}
        self._url, self._server = "", ExitStack()
        for path in THIRD_PARTY.iterdir():
            if path.is_file():
                shutil.copy(path, folder)

    def follow(self, blocks: list[Block]) -> None:
        """Runs snippets and commands; every command must succeed. A server runs until the next one, or the end."""
        for block in blocks:
            if block.file is not None:
                continue
            if block.language == "python":
                self._run([sys.executable, "-c", block.text])
                continue
            for line in block.text.splitlines():
                program, *words = shlex.split(line, comments=True)
                if program == "specact" and words[0] == "serve":
                    self._serve(words)
                    continue
                server = ["--server", self._url] if words[0] == "run" else []
                self._run([*(self._command if program == "specact" else [sys.executable]), *words, *server])

    def close(self) -> None:
        self._server.close()

    def _serve(self, words: list[str]) -> None:
        self.close()
        server = self._server.enter_context(subprocess.Popen(
            [*self._command, *words, "--port", "0"],
            cwd=self._folder, env=self._environment, text=True, stderr=subprocess.PIPE,
        ))  # fmt: skip
        self._server.callback(server.terminate)
        assert server.stderr is not None
        found: re.Match[str] | None = None
        said = ""
        for line in server.stderr:  # what it loads may talk before it
            said, found = said + line, re.search(r"ws://[\d.:]+", line)
            if found is not None:
                break
        assert found is not None, said
        self._url = found.group()

    def _run(self, words: list[str]) -> None:
        done = subprocess.run(
            words, cwd=self._folder, env=self._environment, text=True, capture_output=True, timeout=600, check=False
        )
        assert done.returncode == 0, f"{shlex.join(words[-12:])}\n{done.stdout}\n{done.stderr}"


def test_your_own_data(tmp_path: Path, command: list[str], environment: dict[str, str]) -> None:
    with closing(Reader(tmp_path, command, environment)) as reader:
        reader.follow(sections()["Your data"])


def test_your_own_simulator_robot_gate_policy_and_family(
    tmp_path: Path, command: list[str], environment: dict[str, str]
) -> None:
    with closing(Reader(tmp_path, command, environment)) as reader:
        for title, blocks in sections().items():
            if title not in ("Your data", "A LeRobot policy"):  # families/chunks/test_lerobot.py follows the latter
                reader.follow(blocks)
    # A gate of one's own is calibrated, and evaluated, like any other.
    assert (tmp_path / "runs/sim/bundles/trolley/calibration/my_gate.Bend-0.50.json").is_file()
    assert (tmp_path / "runs/gates/steps/my_gate.Bend").is_dir()
    stored = json.loads((tmp_path / "runs/sim/bundles/trolley/calibration/my_gate.Bend-0.40.json").read_text())
    assert stored["settings"]["options"] == [["worst", True]]
    # So is the learned gate of a pair whose target is one's own.
    found = json.loads((tmp_path / "runs/learned/summary.json").read_text())["methods"]["learned"]
    assert found["cost"]["head_parameters"] > 0 and 0.0 < found["transmission_rate"] < 1.0
    # So is a family, by its own gate too; what is skipped there is not what the target would have done.
    assert (tmp_path / "my_family.pair/calibration/my_family.Nearness-0.50.json").is_file()
    methods = json.loads((tmp_path / "runs/family/summary.json").read_text())["methods"]
    assert methods["draft"]["transmission_rate"] == 0.0 < methods["adahi"]["transmission_rate"] < 1.0
    assert methods["hybrid"]["transmission_rate"] == 1.0 and methods["draft"]["action_change_loss"] > 0.0


def test_nothing_is_missing() -> None:
    assert list(sections()) == [
        "Your data", "Your simulator", "Your robot", "Your gate", "Your policy", "A LeRobot policy", "Your family",
    ]  # fmt: skip
