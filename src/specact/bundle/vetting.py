"""Loads networks of unknown origin once in a process of their own, under limits of memory and time.

A hostile or broken file can ask for any amount of memory or never end, when it is loaded or when it runs. A network
that has passed is remembered in the user's cache folder, and in this process where that cannot be written.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from specact.errors import BundleError

# Exit status of the process if it says what is wrong.
_REFUSED = 3
_passed: set[str] = set()


# Address space of the process that loads, besides 16 times the size of its files.
_MEMORY_MIB = 6144


def vet(networks: Mapping[Path, str], seconds: int = 60) -> None:
    """Loads unknown networks and runs each of them once, on zeros, in at most that much processor time [s].

    Their digests, by ``.onnx`` file, are of the content, weights in other files included.

    Raises:
        BundleError: if one is no readable ONNX model, fails, or exceeds a limit.
    """
    unknown = [file for file, digest in networks.items() if not _is_known(digest)]
    if not unknown:
        return
    memory_mib = _MEMORY_MIB + 16 * sum(file.stat().st_size for file in unknown) // (1 << 20)
    arguments = [str(memory_mib), str(seconds), *map(str, unknown)]
    command = [sys.executable, "-c", "from specact.bundle.vetting import main; main()", *arguments]
    # With the same packages as this process.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    limit = f"within {memory_mib} MiB of memory and {seconds} s; export a smaller network"
    refusal = f"one of {', '.join(arguments[2:])} cannot be loaded and run {limit}"
    try:
        # Processor time is limited by the process itself; this timeout ends one that sleeps.
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=10 * seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise BundleError(refusal) from None
    except OSError as error:
        raise BundleError(f"no process can be started to check {', '.join(arguments[2:])}: {error}") from None
    if done.returncode:
        raise BundleError(done.stdout.strip() if done.returncode == _REFUSED else refusal)
    remember(networks.values())


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
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specact" / "networks"


def main() -> None:
    """Of the process: limits in MiB and seconds, then the files; prints what is wrong with the first that fails."""
    import resource

    import numpy as np

    from specact.bundle.network import LOAD_ERRORS, open_session

    memory, seconds = int(sys.argv[1]) << 20, int(sys.argv[2])
    with suppress(ValueError, OSError):  # macOS has no limit of memory
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    types = {"float": np.float32, "double": np.float64}
    errors: tuple[type[Exception], ...] = (BundleError, *LOAD_ERRORS, TypeError, ValueError, MemoryError)
    for file in sys.argv[3:]:
        try:
            session = open_session(Path(file))
            zeros = {}
            for entry in session.get_inputs():
                name = entry.type.removeprefix("tensor(").removesuffix(")")
                # A size that is free is 1.
                shape = [size if isinstance(size, int) else 1 for size in entry.shape]
                zeros[entry.name] = np.zeros(shape, types.get(name, name))
            session.run(None, zeros)
        except errors as error:
            told = f"{file} cannot be run: {' '.join(str(error).split())[:300]}; export it again"
            sys.stdout.write(str(error) if isinstance(error, BundleError) else told)
            sys.exit(_REFUSED)
