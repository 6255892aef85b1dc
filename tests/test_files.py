"""Files and run folders that several processes write to."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest
from tests.tiny import quiet

from specact.errors import ConfigError
from specact.files import check_name, is_name, remove_torn, write_whole
from specact.lab.data.folder import locked
from specact.lab.evaluation.run import Evaluation, evaluate
from specact.lab.rollout.pool import Pool
from specact.lab.train.recipe import load_recipe
from specact.lab.train.train import train

WRITE = """
import sys
from pathlib import Path
from specact.files import write_whole
print("ready", flush=True)
sys.stdin.readline()
for _ in range(50):
    write_whole(Path(sys.argv[1]), sys.argv[2].encode() * 100_000)
"""

HOLD = """
import sys
from pathlib import Path
from specact.lab.data.folder import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""

TORN = "000000.parquet.12345-0123abcd.partial"


def started(code: str, environment: dict[str, str], *arguments: object) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.Popen(words, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert readable(process.stdout).readline(), "it ended before it began"
    return process


def readable(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def test_two_processes_write_one_file(tmp_path: Path, environment: dict[str, str]) -> None:
    file = tmp_path / "file"
    writers = [started(WRITE, environment, file, letter) for letter in "ab"]
    for writer in writers:
        readable(writer.stdin).write("go\n")
        readable(writer.stdin).flush()
    for writer in writers:
        writer.communicate()
    assert [writer.returncode for writer in writers] == [0, 0]
    assert file.read_bytes() in (b"a" * 100_000, b"b" * 100_000)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="cannot write"):
        write_whole(tmp_path / "folder", b"payload")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write"):
        write_whole(tmp_path / "file" / "inside", b"payload")


def test_only_what_a_writer_left_is_removed(tmp_path: Path) -> None:
    kept = [tmp_path / name for name in ("download.partial", "notes.partial.txt", "x.12-0123abcd.partial.bak")]
    torn = [tmp_path / TORN, tmp_path / "steps" / "hybrid" / TORN]
    for path in (*kept, *torn):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    remove_torn(tmp_path)
    assert [path.exists() for path in kept] == [True] * 3
    assert [path.exists() for path in torn] == [False] * 2


def test_a_folder_in_use_says_who_uses_it(tmp_path: Path, environment: dict[str, str]) -> None:
    folder = tmp_path / "run"
    holder = started(HOLD, environment, folder, "some words")
    sentence = (
        rf"{re.escape(str(folder))} is in use by process {holder.pid} on {re.escape(socket.gethostname())} "
        rf"\(-c {re.escape(shlex.quote(str(folder)))} 'some words'\) since \d{{4}}-\d\d-\d\dT[\d:+-]+; "
        "wait until it ends, or choose another --out"
    )
    with pytest.raises(ConfigError, match=sentence), locked(folder):
        pytest.fail("held twice")
    holder.communicate("end\n")
    assert holder.returncode == 0
    assert not folder.exists(), "an empty folder that was made for the lock is removed with it"
    with locked(folder):
        (folder / "result").touch()
    assert [path.name for path in folder.iterdir()] == ["result"]


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path, environment: dict[str, str]) -> None:
    folder = tmp_path / "run"
    holder = started(HOLD, environment, folder)
    (folder / TORN).touch()  # as if it had been writing
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert json.loads((folder / ".lock").read_text())["pid"] == holder.pid
    with locked(folder):
        assert json.loads((folder / ".lock").read_text())["pid"] == os.getpid()
        assert [path.name for path in folder.iterdir()] == [".lock"]
    assert list(folder.iterdir()) == []


def test_worker_processes_of_a_run_are_no_others(tmp_path: Path) -> None:
    """They neither need the lock nor keep it when the run has ended."""
    with Pool(2) as pool:
        with locked(tmp_path):
            assert len(list(pool.each(abs, [-1, -2, -3]))) == 3
        with locked(tmp_path):
            pass


@pytest.mark.parametrize(("place", "said"), [("/proc/run", "choose another --out"), (__file__, "must be a folder")])
def test_a_place_where_no_folder_can_be_made_is_refused_and_not_tried_for_ever(place: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"{place}.*{said}"), locked(Path(place)):
        pytest.fail("a folder was made there")


Run = Callable[[Path, Path, Path], object]
RUNS: dict[str, Run] = {
    "train": lambda out, recipe, bundle: train(load_recipe(recipe), Path(), out, quiet),
    "evaluate": lambda out, recipe, bundle: evaluate(Evaluation(str(bundle), None, ("draft",), 1), out, quiet, Pool(1)),
}


@pytest.mark.parametrize("name", RUNS)
def test_runs_hold_their_folder(
    tmp_path: Path, environment: dict[str, str], tiny_recipe: Path, tiny_bundle: Path, name: str
) -> None:
    out = tmp_path / "run"
    holder = started(HOLD, environment, out)
    with pytest.raises(ConfigError, match=rf"is in use by process {holder.pid} on"):
        RUNS[name](out, tiny_recipe, tiny_bundle)
    assert [path.name for path in out.iterdir()] == [".lock"]
    holder.communicate("end\n")


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "/etc", "a/b", "a\\b", "a b", "a\n", "-x", ".x", "é", "x" * 65, "a\0b", 5, None],
)
def test_what_is_no_name(name: object) -> None:
    check_name("a bundle", "A.b_c+d-1" + 55 * "x")
    assert not is_name(name)
    with pytest.raises(ConfigError, match=r"a bundle cannot be named .* begins with a letter or digit"):
        check_name("a bundle", name)
