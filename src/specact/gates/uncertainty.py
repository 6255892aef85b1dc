"""Gates on the draft's own uncertainty; one forward pass, no target."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from specact.families.codes.sampling import sample, softmax
from specact.gates.gate import Gate
from specact.records import Count, Positive, check_arguments
from specact.types import Floats, Proposal

Kind = Literal["disagreement", "temperature", "entropy", "one_minus_q"]


class Uncertainty(Gate):
    """The draft's uncertainty about the codes it sampled.

    ``temperature`` (U-HLM): draw M temperatures uniformly in (0, T_max], sample codes from each tempered softmax, and
    take the share that differs from the drafted codes in any codebook. With several codebooks that share is 1 in many
    steps, and a gate can only choose among them at random. ``disagreement``: the same share in expectation, from the
    probabilities instead of samples: ``1 - mean_T prod_k q_k^(T)(z_k)`` over M evenly spaced temperatures; it is
    continuous and has no ties. ``entropy``: ``sum_k H(q_k)`` in nats. ``one_minus_q``: ``1 - prod_k q_k(z_k)``.

    Temperatures are applied to the draft's distribution after the bundle's own temperature: with one below 1, a T_max
    of 2 flattens less than it would a plain softmax.

    Args:
        threshold: see :class:`~specact.gates.gate.Gate`; ``tie_probability``, ``max_skips`` and ``force_first`` too.
        kind: which of the four.
        perturbations: M.
        max_temperature: T_max.

    Raises:
        ConfigError: for an unknown kind or a value outside its range.
    """

    family = "codes"

    def __init__(
        self,
        threshold: float,
        *,
        kind: Kind = "disagreement",
        perturbations: Count = 20,
        max_temperature: Positive = 2.0,
        **limits: Any,
    ) -> None:
        super().__init__(threshold, **limits)
        self.kind, self.perturbations, self.max_temperature = kind, perturbations, max_temperature
        given = {"kind": kind, "perturbations": perturbations, "max_temperature": max_temperature}
        check_arguments(Uncertainty.__init__, given)

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        rows = proposal.evidence.draft.rows_given(proposal.evidence.codes)
        if self.kind == "one_minus_q":
            return float(1.0 - np.prod(rows[np.arange(len(rows)), proposal.evidence.codes]))
        logs = np.log(np.maximum(rows, 1e-300))
        if self.kind == "entropy":
            return float(-(rows * logs).sum())
        if self.kind == "disagreement":
            middles = (np.arange(self.perturbations) + 0.5) / self.perturbations
            tempered = _tempered(logs, self.max_temperature * middles)
            kept = tempered[:, np.arange(len(rows)), proposal.evidence.codes].prod(axis=-1)
            return float(1.0 - kept.mean())
        tempered = _tempered(logs, self.max_temperature * (1.0 - rng.random(self.perturbations)))
        drawn = sample(tempered, rng.random((self.perturbations, len(rows))))
        return float((drawn != proposal.evidence.codes).any(axis=-1).mean())


def _tempered(logs: Floats, temperatures: Floats) -> Floats:
    """The distributions ``[M, G, K]`` at M temperatures, from logarithms ``[G, K]``."""
    return softmax(logs / temperatures[:, None, None])
