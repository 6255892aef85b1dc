"""HeiSD's verify-skip: no verification while the features resemble the last verified ones (arXiv 2603.17573).

The fitted bounds of :class:`VerifySkip` may never be reached; :class:`Similarity` skips as often as it is asked to.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specact.errors import ConfigError
from specact.families.tokens.drafting import DraftedTokens
from specact.families.tokens.network import Array
from specact.gates.gate import Gate
from specact.records import WholeNumber, check_arguments
from specact.types import Proposal, StepRecord

# Score if there is nothing to compare; above 2, the maximum of 1 - cos.
_NOT_SIMILAR = 3.0


class VerifySkip(Gate):
    """Skips a retrieved proposal if the features are similar to those of the last verified inference.

    Score: ``1 - cos(f_t, f_v)``; 3, above its range, if nothing was retrieved or the last verification was too long
    ago.

    Args:
        threshold: one minus the smallest similarity that is safe, see docs/tokens.md.
        reach: maximum number of inferences since the last verified one; None for no limit.

    Raises:
        ConfigError: for a reach below 0.
    """

    calibrated = False

    def __init__(self, threshold: float, *, reach: WholeNumber | None, **limits: Any) -> None:
        super().__init__(threshold, **limits)
        check_arguments(VerifySkip.__init__, {"reach": reach})
        self.reach = reach
        self._verified: Array | None = None
        self._since = 0

    @classmethod
    def for_pair(cls, pair: Any, threshold: float, **settings: Any) -> VerifySkip:
        skip = _remembering(pair).parts.drafters.settings.skip
        return cls(1.0 - skip.similarity, reach=skip.distance, **settings)

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        evidence: DraftedTokens = proposal.evidence
        self._since += 1
        too_long_ago = self.reach is not None and self._since > self.reach
        if not evidence.retrieved or evidence.feature is None or self._verified is None or too_long_ago:
            return _NOT_SIMILAR
        return 1.0 - float(evidence.feature @ self._verified)

    def on_verified(self, record: StepRecord) -> None:
        self._verified, self._since = record.proposal.evidence.feature, 0

    def reset(self) -> None:
        super().reset()
        self._verified, self._since = None, 0


class Similarity(VerifySkip):
    """HeiSD's verify-skip at a transmission rate: its threshold is calibrated instead of fitted for safety.

    Skips the retrieved proposals whose features are most similar to those of the last verified inference, however long
    ago that was. Arguments as for :class:`~specact.gates.gate.Gate`.
    """

    calibrated = True

    def __init__(self, threshold: float, **limits: Any) -> None:
        super().__init__(threshold, reach=None, **limits)

    @classmethod
    def for_pair(cls, pair: Any, threshold: float, **settings: Any) -> Similarity:
        _remembering(pair)
        return cls(threshold, **settings)


def _remembering(pair: Any) -> Any:
    """The pair, whose decoding must propose from a memory.

    Raises:
        ConfigError: if it is no token policy with drafters, or its decoding retrieves nothing.
    """
    if getattr(pair.parts, "drafters", None) is None:
        raise ConfigError(
            f"{pair.name} has no drafters beside it, and so no memory whose features could be compared; choose a token "
            "policy with drafters, such as relocate-tokens, or a gate that looks at actions alone, such as deviation"
        )
    if pair.parts.decoding.proposes != "retrieval":
        raise ConfigError(
            f"{pair.name} is decoded without its memory, so that there are no features to compare; choose a decoding "
            "that retrieves, such as heisd_no_switch, or a gate that looks at actions alone, such as deviation"
        )
    return pair
