"""Runs networks of unknown origin in a process of their own, under limits of memory and time, before they are loaded.

A hostile or broken file can ask for any amount of memory or never end, when it is loaded or when it runs. A network
that has passed is remembered in the user's cache folder, and in this process where that cannot be written.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from specact.errors import BundleError

# Memory that the process may allocate beyond what it has at its start: this, and so many times the size of the files;
# three times is what one file takes that holds its weights. And processor time per MiB of the files [s].
_MEMORY_MIB, _TIMES, _SECONDS = 512, 4, 0.125
# Sizes of what is free in a network's inputs, such as the batch; the last one is the largest batch of a server.
_FREE = (1, 16)
# Exit status of the process if it says what is wrong, and if it is memory.
_REFUSED, _TOO_LARGE = 3, 4
_passed: set[str] = set()


def vet(networks: Mapping[Path, str], seconds: int = 60) -> None:
    """Tries the unknown ones of some networks, see :func:`try_out`; BundleError if one is refused.

    Their digests, by ``.onnx`` file, are of the content, weights in other files included.
    """
    unknown = [file for file, digest in networks.items() if not _is_known(digest)]
    if unknown:
        try_out(unknown, seconds)
        remember(networks.values())


def try_out(files: Collection[Path], seconds: int = 60) -> list[dict[str, Any]]:
    """Loads networks and runs each of them in another process, within limits for all of them.

    Free sizes are 1 and then 16, values 0 and then 1. What it does for other values is not known afterwards.

    Returns:
        Of each the ``inputs`` and ``outputs`` with their shapes, the ``memory_mib`` that the process had at most so
        far (Linux), and the ``seconds`` that the network took.

    Raises:
        BundleError: if one is no readable ONNX model, fails, or exceeds a limit.
    """
    names, size_mib = list(map(str, files)), sum(map(_size, files)) >> 20
    memory_mib, seconds = _MEMORY_MIB + _TIMES * size_mib, seconds + int(_SECONDS * size_mib)
    # With the packages of this process. None is taken from the working folder, which may be that of the files.
    paths = sorted(filter(None, sys.path), key=lambda path: path == str(Path.cwd()))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    arguments = [str(memory_mib), str(seconds), *names]
    command = [sys.executable, "-P", "-c", "from specact.bundle.vetting import main; main()", *arguments]
    limits = f"within {memory_mib} MiB of memory and {seconds} s; export a smaller network"
    refusal = f"one of {', '.join(names)} cannot be loaded and run {limits}"
    try:
        # Processor time is limited by the process itself; this timeout ends one that sleeps.
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=10 * seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise BundleError(refusal) from None
    except OSError as error:
        raise BundleError(f"no process can be started to check {', '.join(names)}: {error}") from None
    if done.returncode:
        message = "".join(filter(str.isprintable, done.stdout))  # it may quote names from the file
        raise BundleError(message if done.returncode == _REFUSED else refusal)
    reports: list[dict[str, Any]] = json.loads(done.stdout)
    return reports


def remember(digests: Iterable[str]) -> None:
    """Marks networks as known, which passed or were written by this package itself; see :func:`vet`."""
    for digest in digests:
        _passed.add(digest)
        with suppress(OSError, RuntimeError):  # a folder that cannot be written, or no home
            _cache().mkdir(parents=True, exist_ok=True)
            (_cache() / digest).touch()


def _is_known(digest: str) -> bool:
    with suppress(OSError, RuntimeError):
        return digest in _passed or (_cache() / digest).is_file()
    return False


def _cache() -> Path:
    # Of those that passed these limits; earlier ones were wider.
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specact" / f"networks-{_MEMORY_MIB}"


def main() -> None:
    """Of the process: MiB, seconds, files; prints what the networks are, or what is wrong with the first that fails."""
    import resource

    from specact.bundle.network import LOAD_ERRORS

    memory, seconds = int(sys.argv[1]) << 20, int(sys.argv[2])
    with suppress(ValueError, OSError):  # macOS has no limit of memory
        memory += int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        # Not RLIMIT_AS, which counts what is only reserved, as by CUDA.
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    errors: tuple[type[Exception], ...] = (BundleError, *LOAD_ERRORS, TypeError, ValueError, MemoryError)
    reports = []
    for file in map(Path, sys.argv[3:]):
        try:
            reports.append(_run(file))
        except errors as error:
            if _lacks_memory(error):
                sys.exit(_TOO_LARGE)
            message = f"{file} cannot be run: {' '.join(str(error).split())[:300]}; export it again"
            sys.stdout.write(str(error) if isinstance(error, BundleError) else message)
            sys.exit(_REFUSED)
    sys.stdout.write(json.dumps(reports))


def _lacks_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "alloc" in str(error).lower()


def _size(file: Path) -> int:
    """Bytes of a network and its weights: files beside it that begin with its name, and those that networks share."""
    from specact.bundle.manifest import WEIGHTS

    parent, above = file.absolute().parents[:2]
    parts = [path for path in parent.iterdir() if path.name.startswith(file.stem)]
    return sum(path.stat().st_size for path in {*parts, parent / WEIGHTS, above / WEIGHTS} if path.is_file())


def _run(file: Path) -> dict[str, Any]:
    import numpy as np

    from specact.bundle.network import open_session

    began = time.process_time()
    session = open_session(file)
    types = {"float": np.float32, "double": np.float64}
    for value, free in enumerate(_FREE):
        values = {}
        for entry in session.get_inputs():
            name = entry.type.removeprefix("tensor(").removesuffix(")")
            shape = [size if isinstance(size, int) else free for size in entry.shape]
            values[entry.name] = np.full(shape, value, types.get(name, name))
        try:
            session.run(None, values)
        except Exception as error:
            if value == 0 or _lacks_memory(error):  # sizes other than 1 may be impossible for other reasons
                raise
    # Not what getrusage says, which the process has from the one that started it.
    status = Path("/proc/self/status")
    peak = re.search(r"VmHWM:\s*(\d+)", status.read_text() if status.exists() else "")
    return {
        "inputs": {entry.name: entry.shape for entry in session.get_inputs()},
        "outputs": {entry.name: entry.shape for entry in session.get_outputs()},
        "memory_mib": int(peak[1]) >> 10 if peak else None,
        "seconds": time.process_time() - began,
    }
