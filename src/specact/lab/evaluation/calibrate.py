"""The gates of an evaluation: thresholds for a rate, found where the gate leads, and random gates at a rival's rate.

A calibration says how well the gate's score predicts the target's rejection (ADAHI, equation 6). A threshold is the
quantile of the score, or what ADAHI's equations 9 and 10 give as written, see :func:`fitted_threshold`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from specact.errors import ConfigError
from specact.gates.calibration import Calibration, threshold_for_rate
from specact.gates.settings import GateSettings, gate_settings, load_gate
from specact.lab.envs import env_of
from specact.lab.rollout.methods import HYBRID, Method
from specact.lab.rollout.pool import Pool
from specact.lab.rollout.rollout import EpisodeRange, Shard
from specact.lab.rollout.statistics import roc_auc
from specact.lab.rollout.steps import REASONS, Table, concatenated, free_steps
from specact.pair import Pair
from specact.records import Count, InsideUnit, Seed, validated
from specact.systems.flash import Rounds
from specact.types import Decision, Floats

Threshold = Literal["quantile", "linear", "logarithmic"]

_SHARD = 10  # episodes that run in one batch
# Default inferences per episode of a random gate: so many that the first one is negligible.
_DEFAULT_LENGTHS: tuple[int, ...] = (1000,)


@validated
def calibrate(
    pair: Pair[Any], gate: str | GateSettings, rate: InsideUnit, *, episodes: Count = 40, rounds: Count = 4,
    seed: Seed = 0, method: Method = HYBRID, env: str | None = None, pool: Pool | None = None,
    advance: Callable[[int], None] = lambda done: None, threshold: Threshold = "quantile",
) -> Calibration:  # fmt: skip
    """Finds a gate's threshold for a transmission rate in rollouts; see :func:`find_threshold`, also for its errors.

    Each round, and the check on held-out episodes, has so many episodes; three rounds or more are needed, because a
    gate shifts the states it later sees. The gate is a name, with the options that the pair recommends, or settings
    without a threshold; ``method`` is how the pair drafts and verifies. ``env`` is the pair's own if not given; without
    a ``pool`` everything runs in this process. ``advance`` is called with the number of finished episodes, of
    ``episodes * (rounds + 2)``, or of two rounds where ``threshold`` names a fit.
    """
    settings = gate_settings(gate, pair) if isinstance(gate, str) else gate
    world, finished = env or env_of(pair.env), 0

    def roll(tried: GateSettings, number: int) -> Table:
        nonlocal finished
        numbers, tables = calibration_episodes(number, rounds, episodes), dict[int, Table]()
        starts = range(0, episodes, _SHARD)
        shards = [Shard.of(pair, world, method, tried, numbers[i : i + _SHARD], seed) for i in starts]
        for shard, (_, table) in workers.run(shards):
            tables[shard.episodes[0]] = table
            finished += len(shard.episodes)
            advance(finished)
        return concatenated([tables[first] for first in sorted(tables)])

    with Pool(1) if pool is None else nullcontext(pool) as workers:
        search = find_threshold(settings, rate, rounds, roll, threshold)
    made_by = {"env": world, "rate": rate, "episodes": episodes, "rounds": rounds, "seed": seed, "shard": _SHARD,
               "threshold": threshold}  # fmt: skip
    return search.calibration(pair, rate, episodes, made_by, method.decoding or pair.source.decoding)


def decision_table(decisions: Sequence[Decision]) -> Table:
    """Decisions of a gate as the columns that :func:`find_threshold` needs."""
    return {
        "score": np.array([decision.score for decision in decisions]),
        "reason": np.array([REASONS.index(decision.reason) for decision in decisions]),
        "transmitted": np.array([decision.transmit for decision in decisions]),
    }


@dataclass(frozen=True)
class Round:
    """A round of calibration: the gate, its rate over the steps that it was free to decide, and over all steps."""

    settings: GateSettings
    free_rate: float
    rate: float


@dataclass(frozen=True)
class ThresholdSearch:
    """The result of :func:`find_threshold`: a calibrated gate, the rounds that led to it, and a held-out check."""

    settings: GateSettings
    rounds: list[Round]
    checked: Table

    def calibration(
        self, pair: Pair[Any], rate: float, episodes: int, made_by: dict[str, Any], decoding: str
    ) -> Calibration:
        """The calibration of a pair for a decoding and a rate, checked on this number of held-out ``episodes``."""
        sent, free = self.checked["transmitted"], free_steps(self.checked)
        return Calibration(
            fingerprint=pair.fingerprint, rate=rate, settings=self.settings, made_by=made_by, decoding=decoding,
            held_out={"rate": float(sent.mean()), "episodes": episodes, "inferences": len(sent),
                      "free": float(free.mean())},
            rounds=[{"threshold": attempt.settings.threshold, "rate": attempt.rate} for attempt in self.rounds],
            model=score_model({name: column[free] for name, column in self.checked.items()}),
        )  # fmt: skip


def score_model(steps: Table) -> dict[str, Any]:
    """How the score of freely decided steps goes with what verification would change, as plain values.

    Of action codes the :class:`RejectionModel` of R(z), the rejection of any code, and as ``primary`` that of r, the
    rejection of the primary code, as in the paper's figure 2; else the score's rank correlation with the distance.
    """
    if "rejection" not in steps:
        distance = steps.get("drafted_distance", steps.get("distance"))
        return {"spearman": float(stats.spearmanr(steps["score"], distance).statistic)}
    model, primary = (asdict(fit_rejection(steps["score"], steps[name])) for name in ("rejection", "rejection_0"))
    return {**model, "primary": primary}


def calibration_episodes(number: int, rounds: int, episodes: int) -> range:
    """The episodes of round ``number`` of so many; ``rounds + 1`` is the held-out check. Nobody evaluates on them."""
    if number > rounds:
        return EpisodeRange.HELD_OUT.episodes(episodes)
    return EpisodeRange.CALIBRATION.episodes(episodes, number * episodes)


def find_threshold(
    gate: GateSettings, rate: float, rounds: int, roll: Callable[[GateSettings, int], Table],
    threshold: Threshold = "quantile",
) -> ThresholdSearch:  # fmt: skip
    """Finds the threshold at which a gate holds a rate on the states it leads to: a gate shifts the states it sees.

    The first round transmits everything and reads the scores on the target's own states. Every further round tries a
    threshold on the states it leads to, and the next one is chosen from what all of them achieved. A rate that the
    gate's limit on skips does not allow is a :exc:`ConfigError`. With a fit as ``threshold``, the first round alone
    gives :func:`fitted_threshold`, errors too.

    Args:
        gate, rate, rounds: without its threshold; wanted, in (0, 1); thresholds to try, at least 1.
        roll: runs the episodes of a round (0, then 1 to ``rounds``, and ``rounds + 1`` for the held-out check) with a
            gate; a row per inference, with the columns of :func:`decision_table`.
    """
    gate.check_rate(rate)
    settings, scores, tried = replace(gate, threshold=-np.inf), np.empty(0), list[Round]()
    if threshold != "quantile":
        steps = roll(settings, 0)
        if "rejection_0" not in steps:
            raise ConfigError(f"a {threshold} fit needs rejections of action codes; for this pair use the quantile")
        scores, rejections = (steps[name][free_steps(steps)] for name in ("score", "rejection_0"))
        settings = replace(gate, threshold=fitted_threshold(scores, rejections, rate, threshold))
        return ThresholdSearch(settings, [], roll(settings, rounds + 1))
    for number in range(rounds + 1):
        table = roll(settings, number)
        free, sent = free_steps(table), table["transmitted"]
        scores = np.concatenate([scores, table["score"][free]])
        if number > 0:
            tried.append(Round(settings, float(sent[free].mean()), float(sent.mean())))
        # Of the freely decided steps, the share that makes the wanted rate with those that are transmitted by force.
        wanted = np.clip((rate * len(free) - (~free).sum()) / max(1, free.sum()), 0.0, 1.0)
        settings = _next(settings, scores, tried, float(wanted))
    return ThresholdSearch(settings, tried, roll(settings, rounds + 1))


def _next(settings: GateSettings, scores: NDArray[np.float64], rounds: Sequence[Round], wanted: float) -> GateSettings:
    """The gate to try next, from all scores met so far and what the gates tried so far achieved.

    Every gate is put in terms of the share of those scores it would transmit. On its own states it transmits another
    share; the line through these pairs says which share to ask for. Working with shares and not with thresholds keeps
    the ties of discrete scores exact.
    """
    share = wanted
    if rounds:
        requested = np.array([_share(scores, attempt.settings) for attempt in rounds])
        achieved = np.array([attempt.free_rate for attempt in rounds])
        spread = float(np.var(requested))
        # Between a gate that damps its own feedback and one that triples it; outside that range it is noise.
        slope = float(np.clip(np.cov(requested, achieved, ddof=0)[0, 1] / spread, 0.5, 3.0)) if spread > 1e-4 else 1.0
        share = float(np.clip(requested.mean() + (wanted - achieved.mean()) / slope, 0.01, 0.99))
    threshold, tie = threshold_for_rate(scores, share)
    return replace(settings, threshold=threshold, tie_probability=tie)


def _share(scores: NDArray[np.float64], settings: GateSettings) -> float:
    tied = np.mean(scores == settings.threshold)
    return float(np.mean(scores > settings.threshold) + settings.tie_probability * tied)


def uncalibrated_gate(method: Method, options: Sequence[str], pair: Pair[Any]) -> GateSettings:
    """A method's gate without its threshold; a random baseline has the forced first step and the limit of its rival.

    Raises :exc:`ConfigError` if the gate, or the rival's, needs a head that the pair does not have.
    """
    settings = gate_settings(method.gate, pair, options)
    if method.limits_of is None:
        return settings
    rival = gate_settings(method.limits_of, pair, options)
    return replace(settings, max_skips=rival.max_skips, options=(("force_first", True),))


def gate_of_method(
    method: Method, pair: Pair[Any], rate: float, calibrated: Callable[[GateSettings], GateSettings],
    *, options: Sequence[str] = (), steps: Mapping[str, Table] = MappingProxyType({}),
) -> GateSettings:  # fmt: skip
    """The gate that a method runs with at the rate of the evaluation, see :func:`uncalibrated_gate`.

    ``calibrated`` makes the calibration of a gate that has one, given its other settings. A random baseline runs at the
    rate that its rival achieved in the step tables ``steps`` of those that ran, over episodes as long as the rival's.
    """
    settings = uncalibrated_gate(method, options, pair)
    if load_gate(method.gate).calibrated:
        return calibrated(settings)
    if method.rate_of is None:
        return settings
    rival, lengths = steps.get(method.rate_of), _DEFAULT_LENGTHS
    if rival is not None:
        # A baseline that requests only full rounds makes as many as its rival, not as many requests.
        only_full = isinstance(method.composition, Rounds) and method.composition.full
        rate = float(rival["full" if only_full else "transmitted"].mean())
        lengths = tuple(np.unique(rival["episode"], return_counts=True)[1].tolist())
    force_first = dict(settings.options).get("force_first", False)
    return replace(
        settings, threshold=free_probability(rate, settings.max_skips, force_first=force_first, lengths=lengths)
    )


def free_probability(
    rate: float, max_skips: int | None, *, force_first: bool = True, lengths: Sequence[int] = _DEFAULT_LENGTHS
) -> float:
    """Probability, in [0, 1], of transmitting a step that nothing forces, so that the rate over all steps is ``rate``.

    It is 0 where forced steps alone reach the rate; arguments as of :func:`expected_rate`.
    """

    def excess(free: float) -> float:
        return expected_rate(free, max_skips, force_first=force_first, lengths=lengths) - rate

    if excess(0.0) >= 0.0:
        return 0.0
    if excess(1.0) <= 0.0:
        return 1.0
    return float(optimize.brentq(excess, 0.0, 1.0, xtol=1e-6))


def expected_rate(free: float, max_skips: int | None, *, force_first: bool, lengths: Sequence[int]) -> float:
    """Expected share of transmitted inferences of a random gate, in episodes of so many, forced ones included.

    ``free`` is the probability of transmitting a step that nothing forces.
    """
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


@dataclass(frozen=True)
class Fit:
    """``r = slope * x + intercept`` over bins, with ``x = D`` (linear, shift 0) or ``x = ln(D + shift)`` (logarithmic).

    ``r2`` is the explained share of the bins' variance.
    """

    slope: float
    intercept: float
    shift: float
    r2: float

    def inverse(self, rejection: float) -> float:
        """The score of a rejection, by equation 9, which may lie beyond all scores.

        Raises:
            ConfigError: if rejection does not increase with the score.
        """
        if self.slope <= 0.0:
            raise ConfigError(
                f"this fit of rejection over the score does not increase (slope {self.slope:.3g}), so that equation 9 "
                "has no threshold; use --threshold quantile, or another reading of the score"
            )
        x = (rejection - self.intercept) / self.slope
        with np.errstate(over="ignore"):
            return float(np.exp(x)) - self.shift if self.shift else x


@dataclass(frozen=True)
class RejectionModel:
    """Rejection over score.

    R² of the bins can be high with a negative slope, where the gate asks at the wrong steps; so report the slope's
    sign and the step-level figures as well.
    """

    scores: list[float]  # mean score, mean rejection and its standard error per bin of equal count, [bins]
    rejections: list[float]
    errors: list[float]
    linear: Fit
    logarithmic: Fit
    spearman: float  # rank correlation over single steps
    auroc: float  # area under the ROC curve of the score, for rejections above 1/2; 0.5 is chance
    steps: int


def fit_rejection(scores: Floats, rejections: Floats) -> RejectionModel:
    """Fits both models to steps ``[N]``, in at most 20 bins of equal counts."""
    order = np.argsort(scores, kind="stable")
    parts = [part for part in np.array_split(order, min(20, len(order))) if len(part)]
    x = np.array([scores[part].mean() for part in parts])
    y = np.array([rejections[part].mean() for part in parts])
    errors = [float(rejections[part].std() / np.sqrt(len(part))) for part in parts]
    auroc, constant = roc_auc(scores, rejections > 0.5), np.ptp(scores) == 0.0 or np.ptp(rejections) == 0.0
    spearman = float("nan") if constant else float(stats.spearmanr(scores, rejections).statistic)
    auroc = float("nan") if auroc is None else auroc
    fits = _line(x, y, 0.0), _logarithm(x, y)
    return RejectionModel(x.tolist(), y.tolist(), errors, *fits, spearman, auroc, len(scores))


def rejection_threshold(rejections: Floats, rate: float) -> float:
    """``r_th`` of ADAHI's equation 10, ``rate = 1 - F(r_th)``, with F the distribution of these rejections."""
    return float(np.quantile(rejections, 1.0 - rate, method="inverted_cdf"))


