"""An exclusive lock on the folder of a run."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from io import FileIO
from pathlib import Path

from specact.errors import ConfigError
from specact.files import check_folder, remove_torn

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
            _write_holder(file)
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
        except BlockingIOError:
            with file:
                raise ConfigError(
                    f"{folder} is in use by {_holder(file)}; wait until it ends, or choose another --out"
                ) from None
        except OSError:
            file.close()
            raise
        if _is_current(file, path):
            return file
        file.close()  # the last holder removed it between open and flock


def _write_holder(file: FileIO) -> None:
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": shlex.join(sys.argv),
        "since": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    with suppress(OSError):  # on a full disk the holder stays unnamed
        file.truncate(0)
        file.write(json.dumps(holder).encode())


def _is_current(file: FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _holder(file: FileIO) -> str:
    file.seek(0)
    try:
        holder = json.loads(file.read())
        return f"process {holder['pid']} on {holder['host']} ({holder['command']}) since {holder['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"  # which has not written its name yet
