"""What cannot be executed is refused."""

from typing import Any

import pytest
from tests.lab.rollout.tape import CHUNK, Prophet

from specact.errors import ConfigError
from specact.execution.schedule import Execution


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("syncronous", 4), "'synchronous'"),
        (("synchronous", 4, 1), "overlap"),
        (("naive", 4, 5), "overlap"),
        (("naive", 4, -1), "overlap"),
        (("naive", 0), "execute"),
    ],
)
def test_numbers_out_of_range(given: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Execution(*given)


@pytest.mark.parametrize(
    ("execution", "able", "named"),
    [
        (Execution("naive", CHUNK + 1, 1), True, "execute"),
        (Execution("inpainting", CHUNK, CHUNK), False, "inpaint"),
        (Execution("roll_forward", CHUNK, 1), False, "roll_forward"),
    ],
)
def test_what_policy_or_robot_lack(execution: Execution, able: bool, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        execution.check(Prophet().spec, inpaints=able, rolls_forward=able)
    if execution.execute <= CHUNK:
        execution.check(Prophet().spec, inpaints=True, rolls_forward=True)
