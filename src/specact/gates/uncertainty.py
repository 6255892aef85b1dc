"""Gates on the draft's own doubt; one forward pass, no target."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import numpy as np

from specact.errors import ConfigError, unknown_name
from specact.gates.gate import Gate
from specact.sampling import sample
from specact.types import Proposal

Kind = Literal["temperature", "entropy", "one_minus_q"]


class Uncertainty(Gate):
    """How unsure the draft is of the codes it drew.

    ``temperature`` (U-HLM): draw M temperatures uniformly in (0, T_max], sample codes from each tempered softmax, and
    take the share that differs from the drafted codes. ``entropy``: ``sum_k H(q_k)`` in nats. ``one_minus_q``:
    ``1 - prod_k q_k(z_k)``.

    Args:
        threshold: see :class:`~specact.gates.gate.Gate`; ``tie_probability``, ``max_skips`` and ``force_first`` too.
        kind: which of the three.
        perturbations: M.
        max_temperature: T_max.

    Raises:
        ConfigError: for an unknown kind or a value outside its range.
    """

    def __init__(
        self,
        threshold: float,
        *,
        kind: Kind = "temperature",
        perturbations: int = 20,
        max_temperature: float = 2.0,
        **limits: Any,
    ) -> None:
        super().__init__(threshold, **limits)
        if kind not in get_args(Kind):
            raise unknown_name("kind of uncertainty", kind, get_args(Kind))
        if perturbations < 1 or not 0.0 < max_temperature < math.inf:
            raise ConfigError(
                f"perturbations must be at least 1 and max_temperature above 0, got {perturbations}, {max_temperature}"
            )
        self.kind, self.perturbations, self.max_temperature = kind, perturbations, max_temperature

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        """In [0, 1], but for ``entropy``: 0 to G log K."""
        rows = proposal.draft.probs
        if proposal.draft.conditional is not None:
            rows = np.stack([rows[0], proposal.draft.conditional[proposal.codes[0]]])
        if self.kind == "one_minus_q":
            return float(1.0 - np.prod(rows[np.arange(len(rows)), proposal.codes]))
        logs = np.log(np.maximum(rows, 1e-300))
        if self.kind == "entropy":
            return float(-(rows * logs).sum())
        temperatures = self.max_temperature * (1.0 - rng.random(self.perturbations))
        scaled = logs / temperatures[:, None, None]
        tempered = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
        drawn = sample(tempered, rng.random((self.perturbations, len(rows))))
        return float((drawn != proposal.codes).any(axis=-1).mean())
