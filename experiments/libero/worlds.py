"""LIBERO without pictures, or with the instruction of another task; and its flow policy with fewer bits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from specact.families.chunks.flow import load_flow
from specact.lab.envs import load_task
from specact.lab.envs.libero import Libero, instruction
from specact.lab.envs.task import Task
from specact.lab.train.variants import Bits, BundleVariants
from specact.pair import Pair
from specact.systems.flow import load_flow_pair

POLICY = "libero-spatial-flow"


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


def quantised(bits: Bits) -> Pair[Any]:
    """The flow policy of Spatial with weights of so many bits and activations of eight."""
    with TemporaryDirectory() as folder:
        variants = BundleVariants(load_flow(POLICY), Path(folder))
        networks = variants.quantised(bits)
        variants.make()
        return load_flow_pair(load_flow(POLICY, variants=networks))


W8A8, W4A8 = partial(quantised, 8), partial(quantised, 4)
