"""Demonstrations that others recorded, which do not come with the checkout."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from specact.lab.data.episodes import Episodes
from specact.lab.data.readers import read

DATA = Path(os.environ.get("SPECACT_DATA", Path(__file__).parents[4] / "shared" / "data"))


def recorded(name: str) -> tuple[Episodes, dict[str, NDArray[Any]]]:
    """The episodes of a file, and what else is in it; skips the test without it."""
    if not (DATA / name).exists():
        pytest.skip(f"no demonstrations at {DATA / name}; set SPECACT_DATA to the folder of recorded data")
    return read(DATA / name), dict(np.load(DATA / name)) if name.endswith(".npz") else {}
