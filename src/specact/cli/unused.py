"""Refusal of options that would have no effect, so that none is silently ignored."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from specact.errors import ConfigError


def refuse_unused(given: Mapping[str, bool], why: str) -> None:
    """Refuses the first option that was given although it has no effect.

    Args:
        given: whether each option was given, by its name.
        why: the rest of the sentence that begins with the option: what it is for, and what to do instead.

    Raises:
        ConfigError: if one was given.
    """
    for name, is_given in given.items():
        if is_given:
            raise ConfigError(f"--{name.replace('_', '-')} {why}")


def changed(options: object, names: Iterable[str] | None = None) -> dict[str, bool]:
    """Whether fields of a dataclass instance differ from their defaults, by name.

    An option that was given with its default value counts as not given.

    Args:
        options: the instance.
        names: of the fields; all if not given.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(options)}  # type: ignore[arg-type]
    return {name: getattr(options, name) != defaults[name] for name in (defaults if names is None else names)}
