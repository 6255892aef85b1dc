"""Observations as named arrays: a policy's observation spec, and the observation history on the device."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from specact.errors import BundleError, ObservationError
from specact.records import Size, check_fields, read_record

__all__ = [
    "Field", "Observation", "ObservationHistory", "ObservationSpec", "Window", "lerobot_name", "read_observation",
    "read_spec", "vectors",
]  # fmt: skip

Observation = Mapping[str, Any] | NDArray[Any]
"""A mapping of arrays and optionally an instruction by name; or one array, which is taken as ``state``."""
DType = Literal["float32", "uint8"]
# The name of an observation given as one array.
STATE = "state"
# Limits of the message format: dimensions of one observation without its history, and fields of a spec.
MAX_DIMENSIONS, MAX_FIELDS = 3, 64
Shape = Annotated[tuple[Size, ...], Meta(min_length=1, max_length=MAX_DIMENSIONS)]
Names = Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(min_length=1, max_length=MAX_FIELDS)]


@dataclass(frozen=True, slots=True)
class Field:
    """One array of an observation: float32, or uint8 for camera frames ``[H, W, 3]``.

    With a history T a policy receives the newest T of them, oldest first, ``[T, *shape]``; with 0 only the newest,
    ``[*shape]``, for values that are constant within a window, such as a goal.

    Raises:
        BundleError: for an invalid shape, dtype or history.
    """

    shape: Shape
    dtype: DType = "float32"
    history: Annotated[int, Meta(ge=0, le=1 << 20)] = 1

    def __post_init__(self) -> None:
        check_fields(self, BundleError)
        if self.dtype == "uint8" and (len(self.shape) != 3 or self.shape[2] != 3):
            raise BundleError(f"camera frames have the shape [height, width, 3], got {self.shape!r:.60}")

    @property
    def is_image(self) -> bool:
        """Whether it holds camera frames."""
        return self.dtype == "uint8"

    @property
    def window_shape(self) -> tuple[int, ...]:
        """Shape of the policy's input array: ``[T, *shape]``, or ``[*shape]`` without a history."""
        return (self.history, *self.shape) if self.history else self.shape


@dataclass(frozen=True, slots=True)
class Window:
    """A policy's input: the newest observations by name, each ``[T, *shape]`` or ``[*shape]``, and the instruction.

    At an episode's start they are padded with the first one.
    """

    arrays: Mapping[str, NDArray[Any]]
    instruction: str | None = None

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.arrays[name]


@dataclass(frozen=True)
class ObservationSpec:
    """The observations that a policy needs, by names such as ``state`` or ``image.front``, and if it is instructed.

    Raises:
        BundleError: if there is no field, or a name is not a lower-case identifier with dots.
    """

    fields: Mapping[str, Field]
    instruction: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", MappingProxyType(dict(self.fields)))
        read_record(tuple(self.fields), Names, "the names of a spec's observations", BundleError)
        for name in self.fields:
            if not all(part.isidentifier() for part in name.split(".")):
                raise BundleError(
                    f"an observation's name must be an identifier, with dots in between where it has several parts, "
                    f"such as state or image.front; got {name!r:.60}"
                )

    def __getitem__(self, name: str) -> Field:
        return self.fields[name]

    def __hash__(self) -> int:
        return hash((frozenset(self.fields.items()), self.instruction))

    @property
    def history(self) -> int:
        """The longest history of any field, at least 1."""
        return max(1, *(field.history for field in self.fields.values()))

    @property
    def vectors(self) -> ObservationSpec | None:
        """The spec without camera frames, or None if all fields are camera frames."""
        fields = {name: field for name, field in self.fields.items() if not field.is_image}
        return ObservationSpec(fields) if fields else None

    @property
    def images(self) -> tuple[str, ...]:
        """Names of the fields that hold camera frames."""
        return tuple(name for name, field in self.fields.items() if field.is_image)

    @property
    def nbytes(self) -> int:
        """Size of one window, camera frames uncompressed [bytes]."""
        fields = self.fields.values()
        return sum(int(np.prod(field.window_shape)) * np.dtype(field.dtype).itemsize for field in fields)

    def union(self, other: ObservationSpec) -> ObservationSpec:
        """The spec that covers both: every field of either, with the longer history.

        Raises:
            BundleError: if a field of both differs in shape or dtype, or has a history in one of them only.
        """
        merged = dict(self.fields)
        for name, field in other.fields.items():
            mine = merged.setdefault(name, field)
            if (mine.shape, mine.dtype, mine.history > 0) != (field.shape, field.dtype, field.history > 0):
                raise BundleError(
                    f"the observation {name!r} is {mine} for one policy and {field} for the other; policies that see "
                    "different things must call them by different names"
                )
            if field.history > mine.history:
                merged[name] = field
        return ObservationSpec(merged, self.instruction or other.instruction)

    def select(self, window: Window) -> Window:
        """The part of a larger window that this spec describes."""
        # An array without a history is taken whole.
        arrays = {name: window.arrays[name][-field.history :] for name, field in self.fields.items()}
        return Window(arrays, window.instruction if self.instruction else None)

    def shortened(self, history: int) -> ObservationSpec:
        """The same spec with histories of at most ``history`` observations."""
        fields = {name: replace(field, history=min(field.history, history)) for name, field in self.fields.items()}
        return ObservationSpec(fields, self.instruction)

    def zeros(self) -> Window:
        """A window of zeros."""
        arrays = {name: np.zeros(field.window_shape, field.dtype) for name, field in self.fields.items()}
        return Window(arrays, "" if self.instruction else None)

    def stack(self, windows: Sequence[Window]) -> dict[str, NDArray[Any]]:
        """A network's input batch by name: the selected arrays of several windows, ``[B, ...]``; read-only."""
        if len(windows) == 1:  # needs no copy
            return {name: windows[0].arrays[name][None, -field.history :] for name, field in self.fields.items()}
        rows = [self.select(window).arrays for window in windows]
        return {name: np.stack([row[name] for row in rows]) for name in self.fields}

    def describe(self) -> dict[str, Any]:
        """As plain values, for a manifest or a message; :func:`read_spec` reads it."""
        fields = {name: asdict(field) | {"shape": list(field.shape)} for name, field in self.fields.items()}
        return {"fields": fields, "instruction": self.instruction}


