"""Helpers of the checks: expectations, calls of third-party code, and random windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import ContractError, SpecactError
from specact.observation import Field, ObservationSpec, Window


def expect(true: bool, sentence: str) -> None:
    """Raises a :class:`~specact.errors.ContractError` with this sentence unless ``true``."""
    if not true:
        raise ContractError(sentence)


def call(what: str, function: Callable[..., Any], *arguments: Any, values: int | None = None, **options: Any) -> Any:
    """Calls a third-party function; its exceptions become a :class:`~specact.errors.ContractError`.

    Args:
        what: description of the function, for the message.
        function: to call.
        arguments, options: of the call.
        values: length of the tuple that it must return, or None.
    """
    try:
        found = function(*arguments, **options)
    except SpecactError:
        raise
    # Third-party code can raise anything.
    except Exception as error:
        raise ContractError(f"{what} must work, it raised {type(error).__name__}: {error}") from error
    expect(
        values is None or (isinstance(found, tuple) and len(found) == values),
        f"{what} must give a tuple of {values} values, got {found!r:.100}",
    )
    return found


def outline(value: Any) -> str:
    """A short description of a value."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return f"a dict with {', '.join(map(str, value))}" if isinstance(value, dict) else f"{value!r:.60}"


def same(first: Sequence[Mapping[str, NDArray[Any]]], second: Sequence[Mapping[str, NDArray[Any]]]) -> bool:
    """Whether two sequences of named arrays are bit-identical."""
    return len(first) == len(second) and all(
        a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
        for a, b in zip(first, second, strict=True)
    )


def random_windows(spec: ObservationSpec, count: int, rng: np.random.Generator) -> list[Window]:
    """Windows of random numbers and frames."""

    def array(field: Field) -> NDArray[Any]:
        if field.is_image:
            return rng.integers(0, 256, field.window_shape, np.uint8)
        return rng.normal(size=field.window_shape).astype(np.float32)

    instruction = "pick up the block" if spec.instruction else None
    return [Window({name: array(field) for name, field in spec.fields.items()}, instruction) for _ in range(count)]
