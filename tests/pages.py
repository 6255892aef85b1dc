"""Pages as a reader follows them: in order, in one fresh folder, as processes.

The reader writes the files that are shown below their name (a line that is nothing but ```name.py`:``), runs the
blocks of ``sh`` as scripts that end at the first error, and the blocks of ``python``. Servers and relays run on until
the end, or until another one takes their port; everything else is waited for. A block with ``not-run="reason"`` or
``example=name`` is not followed. Ports are free ones in place of those of the page and of the defaults.

As a program this file stands in for ``specact`` and ``python`` in such a script.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

ROOT = Path(__file__).parents[1]
THIRD_PARTY = ROOT / "tests" / "thirdparty"
DEMONSTRATIONS = "path/to/demonstrations"  # how pages call the folder of recorded data

_BLOCK = re.compile(
    r"(?:^`(?P<file>[\w./-]+)`:\n\n?)?^```(?P<language>\w*)(?P<rest>[^\n`]*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_PORT = re.compile(r"(?:(?<=:)|(?<=--port )|(?<=\"127\.0\.0\.1\", ))8\d{3}\b")


class Block(NamedTuple):
    """A code block: a file where it has a name, else what its language says; its reason where it is not run."""

    file: str | None
    language: str
    text: str
    reason: str | None


def blocks(page: Path) -> list[Block]:
    """All code blocks of a page, in order."""
    return [
        Block(match["file"], match["language"], match["text"], _reason(match["rest"].strip()))
        for match in _BLOCK.finditer(page.read_text(encoding="utf-8"))
    ]


def _reason(rest: str) -> str | None:
    if rest.startswith("example="):
        return "it is tested by itself"
    match = re.fullmatch(r'not-run="(.+)"', rest)
    assert match or not rest, rest
    return match and match[1]


def pages() -> list[Path]:
    """README and the pages that users and developers read."""
    rooms = ("start", "how-to", "explain", "help", "develop")
    return [ROOT / "README.md", *(page for room in rooms for page in sorted((ROOT / "docs" / room).glob("*.md")))]


def commands(text: str) -> list[list[str]]:
    """The commands that call specact in a script, as words. What a variable decides can only be run."""
    calls = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.shlex(re.sub(r"(^|\s)#.*", "", line), posix=True, punctuation_chars=True)
        words.whitespace_split, words.commenters = True, ""
        command: list[str] = []
        for word in [*words, ";"]:
            if set(word) <= set(";&|()<>"):
                if command[:1] == ["specact"] and not any("$" in part for part in command):
                    calls.append(command)
                command = []
            elif word not in ("do", "then") or command:
                command.append(word)
    return calls


def follow(steps: Sequence[Block], folder: Path, environment: Mapping[str, str], data: Path | None = None) -> list[str]:
    """Does what blocks say, in a folder; what was left out for want of demonstrations.

    Raises an ``AssertionError`` with all that was printed if a command fails, does not end or leaves a process behind.
    """
    side = folder.with_name(f"{folder.name}-side")
    for path in (side / "bin", folder):
        path.mkdir(parents=True, exist_ok=True)
    for program in ("specact", "python", "python3"):
        (side / "bin" / program).write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P {shlex.quote(__file__)} {program} "$@"\n'
        )
        (side / "bin" / program).chmod(0o755)
    said = "\n".join(block.text for block in steps)
    ports = _free_ports({*_PORT.findall(said), "8600", "8601"})
    script, left_out = ["set -eo pipefail"], list[str]()
    for number, block in enumerate(steps):
        text = _PORT.sub(lambda match: ports[match[0]], block.text)
        if DEMONSTRATIONS in text and data is None:
            left_out.append(text)
            continue
        text = text.replace(DEMONSTRATIONS, str(data))
        place = side / str(number)
        place.write_text(text)
        if block.file is not None:
            script.append(f"mkdir -p $(dirname {block.file}); cp {place} {block.file}")
        elif block.language == "python":
            script.append(f"echo '>' block {number}, python; python -c \"$(cat {place})\"")
        elif block.language == "sh":
            script.append(f"set -x\n{text}{{ set +x; }} 2>/dev/null")
    mark = f"SPECACT_PAGE={uuid4().hex}"
    environment = dict(environment) | dict([mark.split("=")]) | {f"PAGE_PORT_{port}": ports[port] for port in ports}
    environment |= {"PAGE_SIDE": str(side), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = os.pathsep.join([str(side / "bin"), str(Path(sys.executable).parent), environment["PATH"]])
    with (side / "log").open("wb") as log, ExitStack() as end:
        end.callback(_end, mark.encode())
        done = subprocess.run(
            ["bash", "-c", "\n".join(script)], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log,
            stderr=log, timeout=2400, check=False,
        )  # fmt: skip
    printed = "\n".join(f"-- {path.name}\n{path.read_text()[-6000:]}" for path in sorted(side.glob("*log")))
    assert done.returncode == 0, printed
    return left_out


def _free_ports(wanted: set[str]) -> dict[str, str]:
    with ExitStack() as stack:
        return {
            port: str(stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]) for port in wanted
        }


def _end(mark: bytes) -> None:
    """Ends what a page has left running; what does not end when it is told to is an error."""
    from tests.children import marked

    _signal(mark, signal.SIGTERM)
    until = time.monotonic() + 120.0
    while (left := marked(mark)) and time.monotonic() < until:
        time.sleep(0.05)
    while marked(mark):
        _signal(mark, signal.SIGKILL)
        time.sleep(0.05)
    assert not left, "a process went on after SIGTERM"


def _signal(mark: bytes, number: int) -> None:
    from tests.children import marked

    for pid in marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _stand_in(program: str, words: list[str]) -> int:
    """Runs a command of a page at the ports of this run, in the background if it serves."""
    module, verb = ("-m specact", words[0] if words else "") if program == "specact" else ("", " ".join(words[:2]))
    here = {port: f"127.0.0.1:{os.environ[f'PAGE_PORT_{port}']}" for port in ("8600", "8601")}
    defaults = {
        "serve": {"--port": here["8600"].rpartition(":")[2]},
        "proxy": {"--target": here["8600"], "--listen": here["8601"]},
        "run": {"--server": f"ws://{here['8600']}"},
    }.get(verb, {})
    configured = Path(words[words.index("--config") + 1]).read_text() if "--config" in words else ""
    for option, value in defaults.items():
        if not {option, "--help", "--help-all"} & set(words) and f"{option[2:]} =" not in configured:
            words += [option, value]
    command = [sys.executable, *module.split(), *words]
    if verb not in ("serve", "proxy", "-m specact.lab.vla_eval"):
        os.execv(sys.executable, command)
    option = "--listen" if verb == "proxy" else "--port"
    return _serve(command, int(words[words.index(option) + 1].rpartition(":")[2]))


def _serve(command: list[str], port: int) -> int:
    """Starts what serves a port, in place of what a page started there before, and waits until it does."""
    side = Path(os.environ["PAGE_SIDE"])
    place = side / f"{port}.pid"
    if place.exists():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(place.read_text()), signal.SIGTERM)
    while _answers(port):
        time.sleep(0.05)
    with (side / f"{port}.log").open("ab") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    place.write_text(str(process.pid))
    while not _answers(port):
        if process.poll() is not None:
            return process.returncode or 1  # what it said is in its log
        time.sleep(0.05)
    return 0


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


if __name__ == "__main__":
    sys.exit(_stand_in(sys.argv[1], sys.argv[2:]))