def fitted_threshold(scores: Floats, rejections: Floats, rate: float, kind: Threshold) -> float:
    """``D_th = f^-1(r_th)``, ADAHI's equations 9 and 10 as written, with f the fit of equation 6 to steps ``[N]``.

    Rejections scatter around f, so that the rate is missed; with F of the fitted rejections it is the score's quantile.

    Raises:
        ConfigError: if f does not increase, or r_th is none of its values between the least and the largest score.
    """
    model, wanted = fit_rejection(scores, rejections), rejection_threshold(rejections, rate)
    threshold = (model.linear if kind == "linear" else model.logarithmic).inverse(wanted)
    if not scores.min() <= threshold <= scores.max():
        beyond, so = ("below", "always") if threshold < scores.min() else ("above", "never")
        raise ConfigError(
            f"at a rate of {rate:g} the rejection threshold is {wanted:.3g}, {beyond} all that the {kind} fit of "
            f"rejection takes on these scores, so that the gate would {so} ask; use --threshold quantile"
        )
    return threshold


def _line(x: Floats, y: Floats, shift: float) -> Fit:
    if np.ptp(x) == 0.0 or np.ptp(y) == 0.0:
        return Fit(0.0, float(y.mean()), shift, 0.0)
    line: Any = stats.linregress(x, y)
    return Fit(float(line.slope), float(line.intercept), shift, float(line.rvalue**2))


def _logarithm(x: Floats, y: Floats) -> Fit:
    """The shift is searched between a thousandth and a hundred times the largest score."""
    below = min(0.0, float(x.min()))
    top = max(float(x.max()) - below, 1e-9)

    def fit(log_shift: float) -> Fit:
        shift = float(np.exp(log_shift)) - below
        return _line(np.log(x + shift), y, shift)

    bounds = (np.log(top * 1e-3), np.log(top * 1e2))
    return fit(float(optimize.minimize_scalar(lambda value: -fit(value).r2, bounds=bounds, method="bounded").x))
