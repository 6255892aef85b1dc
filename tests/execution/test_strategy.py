"""What cannot be executed is refused with a sentence."""

from typing import Any

import pytest
from tests.lab.rollout.tape import CHUNK, Prophet

from specact.errors import ConfigError
from specact.execution.strategy import Execution


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("syncronous", 4), r"unknown execution 'syncronous'; did you mean 'synchronous'"),
        (("synchronous", 4, 1), "overlaps 0 to 0 of them.*execute 4 and overlap 1"),
        (("naive", 4, 5), "overlaps 0 to 4 of them.*overlap 5"),
        (("naive", 4, -1), "overlaps 0 to 4 of them.*overlap -1"),
        (("naive", 0), "at least 1 action"),
    ],
)
def test_numbers_out_of_range(given: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Execution(*given)


def test_what_policy_or_world_lack() -> None:
    with pytest.raises(ConfigError, match=r"chunks have 8 actions.*got execute 9"):
        Execution("naive", CHUNK + 1, 1).check(Prophet(), rolls_forward=True)
    with pytest.raises(ConfigError, match="cannot inpaint; choose aligned"):
        Execution("inpainting", CHUNK, 1).check(Prophet(), rolls_forward=True)
    with pytest.raises(ConfigError, match="needs a model of the robot"):
        Execution("roll_forward", CHUNK, 1).check(Prophet(), rolls_forward=False)
    Execution("inpainting", CHUNK, CHUNK).check(Prophet(inpaints=True), rolls_forward=True)
    Execution("roll_forward", CHUNK, 1).check(Prophet(), rolls_forward=True)
