"""Work for the processes of a cluster, which import it by this name."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from tests.children import wait_for

if TYPE_CHECKING:
    from specact.lab.rollout.pool import Result
    from specact.lab.rollout.rollout import Shard


def shard_on_node(item: tuple[Shard, Path]) -> Result:
    """Writes down where it began, and in which process; runs the shard when it may."""
    from specact.lab.rollout.rollout import run_shard

    shard, folder = item
    began = folder / f"{shard.episodes[0]}-{ray.get_runtime_context().get_node_id()}"
    # Whole as soon as it has its name.
    (folder / f"{os.getpid()}.pid").write_text(str(os.getpid()))
    (folder / f"{os.getpid()}.pid").rename(began)
    wait_for((folder / "go").exists, "somebody says go")
    return run_shard(shard)


def end_once(item: tuple[str, Path]) -> str:
    """Ends its process the first time, or always."""
    name, folder = item
    marker = folder / name
    if name == "always" or not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return name


def wait_for_ever(folder: Path) -> None:
    """Writes down its process, and does not finish."""
    (folder / "began").write_text(str(os.getpid()))
    (folder / "began").rename(folder / "process")
    time.sleep(1e6)


def finish_after(item: tuple[float, Path]) -> None:
    """Writes down that it began, and that it finished."""
    seconds, marker = item
    marker.with_suffix(".began").touch()
    time.sleep(seconds)
    marker.touch()


def square_root(value: float) -> float:
    """Raises an error that is not specact's."""
    import math

    return math.sqrt(value)
