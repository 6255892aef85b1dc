"""Trees of candidate tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specact.types import value


@value
class Tree:
    """Candidates for the tokens after those that are decided; a path from the root is a candidate for several of them.

    Attributes:
        tokens: of the nodes, 0 to 255, int64 ``[N]``.
        parents: the node that each follows, which comes before it; -1 follows the decided tokens; int64 ``[N]``.
    """

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
