"""The mapping from a dataset's arrays to observations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specact.errors import DataError, unknown_name
from specact.lab.data.episodes import Episodes, Observed
from specact.lab.data.frames import Frames
from specact.records import Count, Record, WholeNumber


class Source(Record, frozen=True):
    """The source of one observation, and its preprocessing.

    Attributes:
        key: the dataset's own name of the array, such as ``observation.images.front``.
        size: height and width that camera frames are resized to, or None.
        crop: top, left, height and width of the crop before resizing, or None.
        history: default history of policies; 0 for only the newest one, without a time axis; None for the recipe's
            ``window``, and 0 for a goal.
    """

    key: str
    size: tuple[Count, Count] | None = None
    crop: tuple[WholeNumber, WholeNumber, Count, Count] | None = None
    history: WholeNumber | None = None


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
