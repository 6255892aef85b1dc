"""Acceptance rules for drafted tokens: strict equality, relaxed (Spec-VLA), or by groups (HeiSD).

Only the strict rule is lossless. Under the others an accepted token keeps the *drafted* value, which differs from the
target's by up to the tolerance; actions lie in [-1, 1] and a bin is 2/255 wide.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError
from specact.types import value

Bias = NDArray[np.int64]

# Larger than any sum of biases in a group.
UNLIMITED = 2**15 - 1


@value
class Acceptance:
    """A group of tokens is accepted if each bias is within its tolerance, and their sum within the group's.

    Attributes:
        each: largest absolute bias of each of the chunk's T tokens [bins], 0 to 255, int64 ``[T]``.
        groups: group of each token, int64 ``[T]``: 0, 1, ... without gaps. A group is accepted as a whole.
        total: largest sum of the absolute biases of one group [bins].
    """

    each: Bias
    groups: Bias
    total: int = UNLIMITED

    def accepted(self, bias: Bias, start: int) -> int:
        """Number of accepted tokens of one path: whole groups, up to the first that is rejected.

        An incomplete last group is judged by the tokens in the path.

        Args:
            bias: drafted token minus the target's most likely one, each given the path before it, ``[n]``.
            start: position of the first of them in the chunk.
        """
        size = np.abs(bias)
        near = size <= self.each[start : start + len(bias)]
        groups = self.groups[start : start + len(bias)]
        near &= np.bincount(groups, size)[groups] <= self.total
        refused = np.flatnonzero(~near)
        return int(np.searchsorted(groups, groups[refused[0]])) if refused.size else len(bias)


def relaxed(bins: int, length: int, actions: int, strict: Collection[int]) -> Acceptance:
    """Spec-VLA's rule (Wang et al. 2025, arXiv 2507.22424): each token within ``bins`` bins; 0 is strict.

    Args:
        bins: r, 0 to 255.
        length: T, tokens of a chunk.
        actions: A, dimensions of an action.
        strict: dimensions that must be equal, such as a gripper; the paper has none.

    Raises:
        ConfigError: for a tolerance or a dimension out of range.
    """
    each = np.full(length, _check_bins(bins, 255, "a tolerance"))
    each[_strict_mask(length, actions, strict)] = 0
    return Acceptance(each, np.arange(length))


def grouped(
    total: int, each: int, length: int, actions: int, groups: Sequence[int], strict: Collection[int]
) -> Acceptance:
    """HeiSD's rule (arXiv 2603.17573): each token of a group within ``each`` bins, their sum within ``total``.

    Args:
        total, each: 30 and 15 in the paper.
        length, actions: as for :func:`relaxed`.
        groups: group of each of the action's A dimensions, 0, 1, ... in ascending order, such as position, rotation,
            gripper.
        strict: dimensions that must be equal; their groups must contain no others.

    Raises:
        ConfigError: for groups that are not ascending without gaps, or that mix strict dimensions and others.
    """
    steps = np.diff(groups, prepend=0)
    kinds = [{group for dimension, group in enumerate(groups) if (dimension in strict) == own} for own in (True, False)]
    if len(groups) != actions or groups[0] != 0 or not np.isin(steps, (0, 1)).all() or kinds[0] & kinds[1]:
        raise ConfigError(
            f"groups must number the {actions} dimensions of an action from 0 on without gaps, and those of a gripper "
            f"must be their own; got {list(groups)} with a gripper at {sorted(strict)}"
        )
    found = relaxed(each, length, actions, strict)
    whole = (np.arange(length) // actions) * (groups[-1] + 1) + np.resize(groups, length)
    return Acceptance(found.each, whole, _check_bins(total, UNLIMITED, "a group's tolerance"))


def _strict_mask(length: int, actions: int, strict: Collection[int]) -> NDArray[np.bool_]:
    if not set(strict) <= set(range(actions)):
        raise ConfigError(f"strict dimensions must lie between 0 and {actions - 1}, got {sorted(strict)}")
    return np.isin(np.arange(length) % actions, sorted(strict))


def _check_bins(bins: int, most: int, what: str) -> int:
    if not 0 <= bins <= most:
        raise ConfigError(f"{what} must lie between 0 and {most} bins, got {bins}")
    return bins
