"""Which features are most like another: by comparing all, or in a graph (HNSW, Malkov and Yashunin 2018)."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specact.errors import MissingExtraError

Array = NDArray[np.float32]
Tokens = NDArray[np.int64]

# Of the graph: neighbours of a node, candidates while it is built (both as HeiSD has them), and while it is searched.
_NEIGHBOURS, _BUILDING, _SEARCHING = 16, 100, 100


class Search(Protocol):
    """Finds the features most like another."""

    def nearest(self, feature: Array, count: int) -> Tokens:
        """Numbers of ``count`` features, in any order.

        Args:
            feature: of length 1, ``[F]``.
            count: at most as many as there are.
        """
        ...


class ExactSearch:
    """Compares with every feature.

    Args:
        features: of length 1, ``[n, F]``.
    """

    def __init__(self, features: Array) -> None:
        self._features = features

    def nearest(self, feature: Array, count: int) -> Tokens:
        """See :class:`Search`."""
        found: Tokens = np.argpartition(-(self._features @ feature), count - 1)[:count]
        return found


class GraphSearch:
    """Follows a graph of neighbours: of n features it compares with a few hundred, and may miss some of the nearest.

    The graph is built on one thread, from a fixed seed, so that the same features give the same answers.

    Args:
        features: of length 1, ``[n, F]``.

    Raises:
        MissingExtraError: without the package voyager.
    """

    def __init__(self, features: Array) -> None:
        try:
            import voyager
        except ModuleNotFoundError as error:
            raise MissingExtraError("voyager", "retrieval") from error
        self._exact, self._unreached = ExactSearch(features), voyager.RecallError
        self._graph: Any = voyager.Index(
            voyager.Space.InnerProduct, features.shape[1], M=_NEIGHBOURS, ef_construction=_BUILDING, random_seed=1
        )
        self._graph.add_items(features, num_threads=1)

    def nearest(self, feature: Array, count: int) -> Tokens:
        """See :class:`Search`; exact where the graph leads to fewer."""
        try:
            found, _ = self._graph.query(feature, k=count, num_threads=1, query_ef=max(_SEARCHING, 2 * count))
        except self._unreached:
            return self._exact.nearest(feature, count)
        return np.asarray(found, np.int64)
