"""Tasks are found by name, and what is missing is said."""

import sys

import pytest

from specact.envs import TASKS, load_task
from specact.errors import ConfigError, MissingExtraError


@pytest.mark.parametrize("name", TASKS)
def test_every_name_leads_to_the_task_of_that_name(name: str) -> None:
    try:
        task = load_task(name)
    except MissingExtraError as error:
        pytest.skip(str(error))
    assert task.name == name
    assert task.rate_hz > 0 and task.max_steps > 0


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown environment 'push'; did you mean 'pusht'"):
        load_task("push")


def test_a_missing_simulator_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "specact.envs.pusht", raising=False)
    monkeypatch.setitem(sys.modules, "gym_pusht.envs.pusht", None)
    with pytest.raises(MissingExtraError, match=r"'gym_pusht'.*specact\[sim\]"):
        load_task("pusht")
