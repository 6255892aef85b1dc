"""Random baselines with another gate's constraints: the free probability that gives a random gate the same rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from specact.gates.settings import GateSettings, gate_settings
from specact.lab.rollout.methods import Method
from specact.pair import Pair
from specact.systems.flash import Rounds

# Default inferences per episode: so many that the first one is negligible.
_DEFAULT_LENGTHS: tuple[int, ...] = (1000,)


def uncalibrated_gate(method: Method, options: tuple[str, ...], bundle: Pair[Any]) -> GateSettings:
    """A method's gate without its threshold; a random baseline has the forced first step and the limit of its rival.

    Raises:
        ConfigError: if the gate, or the rival's, needs a head that the bundle does not have.
    """
    settings = gate_settings(method.gate, bundle, options)
    if method.limits_of is None:
        return settings
    rival = gate_settings(method.limits_of, bundle, options)
    return replace(settings, max_skips=rival.max_skips, options=(("force_first", True),))


def gate_at_rate_of_rival(
    method: Method, settings: GateSettings, rate: float, steps: Mapping[str, Mapping[str, NDArray[Any]]]
) -> GateSettings:
    """The gate of a random baseline at its rival's rate, over episodes as long as the rival's.

    Args:
        method: with a random gate.
        settings: of its gate, without the probability.
        rate: where the rival did not run.
        steps: step tables of the methods that ran.
    """
    force_first, lengths = dict(settings.options).get("force_first", False), _DEFAULT_LENGTHS
    rival = None if method.rate_of is None else steps.get(method.rate_of)
    if rival is not None:
        # A baseline that requests only full rounds makes as many as its rival, not as many requests.
        only_full = isinstance(method.composition, Rounds) and method.composition.full
        rate = float(rival["full" if only_full else "transmitted"].mean())
        lengths = tuple(np.unique(rival["episode"], return_counts=True)[1].tolist())
    free = free_probability(rate, settings.max_skips, force_first=force_first, lengths=lengths)
    return replace(settings, threshold=free)


def free_probability(
    rate: float, max_skips: int | None, *, force_first: bool = True, lengths: Sequence[int] = _DEFAULT_LENGTHS
) -> float:
    """Probability, in [0, 1], of transmitting a step that nothing forces, so that the rate over all steps is ``rate``.

    Args:
        rate: wanted share of inferences that are transmitted, forced ones included.
        max_skips: longest run of skips; None for no limit.
        force_first: whether an episode's first inference is always transmitted.
        lengths: inferences of each episode.

    Returns:
        The probability; 0 where forced steps alone reach the rate.
    """

    def excess(free: float) -> float:
        return expected_rate(free, max_skips, force_first=force_first, lengths=lengths) - rate

    if excess(0.0) >= 0.0:
        return 0.0
    if excess(1.0) <= 0.0:
        return 1.0
    return float(optimize.brentq(excess, 0.0, 1.0, xtol=1e-6))


def expected_rate(free: float, max_skips: int | None, *, force_first: bool, lengths: Sequence[int]) -> float:
    """Expected transmission rate of a random gate over episodes; the inverse of :func:`free_probability`."""
    ends, count = np.unique(np.asarray(lengths), return_counts=True)
    # Distribution of the number of consecutive skips before a step: 0 to the limit, where the next step is forced.
    runs = np.zeros(2 if max_skips is None else max_skips + 1)
    runs[0] = 1.0
    sent = np.zeros(int(ends[-1]))
    for step in range(len(sent)):
        forced = runs[-1] if max_skips is not None else 0.0
        probability = 1.0 if force_first and step == 0 else forced + (1.0 - forced) * free
        sent[step] = probability
        if max_skips is not None:
            runs[1:] = (0.0 if force_first and step == 0 else 1.0 - free) * runs[:-1]
            runs[0] = probability
    return float(np.cumsum(sent)[ends - 1] @ count / (ends @ count))
