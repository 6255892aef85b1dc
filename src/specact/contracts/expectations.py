"""Helpers of the checks: expectations, calls of third-party code, comparisons, and random windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from specact.errors import ContractError, SpecactError
from specact.observation import Field, ObservationSpec, Window

Named = Mapping[str, NDArray[Any]]


def expect(true: bool, sentence: str) -> None:
    """Raises a :class:`~specact.errors.ContractError` with this sentence unless ``true``."""
    if not true:
        raise ContractError(sentence)


def expect_array(what: str, value: Any, dtype: DTypeLike, shape: Sequence[int | None]) -> None:
    """Expects a finite array; a length of None may be any."""
    sizes = [size if wanted is None else wanted for size, wanted in zip(np.shape(value), shape, strict=False)]
    expect(
        isinstance(value, np.ndarray)
        and value.dtype == dtype
        and list(value.shape) == sizes
        and len(sizes) == len(shape),
        f"{what} must be {np.dtype(dtype)} {['any' if n is None else n for n in shape]}, got {outline(value)}",
    )
    expect(bool(np.isfinite(value).all()), f"{what} must be finite, got {value}")


def call(what: str, function: Callable[..., Any], *arguments: Any, values: int | None = None, **options: Any) -> Any:
    """Calls a third-party function; its exceptions become a :class:`~specact.errors.ContractError`.

    Args:
        what: description of the function, for the message.
        function: to call.
        arguments, options: of the call.
        values: length of the tuple that it must return, or None.
    """
    try:
        result = function(*arguments, **options)
    except SpecactError:
        raise
    # Third-party code can raise anything.
    except Exception as error:
        raise ContractError(f"{what} must work, it raised {type(error).__name__}: {error}") from error
    expect(
        values is None or (isinstance(result, tuple) and len(result) == values),
        f"{what} must give a tuple of {values} values, got {result!r:.100}",
    )
    return result


def outline(value: Any) -> str:
    """A short description of a value."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return f"a dict with {', '.join(map(str, value))}" if isinstance(value, dict) else f"{value!r:.60}"


def same(first: Sequence[Named], second: Sequence[Named], within: float = 0.0) -> bool:
    """Whether two sequences of named arrays agree, within a share of the largest number of each array."""

    def near(a: NDArray[Any], b: NDArray[Any]) -> bool:
        if not within or a.shape != b.shape:
            return np.array_equal(a, b)
        slack = within * max(1e-6, float(np.abs(b).max(initial=0.0)))
        return bool((np.abs(a.astype(np.float64) - b.astype(np.float64)) <= slack).all())

    return len(first) == len(second) and all(
        a.keys() == b.keys() and all(near(a[name], b[name]) for name in a) for a, b in zip(first, second, strict=True)
    )


def check_batches(what: str, answer: Callable[[Sequence[int]], list[Named]], count: int, within: float) -> list[Named]:
    """Checks that an answer depends on its own input alone; returns each input's, asked alone.

    Args:
        what: the answer, for messages.
        answer: the answers for inputs of these numbers, in their order.
        count: how many inputs there are.
        within: see :func:`same`.
    """
    everything = list(range(count))
    together = answer(everything)
    again = "the same inputs and generators must give it again: draw from the given stream alone, and keep nothing"
    expect(same(answer(everything), together, within), f"{what} must not depend on earlier calls; {again}")
    alone = [answer([index])[0] for index in everything]
    expect(same(alone, together, within), f"{what} must not depend on the rest of its batch")
    expect(same(answer(everything[::-1])[::-1], together, within), f"{what} must not depend on its place in the batch")
    return alone


def random_windows(spec: ObservationSpec, count: int, rng: np.random.Generator) -> list[Window]:
    """Windows of random numbers and frames."""

    def array(field: Field) -> NDArray[Any]:
        if field.is_image:
            return rng.integers(0, 256, field.window_shape, np.uint8)
        return rng.normal(size=field.window_shape).astype(np.float32)

    instruction = "pick up the block" if spec.instruction else None
    return [Window({name: array(field) for name, field in spec.fields.items()}, instruction) for _ in range(count)]
