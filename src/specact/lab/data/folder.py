"""The folder of a run: its exclusive lock, what was asked for, and its rows; a stopped run resumes from it."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shlex
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from specact import __version__
from specact.errors import ConfigError, DataError
from specact.files import check_folder, remove_torn, write_json, write_whole

Row = dict[str, Any]
_LOCK = ".lock"
_MAX_FAILURES = 100


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks the folder of a run, creates it if necessary, and removes temporary files of killed writers.

    The kernel releases the lock when the process ends. Worker processes of the run do not take it.

    Raises:
        ConfigError: if another process holds it, or the folder cannot be written.
    """
    check_folder(folder)
    existed = folder.is_dir()
    try:
        file = _acquire(folder)
    except OSError as error:
        raise ConfigError(f"cannot lock {folder}: {error.strerror}; choose another --out") from error
    with file:
        try:
            holder = {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "command": shlex.join(sys.argv),
                "since": datetime.now().astimezone().isoformat(timespec="seconds"),
            }
            with suppress(OSError):  # on a full disk the holder stays unnamed
                file.truncate(0)
                file.write(json.dumps(holder).encode())
            remove_torn(folder)
            yield
        finally:
            (folder / _LOCK).unlink(missing_ok=True)
            if not existed:
                with suppress(OSError):  # it is not empty
                    folder.rmdir()


def _acquire(folder: Path) -> FileIO:
    path, failures = folder / _LOCK, 0
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = path.open("a+b", buffering=0)
        except FileNotFoundError:
            # The last holder has just removed the empty folder; or no folder can be created here, as in /proc.
            failures += 1
            if failures == _MAX_FAILURES:
                raise
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except BlockingIOError:
            with file:
                raise ConfigError(
                    f"{folder} is in use by {_holder(file)}; wait until it ends, or choose another --out"
                ) from None
        except FileNotFoundError:
            pass
        except OSError:
            file.close()
            raise
        file.close()  # the last holder removed it between open and flock


def _holder(file: FileIO) -> str:
    file.seek(0)
    try:
        holder = json.loads(file.read())
        return f"process {holder['pid']} on {holder['host']} ({holder['command']}) since {holder['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"  # which has not written its name yet


@dataclass(frozen=True)
class RunFolder:
    """A folder that holds one run.

    Attributes:
        path: where.
        key: of the request in its manifest: what kind of run it is.
        file: the manifest's name.
    """

    path: Path
    key: str
    file: str = "manifest.json"

    def manifest(self) -> dict[str, Any]:
        """The stored manifest.

        Raises:
            ConfigError: if it cannot be read, or is of another kind of run.
        """
        file = self.path / self.file
        try:
            stored: dict[str, Any] = json.loads(file.read_text())
            stored[self.key]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{file} is damaged ({error}); choose another --out, or remove that folder") from None
        return stored

    def claim(
        self, request: Any, command: str = "", about: Callable[[], Mapping[str, Any]] = dict, free: Collection[str] = ()
    ) -> dict[str, Any]:
        """The manifest of this request, plain values: the stored one, or a new one, which also says ``about()``.

        Parts of the request that are ``free`` may have changed since.

        Raises:
            ConfigError: if the folder holds another run, or a damaged manifest.
        """
        wanted = json.loads(json.dumps(request))
        if (self.path / self.file).exists():
            stored = self.manifest()
            if _without(stored[self.key], free) != _without(wanted, free):
                raise ConfigError(f"{self.path} holds another run ({stored.get('command')}); choose another --out")
            return stored
        machine = {
            "processor": platform.processor() or platform.machine(), "python": platform.python_version(),
            "numpy": np.__version__, "onnxruntime": onnxruntime.__version__,
        }  # fmt: skip
        manifest = {"command": command, "specact": __version__, self.key: wanted, **about(), "machine": machine}
        write_json(self.path / self.file, manifest)
        return manifest


def _without(request: Any, names: Collection[str]) -> Any:
    return {name: value for name, value in request.items() if name not in names} if names else request


@dataclass(frozen=True)
class JsonLines:
    """Rows in a file, a line of JSON each; a kill may leave a torn last line, which is no row.

    Attributes:
        file: which need not exist.
    """

    file: Path

    def read(self) -> list[Row]:
        """The complete rows; null is NaN.

        Raises:
            DataError: if one of them is damaged.
        """
        if not self.file.exists():
            return []
        text = self.file.read_text()
        try:
            rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        except ValueError as error:
            raise DataError(f"{self.file} is damaged ({error}); remove the damaged lines, or the folder") from None
        return [{name: float("nan") if value is None else value for name, value in row.items()} for row in rows]

    @contextmanager
    def adding(self) -> Iterator[Callable[[Row], None]]:
        """Opens the file behind its last complete row; yields what adds a row, with null for NaN."""
        if self.file.exists() and not (text := self.file.read_text()).endswith("\n"):
            write_whole(self.file, text[: text.rfind("\n") + 1].encode())
        with self.file.open("a") as lines:

            def add(row: Row) -> None:
                known = {name: None if value != value else value for name, value in row.items()}
                lines.write(json.dumps(known, allow_nan=False) + "\n")
                lines.flush()

            yield add
