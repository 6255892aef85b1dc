"""Random baselines with another gate's constraints: the free probability that gives a random gate the same rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from specact.families.load import AnyPair
from specact.gates.settings import GateChoices, GateSettings
from specact.lab.rollout.methods import load_method

# Default inferences per episode: so many that the first one is negligible.
_DEFAULT_LENGTHS: tuple[int, ...] = (1000,)


def uncalibrated_gate(name: str, gates: GateChoices, bundle: AnyPair) -> GateSettings:
    """A method's gate without its threshold; a random baseline has the forced first step and the limit of its rival.

    Raises:
        ConfigError: if the gate, or the rival's, needs a head that the bundle does not have.
    """
    method = load_method(name)
    settings = gates.settings(method.gate, bundle)
    if method.limits_of is None:
        return settings
    rival = gates.settings(load_method(method.limits_of).gate, bundle)
    return replace(settings, max_skips=rival.max_skips, options=(("force_first", True),))


def random_gate_at_rate(
    settings: GateSettings, rate: float, rival: Mapping[str, NDArray[Any]] | None, sent: str = "transmitted"
) -> GateSettings:
    """The random gate at its rival's rate, over episodes as long as the rival's.

    Args:
        settings: of the random gate, without its probability.
        rate: where the rival did not run.
        rival: the rival's step table.
        sent: its column of sent inferences; for a random gate that requests only full rounds, that of full rounds.
    """
    force_first, lengths = dict(settings.options).get("force_first", False), _DEFAULT_LENGTHS
    if rival is not None:
        rate = float(rival[sent].mean())
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
