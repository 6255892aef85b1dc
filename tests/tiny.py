"""What tests of several folders train, follow and stop: as small as it gets."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from specact.bundle.bundle import find_bundle
from specact.errors import ConfigError
from specact.lab.data.episodes import Episodes

# Policies this small learn next to nothing; what is tested is that every part fits and every number is the right one.
TINY = """
env = "ball"
generate_episodes = 40
generate_noise = 0.5
window = 2
chunk = 2
execute = 1
seed = 3

[tokenizer]
codes = 8
latent = 16
hidden = 32
steps = 400
batch = 128

[policies.target]
layers = 2
heads = 2
width = 16
head_width = 32
dropout = 0.1
steps = 300
batch = 32
warmup = 5
average = 0.9
bfloat16 = false

[policies.draft]
like = "target"
layers = 1
width = 8
head_width = 0
steps = 60

[bundles]
tiny = ["target", "draft"]
"""

TINY_FLOW = """
kind = "flow"
bundle = "tiny-flow"
env = "ball"
generate_episodes = 20
generate_noise = 0.5
window = 2
chunk = 6
layers = 2
heads = 2
width = 16
steps = 100
batch = 32
warmup = 5
average = 0.9
bfloat16 = false
seed = 3
"""

renders = pytest.mark.skipif(
    os.environ.get("MUJOCO_GL") not in ("egl", "osmesa"), reason="needs a renderer: set MUJOCO_GL to egl or osmesa"
)


def needs_bundle(name: str) -> None:
    """Skips a test where a bundle that only studies need is not in the checkout."""
    try:
        find_bundle(name)
    except ConfigError as error:
        pytest.skip(str(error))


class KilledError(Exception):
    """Stands for a kill at a known moment."""


def quiet(*told: object) -> None:
    """Progress that nobody follows."""


def kill_at(stage: str, done: int) -> Callable[[str, int, int], None]:
    """Progress that ends the work when this stage has got so far."""

    def progress(name: str, count: int, total: int) -> None:
        if name == stage and count >= done:
            raise KilledError

    return progress


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """A folder that several processes of one test run share; the first that needs it fills it."""
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            (folder / "done").touch()
    return folder


def write_npz(path: Path, episodes: Episodes) -> None:
    """Demonstrations without instructions as a file of flat arrays."""
    seen = {name: np.asarray(array) for name, array in episodes.observation.items()}
    rate = {} if episodes.rate_hz is None else {"rate_hz": np.float32(episodes.rate_hz)}
    np.savez_compressed(path, action=episodes.action, episode_ends=episodes.ends, **seen, **rate)  # type: ignore[arg-type]
