"""A bundle is checked against the task that it is to act in, before anything runs."""

from __future__ import annotations

from specact.errors import ConfigError
from specact.families.load import AnyPair
from specact.lab.data.fit import shapes_in_words
from specact.lab.envs.task import Task


def check_fit(bundle: AnyPair, task: Task) -> None:
    """Checks that a pair's observations and actions are the task's; a pair may do without some of the task's.

    Raises:
        ConfigError: if a shape differs.
    """
    wanted, seen = task.shapes(), bundle.observation.fields
    found = {"action": bundle.units.centre.shape, **{name: field.shape for name, field in seen.items()}}
    if any(wanted.get(name) != shape for name, shape in found.items()):
        raise ConfigError(
            f"the bundle {bundle.name!r} has {shapes_in_words(found)}, but the task {task.name!r} has "
            f"{shapes_in_words(wanted)}; the bundle was made for the task {bundle.env!r}"
        )
