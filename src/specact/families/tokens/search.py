"""Nearest neighbour search over features: exact, or approximate in a graph (HNSW, Malkov and Yashunin 2018)."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specact.errors import MissingExtraError

Array = NDArray[np.float32]
Tokens = NDArray[np.int64]

# HNSW parameters M and ef_construction (both as in HeiSD), and ef of a query.
_GRAPH_DEGREE, _EF_CONSTRUCTION, _EF_SEARCH = 16, 100, 100


class Search(Protocol):
    """Nearest neighbour search by cosine."""

    def nearest(self, feature: Array, count: int) -> Tokens:
        """Indices of the ``count`` nearest features, in any order.

        Args:
            feature: of unit length, ``[F]``.
            count: at most the number of features.
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
    """Approximate search in an HNSW graph: compares with a few hundred features, and may miss some of the nearest.

    The graph is built on one thread from a fixed seed, so that results are reproducible.

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
        self._exact, self._recall_error = ExactSearch(features), voyager.RecallError
        self._graph: Any = voyager.Index(
            voyager.Space.InnerProduct,
            features.shape[1],
            M=_GRAPH_DEGREE,
            ef_construction=_EF_CONSTRUCTION,
            random_seed=1,
        )
        self._graph.add_items(features, num_threads=1)

    def nearest(self, feature: Array, count: int) -> Tokens:
        """See :class:`Search`; falls back to exact search if the graph finds too few."""
        try:
            found, _ = self._graph.query(feature, k=count, num_threads=1, query_ef=max(_EF_SEARCH, 2 * count))
        except self._recall_error:
            return self._exact.nearest(feature, count)
        return np.asarray(found, np.int64)
