"""Sweet spots of levers with their bootstrap support, and tests of TISED's three findings, with explanations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from specact.lab.tised.analysis import Cell, Curve, LeverContrast, Place, in_words
from specact.lab.tised.equations import Optimum, optimum

EndPoint = Literal["success", "restricted_s", "task_s"]
_RESAMPLES = 1000
# Minimum bootstrap support of a plausible setting.
_PLAUSIBLE = 0.05
# Family-wise error rate of a sweep.
LEVEL = 0.05
# Minimum speed-up that counts as a faster chunk.
_FASTER = 1.005


@dataclass(frozen=True)
class PlacedOptimum:
    """The sweet spot of one curve at an end point, by a scan; by T_inf of its baseline [s] machines are sorted.

    Of each setting with this end point, the baseline first: strength, value, and support, the share of 1,000 paired
    bootstrap samples of the episodes in which it is best, ``[S]``.
    """

    place: Place
    inference_s: float
    end_point: EndPoint
    spot: Optimum
    strengths: tuple[float, ...]
    values: tuple[float, ...]
    support: tuple[float, ...]

    @property
    def plausible(self) -> frozenset[float]:
        """The settings that are best in at least 5 % of the samples."""
        return frozenset(
            strength for strength, share in zip(self.strengths, self.support, strict=True) if share >= _PLAUSIBLE
        )


def decisive(place: Place) -> EndPoint:
    """The end point of a place: restricted mean time where the world waits, else success."""
    return "restricted_s" if place.static else "success"


def optima_of(curve: Curve) -> list[PlacedOptimum]:
    """The sweet spots of a curve for each end point that it has."""
    cells = curve.cells
    weights = _resampled(curve.success.shape[1])
    hits = curve.success.astype(np.float64) @ weights.T
    restricted = curve.restricted_s @ weights.T
    optima = [
        _spot(cells, "success", [cell.success.mean for cell in cells], hits, "most"),
        _spot(cells, "restricted_s", [cell.restricted_s.mean for cell in cells], restricted, "least"),
    ]
    if any(cell.successes for cell in cells):
        time = np.where(curve.success, curve.task_s, 0.0) @ weights.T
        # A sample without success has no task time, so the setting cannot be best.
        sampled = np.where(hits > 0.0, time / np.maximum(hits, 1.0), np.inf)
        optima.append(_spot(cells, "task_s", [cell.task_s for cell in cells], sampled, "least"))
    return optima


def _resampled(episodes: int) -> NDArray[np.float64]:
    """Multiplicity of each episode in each bootstrap sample, ``[1000, E]``."""
    rng = np.random.default_rng(0)
    return rng.multinomial(episodes, np.full(episodes, 1.0 / episodes), size=_RESAMPLES).astype(np.float64)


def _spot(
    cells: Sequence[Cell], end_point: EndPoint, values: Sequence[float], sampled: NDArray[np.float64],
    best: Literal["least", "most"],
) -> PlacedOptimum:  # fmt: skip
    """The optimum from the values ``[S]`` and their bootstrap samples ``[S, 1000]``, up to a common factor."""
    defined = np.isfinite(values)
    strengths, defined_values = np.array([cell.strength for cell in cells])[defined], np.array(values)[defined]
    winners = (np.argmin if best == "least" else np.argmax)(sampled[defined], axis=0)
    support = np.bincount(winners, minlength=len(defined_values)) / _RESAMPLES
    return PlacedOptimum(
        cells[0].place,
        cells[0].inference_s,
        end_point,
        optimum(strengths, defined_values, best),
        tuple(strengths.tolist()),
        tuple(defined_values.tolist()),
        tuple(support.tolist()),
    )


@dataclass(frozen=True)
class Finding:
    """One of the three findings, at one place or along one axis.

    Attributes:
        number: 1, a faster chunk makes a static task slower; 2, a cheaper policy that is worse at the least staleness
            is better at a larger one, and the crossover depends on the pace; 3, the sweet spot depends on the hardware
            or the link. A task is static where its world stands still while the robot waits
            (:attr:`Place.static <specact.lab.tised.analysis.Place.static>`).
        about: lever, task and so on.
        seen: whether it is significant, by paired tests at the level of 5 %, corrected over all contrasts of the sweep.
        words: the explanation.
    """

    number: Literal[1, 2, 3]
    about: str
    seen: bool
    words: str


def find_all(
    cells: Sequence[Cell], contrasts: Sequence[LeverContrast], spots: Sequence[PlacedOptimum]
) -> list[Finding]:
    """All findings of a sweep: at every place, along the pace, and along the hardware.

    Args:
        cells, contrasts, spots: of all curves.
    """
    # A lever with one setting has no sweet spot.
    deciding = [spot for spot in spots if spot.end_point == decisive(spot.place) and len(spot.strengths) > 1]
    by_place = {spot.place: spot for spot in deciding}
    findings = []
    for place, rows in _grouped(contrasts, lambda row: row.place):
        findings.append(
            _finding_1(rows, by_place[place]) if place.static else _finding_2(rows, by_place[place], cells, contrasts)
        )
    dynamic = [spot for spot in deciding if not spot.place.static]
    for (family, machine), row in _grouped(dynamic, lambda spot: (_family(spot.place), spot.place.machine)):
        if len(row) > 1:
            seen, words = _optimum_moves([(spot, f"pace {spot.place.pace:g}") for spot in row])
            lever, task, idle = family
            findings.append(Finding(2, f"{lever} on {task}, idle {idle}, over the pace, {machine}", seen, words))
    for (lever, world), row in _grouped(deciding, lambda spot: (spot.place.lever, spot.place.world)):
        if len(row) > 1:
            row.sort(key=lambda spot: spot.inference_s)
            seen, words = _optimum_moves([(spot, spot.place.machine) for spot in row])
            findings.append(Finding(3, f"{lever} on {world}, over hardware", seen, words))
    return findings


def _grouped(values: Sequence[Any], key: Callable[[Any], Any]) -> Iterable[tuple[Any, list[Any]]]:
    groups: dict[Any, list[Any]] = {}  # in the order of the keys' first occurrence
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups.items()


def _finding_1(rows: Sequence[LeverContrast], spot: PlacedOptimum) -> Finding:
    """Finding 1: every chunk is faster, and the task slower.

    It is tested on the episodes in which both succeed, where only the number of chunks can cancel the time saved per
    chunk. Restricted mean time also rises with failures, and a mean over each one's own successes favours settings that
    fail on long episodes; both are reported as well.
    """
    about, shape = str(spot.place), _describe_optimum(spot, "restricted mean time", " s")
    faster = [(row, row.speedup) for row in rows if row.speedup and row.speedup.chunk_speedup > _FASTER]
    if not faster:
        return Finding(1, about, False, f"not seen: no setting makes a chunk faster. {shape}")
    slowed = [(row.both_s.difference.mean, row) for row, _ in faster if row.both_s and row.both_p < LEVEL]
    by_s, worst = max(slowed, key=lambda pair: pair[0], default=(0.0, rows[0]))
    if by_s > 0.0:
        return Finding(1, about, True, f"seen: {worst.explain()}. {shape}")
    # The setting with the smallest speed-up of the task.
    nearest = min(faster, key=lambda pair: pair[1].task_speedup)[0]
    return Finding(1, about, False, f"not seen; nearest to it: {nearest.explain()}. {shape}")


def _finding_2(
    rows: Sequence[LeverContrast], spot: PlacedOptimum, cells: Sequence[Cell], contrasts: Sequence[LeverContrast]
) -> Finding:
    """Finding 2: a setting that is worse than the baseline at the least staleness succeeds more often here.

    Both conditions are tested. A setting that is better here and not worse there is simply the better policy.
    """
    about, shape = str(spot.place), _describe_optimum(spot, "success", "")
    freshest = min(_baselines(rows[0], cells), key=_staleness).place
    there = {row.strength: row for row in contrasts if row.place == freshest}
    crossed = [row for row in rows if _is_better(row) and row.strength in there and _is_worse(there[row.strength])]
    best = max(crossed or rows, key=lambda row: row.success.difference.mean)
    words = (
        f"at {best.strength:g} against {best.baseline:g} success changes by {in_words(best.success, best.success_p)}; "
    )
    if freshest == spot.place:
        return Finding(2, about, False, f"not seen; here least is stale: {words}{_possible_gain(best, cells)} {shape}")
    words += f"where least is stale ({freshest.world}, {freshest.machine}) "
    if best.strength in there:
        contrast_there = there[best.strength]
        words += f"by {in_words(contrast_there.success, contrast_there.success_p)}."
    else:
        words += "it was not run."
    if crossed:
        return Finding(2, about, True, f"seen: {words} {shape}")
    if _is_better(best):
        return Finding(2, about, False, f"not seen, because it is better here and not worse there: {words} {shape}")
    return Finding(2, about, False, f"not seen; nearest to it: {words} {_possible_gain(best, cells)} {shape}")


def _is_better(row: LeverContrast) -> bool:
    return row.success_p < LEVEL and row.success.difference.mean > 0.0


def _is_worse(row: LeverContrast) -> bool:
    return row.success_p < LEVEL and row.success.difference.mean < 0.0


def _family(place: Place) -> tuple[str, str, str]:
    return place.lever, place.task, place.idle


def _baselines(row: LeverContrast, cells: Sequence[Cell]) -> list[Cell]:
    """The baseline's cells at all paces and on all machines."""
    return [cell for cell in cells if _family(cell.place) == _family(row.place) and cell.strength == row.baseline]


