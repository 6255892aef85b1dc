"""Servers of a target in stages that do not answer what they were asked."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specact.systems.staged import SplitExchange, load_staged
from specact.wire.arrays import Arrays
from specact.wire.exchange import Request


class Lying(SplitExchange):
    """Says that it is the right server, and answers as ``LIE`` says."""

    def __init__(self) -> None:
        super().__init__(load_staged(Path(os.environ["STAGES"])))

    def answer(self, kind: str, requests: Sequence[Request]) -> list[Arrays]:  # type: ignore[override]
        size = math.prod(self._folder.spec.activations[0])
        lies: dict[str, Arrays] = {
            "size": {"activation": np.zeros(size - 1, np.float32)},
            "precision": {"activation": np.zeros(size, np.float16)},
            "finite": {"activation": np.full(size, np.nan, np.float32)},
            "outputs": {name: np.zeros(shape, np.float32) for name, shape in self._folder.spec.outputs.items()},
            "nothing": {},
        }
        return [lies[os.environ["LIE"]] for _ in requests]


def exchange() -> Lying:
    return Lying()
