"""Retrieval of chunks by the similarity of features, as in HeiSD (Zheng et al. 2026, arXiv 2603.17573).

HeiSD stores the features of both views of every demonstrated step in a vector database, one for each task, and searches
it by cosine similarity. Here it is one file, with exact search or a graph of the same kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from specact.errors import BundleError, ConfigError, ObservationError
from specact.families.tokens.bins import BINS
from specact.families.tokens.search import Array, ExactSearch, GraphSearch, Search, Tokens
from specact.files import write_whole
from specact.records import WholeNumber, check_fields


def unit(features: NDArray[np.floating]) -> Array:
    """Features of unit length, ``[..., F]``, whose dot products are cosines.

    Raises:
        ObservationError: for one that is 0 or not finite.
    """
    lengths = np.linalg.norm(features.astype(np.float64), axis=-1, keepdims=True)
    if not (np.isfinite(lengths) & (lengths > 0.0)).all():
        raise ObservationError("a feature is 0 or not finite, so that nothing is like it", "not_finite")
    scaled: Array = (features / lengths).astype(np.float32)
    return scaled


@dataclass(frozen=True)
class Entries:
    """The memory: features and chunks of n steps.

    Attributes:
        features: of unit length, ``[n, F]``.
        tokens: the target's or the demonstrated chunk, ``[n, T]``, each 0 to 255.
        episodes, steps: of origin, ``[n]``.

    Raises:
        ConfigError: if it is empty or inconsistent.
    """

    features: Array
    tokens: Tokens
    episodes: Tokens
    steps: Tokens

    def __post_init__(self) -> None:
        shapes = {name: part.shape for name, part in vars(self).items()}
        count, apart = len(self.features), np.linalg.norm(self.features, axis=-1) - 1.0
        if not count or [len(shape) for shape in shapes.values()] != [2, 2, 1, 1] or not all(self.tokens.shape):
            raise ConfigError(f"entries need features [n, F], tokens [n, T], episodes [n] and steps [n], got {shapes}")
        if any(shape[0] != count for shape in shapes.values()):
            raise ConfigError(f"entries need as many of each, got {shapes}")
        if not (np.abs(apart) < 1e-3).all() or self.tokens.min() < 0 or self.tokens.max() >= BINS:
            raise ConfigError(f"entries need features of length 1, see unit(), and tokens of 0 to {BINS - 1}")

    def save(self, path: Path) -> None:
        """Writes a safetensors file.

        Raises:
            ConfigError: if it cannot be written.
        """
        kinds = {"features": np.float16, "tokens": np.uint8, "episodes": np.int64, "steps": np.int64}
        write_whole(path, save({name: np.ascontiguousarray(vars(self)[name], kind) for name, kind in kinds.items()}))


def load_entries(path: Path) -> Entries:
    """Reads a file of :meth:`Entries.save`.

    Raises:
        BundleError: if the file is missing, damaged or of another kind.
    """
    try:
        parts = load_file(path)
        kinds = {name: part.dtype for name, part in parts.items()}
        if kinds != {"features": np.float16, "tokens": np.uint8, "episodes": np.int64, "steps": np.int64}:
            raise ConfigError(f"it holds {sorted(parts)}")
        features = parts.pop("features").astype(np.float32)
        return Entries(features, **{**parts, "tokens": parts["tokens"].astype(np.int64)})
    except (SafetensorError, OSError, TypeError, KeyError, ConfigError) as error:  # two for dtypes that NumPy lacks
        raise BundleError(f"{path} holds no entries to retrieve ({error}); export it again") from None


@dataclass(frozen=True)
class Retrieved:
    """The K most similar entries, best first.

    Attributes:
        tokens: their chunks, ``[K, T]``.
        similarities: cosines, ``[K]``.
        episodes, steps: of origin, ``[K]``.
    """

    tokens: Tokens
    similarities: Array
    episodes: Tokens
    steps: Tokens


class Index:
    """A search index of entries.

    Args:
        entries: the memory.
        graph: whether to use graph search, which is faster for many entries.

    Attributes:
        entries: as given.

    Raises:
        MissingExtraError: for a graph without the package voyager.
    """

    def __init__(self, entries: Entries, *, graph: bool = False) -> None:
        self.entries = entries
        self._search: Search = (GraphSearch if graph else ExactSearch)(entries.features)

    def nearest(self, feature: NDArray[np.floating], count: int = 1) -> Retrieved:
        """The ``count`` entries nearest to a feature, or all if there are fewer.

        Args:
            feature: ``[F]``, of any norm but 0.
            count: K, at least 1.

        Raises:
            ObservationError: for a feature that is 0 or not finite.
        """
        entries, feature = self.entries, unit(feature)
        found = np.sort(self._search.nearest(feature, min(count, len(entries.features))))
        similarities = entries.features[found] @ feature
        order = np.argsort(-similarities, kind="stable")
        found = found[order]
        return Retrieved(entries.tokens[found], similarities[order], entries.episodes[found], entries.steps[found])


@dataclass(frozen=True)
class SkipRule:
    """Condition for executing a retrieved chunk without verification: soon after a verified step with similar features.

    Attributes:
        similarity: smallest cosine of the feature and that of the last verified step.
        distance: largest number of steps since then; 0 for never.
    """

    similarity: Annotated[float, Meta(ge=-1, le=1)] = 1.0
    distance: WholeNumber = 0

    def __post_init__(self) -> None:
        check_fields(self)
