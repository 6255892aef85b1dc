"""The mapping from a dataset's arrays to observations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError, DataError, unknown_name
from specact.lab.data.episodes import Episodes, Observed
from specact.lab.data.frames import Frames


@dataclass(frozen=True)
class Source:
    """The source of one observation, and its preprocessing.

    Attributes:
        key: the dataset's own name of the array, such as ``observation.images.front``.
        size: height and width that camera frames are resized to, or None.
        crop: top, left, height and width of the crop before resizing, or None.
        history: default history of policies; 0 for only the newest one, without a time axis; None for the recipe's
            ``window``, and 0 for a goal.

    Raises:
        ConfigError: for sizes that are not positive or a history below 0.
    """

    key: str
    size: tuple[int, int] | None = None
    crop: tuple[int, int, int, int] | None = None
    history: int | None = None

    def __post_init__(self) -> None:
        if self.size is not None and min(self.size) < 1:
            raise ConfigError(f"size is height and width, both at least 1, got {list(self.size)}")
        if self.crop is not None and (min(self.crop) < 0 or min(self.crop[2:]) < 1):
            raise ConfigError(f"crop is top, left, height and width in pixels, got {list(self.crop)}")
        if self.history is not None and self.history < 0:
            raise ConfigError(f"history must be at least 0, got {self.history}")


Sources = Mapping[str, Source]


@dataclass(frozen=True)
class Recording:
    """A file or folder of demonstrations, before its observations are read.

    Attributes:
        names: the dataset's own name of each known observation.
        keys: the dataset's own names of all loadable arrays.
        load: loads the array of a key; camera frames lazily.
        action, ends, rate_hz, instructions, disturbed: see :class:`~specact.lab.data.episodes.Episodes`.
    """

    names: Mapping[str, str]
    keys: tuple[str, ...]
    load: Callable[[str], Observed]
    action: NDArray[np.float32]
    ends: NDArray[np.int64]
    rate_hz: float | None
    instructions: tuple[str, ...] | None = None
    disturbed: NDArray[np.bool_] | None = None

    def episodes(self, sources: Sources) -> Episodes:
        """The requested observations; without a request, all known ones.

        Raises:
            DataError: if one is missing, or cannot be cropped as requested.
        """
        wanted = sources or {name: Source(key) for name, key in self.names.items()}
        if not wanted:
            raise DataError(
                "there is no 'state', 'obs', 'observation' or 'image'; found: "
                f"{', '.join(sorted(self.keys)) or 'nothing'}. Say in the recipe's table [observations] which "
                "array is which, or rename one"
            )
        seen = {name: self._observation(name, source) for name, source in wanted.items()}
        return Episodes(seen, self.action, self.ends, self.rate_hz, self.instructions, self.disturbed)

    def _observation(self, name: str, source: Source) -> Observed:
        key = source.key if source.key in self.keys else self.names.get(source.key)
        if key is None:
            unknown = unknown_name("key of this dataset", source.key, {*self.keys, *self.names})
            raise DataError(f"the observation {name!r}: {unknown}")
        array = self.load(key)
        if source.crop is None and source.size is None:
            return array
        if not isinstance(array, Frames):
            raise DataError(f"the observation {name!r} is not made of camera frames, so it has no size and no crop")
        return array.fitted(source.crop, source.size)


def read_sources(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Source]:
    """The sources of a recipe from plain values, as in a manifest."""

    def whole(value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    return {name: Source(**{key: whole(value) for key, value in table.items()}) for name, table in values.items()}
