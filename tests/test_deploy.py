"""What runs a server for others: the unit of systemd and the container file say what the server really takes."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specact.lab.processes import ServerProcess

DEPLOY = Path(__file__).parents[1] / "deploy"
UNIT, CONTAINER = DEPLOY / "specact.service", DEPLOY / "Containerfile"
PREFIX = "/opt/specact/bin/"
TOKEN = "a token of the tests".replace(" ", "-")


def instruction(name: str) -> list[str]:
    """The command of the container file's instruction."""
    text = CONTAINER.read_text().replace("\\\n", " ")
    (found,) = re.findall(rf"^{name}(?: --\S+)*\s+(?:CMD )?(\[.+\])$", text, re.MULTILINE)
    command: list[str] = json.loads(found)
    return command


def healthy(port: int) -> bool:
    """What the container's health check says of a server there."""
    program, *arguments = (word.replace(":8600/", f":{port}/") for word in instruction("HEALTHCHECK"))
    assert program == f"{PREFIX}python"
    return subprocess.run([sys.executable, *arguments], check=False, stderr=subprocess.DEVNULL).returncode == 0


def test_the_container_s_server_starts_and_is_healthy_until_it_ends() -> None:
    program, *arguments = [*instruction("ENTRYPOINT"), *instruction("CMD")]
    assert program == f"{PREFIX}specact"
    # Here on loopback and a free port; the last value of an option counts.
    with ServerProcess([*arguments, "--host", "127.0.0.1", "--port", "0"], {"SPECACT_TOKEN": TOKEN}) as server:
        assert healthy(server.port)
        assert server.stop() == 0
        assert not healthy(server.port)


def test_the_unit_s_server_starts_with_tokens_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"robot-1 {TOKEN}\n")
    (line,) = re.findall(r"^ExecStart=(.+)$", UNIT.read_text(), re.MULTILINE)
    files = {"/etc/specact/tokens": str(tmp_path / "tokens")}
    program, *arguments = (files.get(word, word) for word in shlex.split(line))
    assert (program, arguments.pop()) == (f"{PREFIX}specact", "$SERVE")
    with ServerProcess([*arguments, "--bundle", "ball", "--port", "0"]) as server:
        assert healthy(server.port)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_understands_the_unit_and_finds_it_confined(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace(f"{PREFIX}specact", "/bin/true"))
    for command in (["verify"], ["security", "--offline=true", "--threshold=20"]):  # of 100
        done = subprocess.run(
            ["systemd-analyze", *command, unit],
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout
        assert UNIT.name not in done.stdout or command[0] == "security", done.stdout