def _staleness(cell: Cell) -> tuple[float, float]:
    """``v tau``, then the age, because objects in free motion move at pace 0 too."""
    return cell.place.pace * cell.age_s, cell.age_s


def _optimum_moves(path: Sequence[tuple[PlacedOptimum, str]]) -> tuple[bool, str]:
    """Whether sweet spots along an axis differ significantly, with an explanation.

    Two do if they have no plausible setting in common, see
    :attr:`~experiments.tised.findings.PlacedOptimum.plausible`.
    """
    words = ", ".join(f"{spot.spot.where:g} at {label}" for spot, label in path)
    spots = [spot for spot, _ in path]
    if any(not one.plausible & other.plausible for one in spots for other in spots):
        return True, f"the sweet spot moves: {words}."
    if len({spot.spot.where for spot in spots}) == 1:
        return False, f"the sweet spot stays: {words}."
    return False, f"the sweet spots differ within the noise: {words}; every two have plausible settings in common."


def _possible_gain(row: LeverContrast, cells: Sequence[Cell]) -> str:
    """The maximum gain of fresher observations: the baseline's loss from delay."""
    here = [cell for cell in _baselines(row, cells) if cell.place.pace == row.place.pace]
    fastest = min(here, key=lambda cell: cell.age_s)
    own = next(cell for cell in here if cell.place == row.place)
    if fastest is own:
        return f"Observations are {1e3 * own.age_s:.3g} ms old here, and nothing was run with fresher ones."
    return (
        f"The baseline succeeds in {own.success.mean:.3f} with observations {1e3 * own.age_s:.3g} ms old and in "
        f"{fastest.success.mean:.3f} with {1e3 * fastest.age_s:.3g} ms: "
        "fresher observations can gain no more than that."
    )


def _describe_optimum(spot: PlacedOptimum, what: str, unit: str) -> str:
    kind = "interior" if spot.spot.interior else "at an end"
    share = spot.support[spot.strengths.index(spot.spot.where)]
    return (
        f"Best is {spot.spot.where:g} ({kind}, {what} {spot.spot.value:.3g}{unit}), in {100 * share:.0f} % of the "
        "bootstrap samples."
    )