def vectors(history: int, goal: int = 0, **widths: int) -> ObservationSpec:
    """A spec of float32 vectors with one history, and perhaps a ``goal`` without: ``vectors(5, goal=2, state=8)``."""
    fields = {name: Field((width,), "float32", history) for name, width in widths.items()}
    return ObservationSpec(fields | ({"goal": Field((goal,), "float32", 0)} if goal else {}))


def lerobot_name(key: str) -> str:
    """The name of LeRobot's key: ``observation.images.front`` is ``image.front``, ``observation.state`` ``state``."""
    name = re.sub(r"^images?\.", "image.", key.removeprefix("observation."))
    return ".".join(re.sub(r"\W", "_", part) for part in name.split("."))


def read_spec(value: Any) -> ObservationSpec:
    """A spec from the plain values of :meth:`ObservationSpec.describe`; BundleError if that is not what they are."""
    return read_record(value, ObservationSpec, "the observation spec", BundleError)


class ObservationHistory:
    """The last observations of an episode, padded with the first one until there are enough.

    Its ``length`` is the longest history of any array, at least 1; at 1 a window holds the newest observation only.
    """

    def __init__(self, spec: ObservationSpec) -> None:
        self._spec, self.length = spec, spec.history
        self._window: dict[str, NDArray[Any]] = {}

    def reset(self) -> None:
        """Forgets the episode."""
        self._window = {}

    def push(self, observation: Observation) -> Window:
        """Adds an observation and returns the window that ends with it.

        That is a mapping with every array of the spec, and ``instruction`` if it needs one; or one array, taken as
        ``state``. Other keys are ignored.

        Raises:
            ObservationError: if it is None, or something is missing, has another shape or type, or is not finite. The
                history is unchanged.
        """
        newest, instruction = read_observation(observation, self._spec)
        self._window = {
            name: _shift(self._window.get(name), value, self._spec.fields[name].history)
            for name, value in newest.items()
        }
        return Window(self._window, instruction)


@np.errstate(over="ignore")  # numbers beyond float32 become infinite and are refused
def read_observation(observation: Observation, spec: ObservationSpec) -> tuple[dict[str, NDArray[Any]], str | None]:
    """A checked copy of one observation: the spec's arrays by name, each ``[*shape]``, and the instruction.

    Errors are those of :meth:`ObservationHistory.push`.
    """
    if observation is None:
        raise ObservationError(
            "the observation is None; observe() must return the latest observation, even if nothing is new", "absent"
        )
    given = observation if isinstance(observation, Mapping) else {STATE: observation}
    newest = {name: _read_field(given, name, field) for name, field in spec.fields.items()}
    return newest, _instruction(given) if spec.instruction else None


def _read_field(given: Mapping[str, Any], name: str, field: Field) -> NDArray[Any]:
    if name not in given:
        raise ObservationError(
            f"the observation has no {name!r}; this policy needs {name} {list(field.shape)}, {field.dtype}", "missing"
        )
    image = field.is_image
    try:
        # A copy: environments may reuse their buffers.
        array = np.array(given[name]) if image else _as_float32(np.asarray(given[name]))
    except (TypeError, ValueError, OverflowError) as error:
        raise ObservationError(f"the observation's {name} is not an array of numbers: {error}", "type") from None
    other_type = image and array.dtype != np.uint8
    if other_type or array.shape != field.shape:
        raise ObservationError(
            f"the observation's {name} has shape {array.shape} and type {array.dtype}; it must be {field.dtype} "
            f"{field.shape}",
            "type" if other_type else "shape",
        )
    # For small arrays this takes a fifth of the time of all().
    if not image and np.count_nonzero(np.isfinite(array)) < array.size:
        bad = np.argwhere(~np.isfinite(array)).squeeze(-1).tolist() if array.ndim == 1 else "some places"
        raise ObservationError(
            f"the observation's {name} is NaN or infinite at {bad}; "
            "skip this observation or hold the robot; the policy's state is unchanged",
            "not_finite",
        )
    return array


def _as_float32(given: NDArray[Any]) -> NDArray[np.float32]:
    # NumPy would convert text and dates to numbers.
    text = given.dtype.kind == "O" and any(isinstance(entry, str | bytes) for entry in given.flat)
    if text or given.dtype.kind not in "fiubO":
        raise TypeError(f"it holds {'text' if text else given.dtype}")
    return given.astype(np.float32)


def _instruction(given: Mapping[str, Any]) -> str:
    text = given.get("instruction")
    if text is None:
        raise ObservationError("the observation has no 'instruction'; this policy needs one, a text", "missing")
    if not isinstance(text, str):
        raise ObservationError(f"the observation's 'instruction' must be a text, got {type(text)}", "type")
    return text


def _shift(kept: NDArray[Any] | None, newest: NDArray[Any], length: int) -> NDArray[Any]:
    if not length:
        return newest
    if length == 1:
        return newest[None]
    if kept is None:
        return np.repeat(newest[None], length, axis=0)
    return np.concatenate([kept[1:], newest[None]])
