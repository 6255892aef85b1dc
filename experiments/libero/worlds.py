"""LIBERO-Spatial without pictures, and with the instruction of another task: does a policy look, and does it read?"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from specact.lab.envs import load_task
from specact.lab.envs.libero import Libero, instruction
from specact.lab.envs.task import Task


class Blank(Libero):
    """All cameras are mid-grey; proprioception and instruction are as they are."""

    def look(self) -> dict[str, Any]:
        seen = super().look()
        return {k: np.full_like(value, 128) if k.startswith("image.") else value for k, value in seen.items()}


class Shuffled(Libero):
    """The instruction is that of the next task of the suite."""

    def look(self) -> dict[str, Any]:
        following = self._tasks[(self._tasks.index(self.task) + 1) % len(self._tasks)]
        return {**super().look(), "instruction": instruction(self.suite, following)}


class Exact(Libero):
    """Frames of all triangles and textures."""

    detail = 0.0


def _changed(world: type[Libero], name: str, suite: str = "spatial") -> Task:
    task = load_task(f"libero-{suite}@benchmark")
    return replace(task, name=f"{task.name}, {name}", make=partial(world, suite=f"libero_{suite}", own_states=True))


BLANK, BLANK_OBJECT = (_changed(Blank, "blank cameras", suite) for suite in ("spatial", "object"))
SHUFFLED, SHUFFLED_OBJECT = (_changed(Shuffled, "another task's instruction", suite) for suite in ("spatial", "object"))
EXACT = _changed(Exact, "frames without simplification")
