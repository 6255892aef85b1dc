"""The contract of a gate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np

from specact.contracts.expectations import call, expect, random_windows
from specact.gates.gate import Gate
from specact.pair import Pair
from specact.types import Decision, Proposal


def check_gate(gate: type[Gate], pair: Pair[Any], *, seed: int = 0, steps: int = 50, **options: Any) -> None:
    """Checks a gate: that it can be made from stored settings, and that its scores and decisions can be calibrated.

    Args:
        gate: the class.
        pair: source of proposals, with the evidence of the pair's family.
        seed: of windows and proposals.
        steps: inferences of an episode.
        options: constructor parameters without a default.

    Raises:
        ContractError: for the first violation of :class:`~specact.gates.gate.Gate`.
    """
    kind: Any = gate
    expect(isinstance(kind, type) and issubclass(kind, Gate), f"a gate must be a subclass of Gate, got {gate!r:.60}")

    def make_gate(threshold: float, **limits: Any) -> Gate:
        settings: dict[str, Any] = {"tie_probability": 0.0, "max_skips": None} | options | limits
        found = call("for_pair", gate.for_pair, pair, threshold, **settings)
        expect(isinstance(found, Gate), f"for_pair must give a gate, got {found!r:.60}")
        return cast(Gate, found)

    rng = np.random.default_rng(seed)
    windows = random_windows(pair.observation, steps, rng)
    proposals = [pair.drafter().propose(window, rng) for window in windows]
    checked = make_gate(0.0)
    first = _decisions(checked, proposals, seed)
    for decision in first:
        score = call("the number that score gives", float, decision.score)
        expect(
            math.isfinite(score),
            f"score must give a finite number, got {score}; where there is nothing to go by, 0.0",
        )
    expect(
        _decisions(make_gate(0.0), proposals, seed) == first,
        "two gates that see the same proposals must decide the same; what is random in score must come from its rng",
    )
    _decisions(checked, proposals[: steps // 2], seed + 1)
    expect(_decisions(checked, proposals, seed) == first, "reset must forget the episode; call super().reset() in it")
    if not gate.calibrated:
        return
    for threshold, sent in ((math.inf, False), (-math.inf, True)):
        found = [one.transmit for one in _decisions(make_gate(threshold), proposals, seed) if one.reason == "score"]
        expect(
            all(transmit == sent for transmit in found),
            f"with a threshold of {threshold} every step that nothing forces must be {'sent' if sent else 'skipped'}; "
            "pass threshold on to Gate's constructor",
        )
    limited = [one.transmit for one in _decisions(make_gate(math.inf, max_skips=1), proposals, seed)]
    expect(
        all(a or b for a, b in pairwise(limited)),
        "with max_skips=1 no two steps in a row may be skipped; pass **limits on to Gate's constructor",
    )


def _decisions(gate: Gate, proposals: Sequence[Proposal], seed: int) -> list[Decision]:
    """The decisions of an episode that executes the drafted actions."""
    gate.reset()
    decisions = []
    for step, proposal in enumerate(proposals):
        before = proposal.actions.copy()
        decisions.append(call("decide", gate.decide, proposal, np.random.default_rng([seed, step])))
        expect(np.array_equal(before, proposal.actions), "score must not change the proposal")
        call("on_action", gate.on_action, proposal.actions[0], proposal.actions[0])
    return decisions
