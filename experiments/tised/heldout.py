"""Cross-validation of predictions of a sweep's cells: one machine, or one pace, is held out at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specact.lab.tised.aggregates import Aggregate, grouped
from specact.lab.tised.prediction import PredictionError, fit_response, predict_success, prediction_error, staleness
from specact.lab.tised.timing import exact_task_s

Delay = Literal["stall_s", "age_s"]
_DELAYS: tuple[Delay, ...] = ("stall_s", "age_s")


@dataclass(frozen=True)
class HeldOut:
    """A prediction of one machine or pace from all others.

    Attributes:
        lever, task, idle: of the cells.
        held: what was held out: a machine (hardware and link) at one pace, or a pace.
        delay: the delay in staleness: the stall, as in equation (7), or the observation's age. Without overlap they are
            the same.
        error: of predicted success over the held-out cells. Its noise level assumes independent episodes; it is an
            upper bound where the same episodes are run everywhere.
        covered: share of these cells whose staleness lies within the measured range.
        spots: curves among them; right: number of correctly predicted best settings.
        regret: success lost with the predicted setting in place of the observed best, mean over curves.
    """

    lever: str
    task: str
    idle: str
    held: str
    delay: Delay
    error: PredictionError
    covered: float
    spots: int
    right: int
    regret: float


def hold_out(cells: Sequence[Aggregate], baselines: Mapping[str, float]) -> list[HeldOut]:
    """Predicts success on every machine from the others at the same pace, and at every pace from the others.

    The response to staleness is fitted to the baseline's cells, and each setting's quality to its least stale cell. Of
    the held-out cells only timing is used, which can be measured without the task. Levers with one setting are left
    out, and splits with fewer than two staleness values for the response.

    A pace may make a task harder beyond the effect of staleness; then predictions from other paces are poor, and those
    from other machines good.

    Args:
        cells: of a sweep.
        baselines: the strength of each lever at which it has no effect.
    """
    predictions = []
    for (lever, task, idle), family in grouped(cells, lambda c: (c.place.lever, c.place.task, c.place.idle)):
        if len({cell.strength for cell in family}) < 2:
            continue
        for held, training, test in _splits(family):
            for delay in _DELAYS:
                result = _predict(training, test, baselines[lever], delay)
                if result is not None:
                    predictions.append(HeldOut(lever, task, idle, held, delay, *result))
    return predictions


def _splits(family: Sequence[Aggregate]) -> Iterator[tuple[str, list[Aggregate], list[Aggregate]]]:
    """Splits: name, training cells, test cells. At pace 0 no machine is held out, because there is no staleness."""
    for pace, world in grouped(family, lambda cell: cell.place.pace):
        if pace > 0.0:
            for machine, test in grouped(world, lambda cell: cell.place.machine):
                training = [cell for cell in world if cell.place.machine != machine]
                yield f"{machine} at pace {pace:g}", training, test
            yield f"pace {pace:g}", [cell for cell in family if cell.place.pace != pace], world


def _predict(
    training: Sequence[Aggregate], test: Sequence[Aggregate], baseline: float, delay: Delay
) -> tuple[PredictionError, float, int, int, float] | None:
    def staleness_of(cell: Aggregate) -> float:
        return float(staleness(cell.place.pace, getattr(cell, delay)))

    response_cells = [cell for cell in training if cell.strength == baseline]
    if len({staleness_of(cell) for cell in response_cells}) < 2:
        return None
    response = fit_response(*_columns(response_cells, staleness_of))
    freshest = {
        strength: min(group, key=lambda cell: (staleness_of(cell), cell.place.kappa))
        for strength, group in grouped(training, lambda cell: cell.strength)
    }
    test = [cell for cell in test if cell.strength in freshest]
    if not test:
        return None
    at, successes, trials = _columns([freshest[cell.strength] for cell in test], staleness_of)
    predicted = predict_success(successes, trials, at, response, [staleness_of(cell) for cell in test])
    _, observed, observed_trials = _columns(test, staleness_of)
    right, regrets = 0, []
    rated = list(zip(test, predicted.rate.tolist(), strict=True))
    for _, curve in grouped(rated, lambda pair: pair[0].place):
        best, chosen = max(curve, key=lambda pair: pair[0].success.mean)[0], max(curve, key=lambda pair: pair[1])[0]
        regrets.append(best.success.mean - chosen.success.mean)
        right += regrets[-1] == 0.0
    error = prediction_error(predicted, observed, observed_trials)
    return error, float(predicted.covered.mean()), len(regrets), right, float(np.mean(regrets))


def _columns(
    cells: Sequence[Aggregate], staleness_of: Callable[[Aggregate], float]
) -> tuple[list[float], list[float], list[float]]:
    """Staleness, successes and episodes of each cell."""
    return [staleness_of(c) for c in cells], [float(c.successes) for c in cells], [float(c.n) for c in cells]


# Execution modes that equation (3) holds for; with time-aligned execution a chunk takes another time.
_BY_EQUATION = ("synchronous", "naive", "roll_forward")


@dataclass(frozen=True)
class HeldOutTime:
    """A prediction of task time on a held-out machine: N from the others, the chunk from its timing (3, 4).

    Attributes:
        lever, task, idle: of the cells, in a world that stands still while the robot waits.
        machine: the held-out hardware and link.
        error: mean of ``|predicted / observed - 1|`` over its cells; worst: its maximum.
        predicted, observed: the settings of least task time over successes.
    """

    lever: str
    task: str
    idle: str
    machine: str
    error: float
    worst: float
    predicted: float
    observed: float


def hold_out_time(cells: Sequence[Aggregate]) -> list[HeldOutTime]:
    """Predicts task time in static worlds on every machine from the others, for each lever and task.

    In a static world N should not depend on the machine; the error measures how far it does. The time of a chunk's
    actions is taken from the other machines, its inference time is measured on this one.

    Args:
        cells: of a sweep.
    """
    predictions = []
    timed = [cell for cell in cells if cell.execution in _BY_EQUATION and cell.successes]
    static = [cell for cell in timed if cell.place.static]
    for (lever, task, idle), family in grouped(static, lambda c: (c.place.lever, c.place.task, c.place.idle)):
        for machine, test in grouped(family, lambda cell: cell.place.machine):
            pairs = [
                (cell, [other for other in family if other.strength == cell.strength and other is not cell])
                for cell in test
            ]
            times = {cell.strength: (_task_s(cell, others), cell.task_s) for cell, others in pairs if others}
            if len(times) > 1:
                errors = [abs(predicted / observed - 1.0) for predicted, observed in times.values()]
                best = [min(times, key=lambda strength: times[strength][which]) for which in (0, 1)]
                predictions.append(
                    HeldOutTime(lever, task, idle, machine, float(np.mean(errors)), float(np.max(errors)), *best)
                )
    return predictions


def _task_s(cell: Aggregate, others: Sequence[Aggregate]) -> float:
    """Task time of a cell, from the same setting on other machines."""
    chunks = float(np.average([other.chunks for other in others], weights=[other.successes for other in others]))
    # The last chunk is cut by the episode's end, so this is the mean over the executed share of its actions.
    action_s = float(np.mean([(other.chunk_s - other.stall_s) / other.execute for other in others]))
    return float(exact_task_s(chunks, cell.inference_s, action_s, cell.execute, overlap=cell.overlap))
