"""How chunks are played: what cannot be executed is refused, and the soft mask of real-time chunking."""

import math
from typing import Any

import numpy as np
import pytest
from tests.lab.rollout.tape import CHUNK, Prophet

from specact.errors import ConfigError
from specact.execution.schedule import Execution, inpainting_of, soft_mask


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("synchronous", 4, 1), "overlap"),
        (("append", 4, 5), "overlap"),
    ],
)
def test_numbers_out_of_range(given: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Execution(*given)


@pytest.mark.parametrize(
    ("execution", "able", "named"),
    [
        (Execution("append", CHUNK + 1, 1), True, "execute"),
        (Execution("rtc", CHUNK, CHUNK), False, "inpaint"),
        (Execution("roll_forward", CHUNK, 1), False, "roll_forward"),
    ],
)
def test_what_policy_or_robot_lack(execution: Execution, able: bool, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        execution.check(Prophet().spec, inpaints=able, rolls_forward=able)
    if execution.execute <= CHUNK:
        execution.check(Prophet().spec, inpaints=True, rolls_forward=True)


def test_the_mask_is_the_papers() -> None:
    """d = 2, H - s = 5 of H = 8, by hand: c = 3/4, 2/4, 1/4."""
    fading = [c * (math.exp(c) - 1) / (math.e - 1) for c in (0.75, 0.5, 0.25)]
    np.testing.assert_allclose(soft_mask(2, 5, 8), [1, 1, *fading, 0, 0, 0], rtol=1e-6)


@pytest.mark.parametrize(("certain", "foreseen"), [(0, 0), (0, 8), (3, 3), (8, 8), (1, 6)])
def test_it_falls_from_certain_to_nothing(certain: int, foreseen: int) -> None:
    mask = soft_mask(certain, foreseen, 8)
    assert mask.dtype == np.float32 and mask.shape == (8,)
    assert (mask[:certain] == 1).all() and (mask[foreseen:] == 0).all()
    between = mask[certain:foreseen]
    assert ((between > 0) & (between < 1)).all() and (np.diff(between) < 0).all()


def test_the_old_actions_come_first() -> None:
    rest = np.arange(6, dtype=np.float32).reshape(3, 2)
    told = inpainting_of(rest, 1, 5)
    assert np.array_equal(told.actions[:3], rest) and told.actions.shape == (5, 2)
    assert np.array_equal(told.weights, soft_mask(1, 3, 5))
