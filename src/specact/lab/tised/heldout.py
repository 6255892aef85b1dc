"""How well a sweep's cells can be told from others: one machine, or one pace, held out at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specact.lab.tised.aggregates import Aggregate, grouped
from specact.tised.prediction import PredictionError, fit_response, predict_success, prediction_error, staleness
from specact.tised.timing import exact_task_s

Delay = Literal["stall_s", "age_s"]
_DELAYS: tuple[Delay, ...] = ("stall_s", "age_s")


@dataclass(frozen=True)
class HeldOut:
    """A prediction of one machine or pace from all others.

    Attributes:
        lever, task, idle: of which.
        held: what was held out: a machine, which is hardware and link, at one pace, or a pace.
        delay: what staleness was made of: the stall, as in equation (7), or the observation's age. Without overlap they
            are the same.
        error: of predicted success over the cells that were held out. Its noise is that of independent episodes; where
            the same ones are run everywhere, chance strikes both sides alike and less of it is to be seen.
        covered: share of these cells whose staleness lies within what was measured.
        spots: curves among them; right: how many of their best settings were named rightly.
        regret: success lost by taking the predicted setting in place of the observed best, mean over curves.
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

    The response to staleness comes from the baseline's cells, each setting's quality from its least stale cell. Of the
    cells held out only timing is used, which can be measured without the task. Levers with one setting are left out,
    and what leaves the response fewer than two stalenesses.

    A pace may make a task harder by more than what staleness costs; then it is predicted badly from other paces, and
    well from other machines.

    Args:
        cells: of a sweep.
        baselines: the strength of each lever at which it does nothing.
    """
    found = []
    for (lever, task, idle), family in grouped(cells, lambda c: (c.place.lever, c.place.task, c.place.idle)):
        if len({cell.strength for cell in family}) < 2:
            continue
        for held, known, tested in _splits(family):
            for delay in _DELAYS:
                result = _predict(known, tested, baselines[lever], delay)
                if result is not None:
                    found.append(HeldOut(lever, task, idle, held, delay, *result))
    return found


def _splits(family: Sequence[Aggregate]) -> Iterator[tuple[str, list[Aggregate], list[Aggregate]]]:
    """What is held out, the cells that are known, and those to predict; at pace 0 nothing gets stale by itself."""
    for pace, world in grouped(family, lambda cell: cell.place.pace):
        if pace > 0.0:
            for machine, tested in grouped(world, lambda cell: cell.place.machine):
                known = [cell for cell in world if cell.place.machine != machine]
                yield f"{machine} at pace {pace:g}", known, tested
            yield f"pace {pace:g}", [cell for cell in family if cell.place.pace != pace], world


def _predict(
    known: Sequence[Aggregate], tested: Sequence[Aggregate], baseline: float, delay: Delay
) -> tuple[PredictionError, float, int, int, float] | None:
    def moved(cell: Aggregate) -> float:
        return float(staleness(cell.place.pace, getattr(cell, delay)))

    response_cells = [cell for cell in known if cell.strength == baseline]
    if len({moved(cell) for cell in response_cells}) < 2:
        return None
    response = fit_response(*_columns(response_cells, moved))
    freshest = {
        strength: min(group, key=lambda cell: (moved(cell), cell.place.kappa))
        for strength, group in grouped(known, lambda cell: cell.strength)
    }
    tested = [cell for cell in tested if cell.strength in freshest]
    if not tested:
        return None
    at, successes, trials = _columns([freshest[cell.strength] for cell in tested], moved)
    predicted = predict_success(successes, trials, at, response, [moved(cell) for cell in tested])
    _, seen, tries = _columns(tested, moved)
    right, regrets = 0, []
    rated = list(zip(tested, predicted.rate.tolist(), strict=True))
    for _, curve in grouped(rated, lambda pair: pair[0].place):
        best, chosen = max(curve, key=lambda pair: pair[0].success.mean)[0], max(curve, key=lambda pair: pair[1])[0]
        regrets.append(best.success.mean - chosen.success.mean)
        right += regrets[-1] == 0.0
    error = prediction_error(predicted, seen, tries)
    return error, float(predicted.covered.mean()), len(regrets), right, float(np.mean(regrets))


def _columns(
    cells: Sequence[Aggregate], moved: Callable[[Aggregate], float]
) -> tuple[list[float], list[float], list[float]]:
    """Staleness, successes and episodes of each cell."""
    return [moved(c) for c in cells], [float(c.successes) for c in cells], [float(c.n) for c in cells]


# Equation (3) is theirs; where actions are played at the time they are for, a chunk's time is another.
_BY_EQUATION = ("synchronous", "naive", "roll_forward")


@dataclass(frozen=True)
class HeldOutTime:
    """A prediction of task time on a machine that was held out: N from the others, the chunk from its timing (3, 4).

    Attributes:
        lever, task, idle: of which, in a world that stands still while the robot waits.
        machine: hardware and link, what was held out.
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

    In a world that waits N should not depend on the machine; the error says how far it does. A chunk's actions take
    what they took on the others, its inference what was measured on this one.

    Args:
        cells: of a sweep.
    """
    found = []
    timed = [cell for cell in cells if cell.execution in _BY_EQUATION and cell.successes]
    static = [cell for cell in timed if cell.place.static]
    for (lever, task, idle), family in grouped(static, lambda c: (c.place.lever, c.place.task, c.place.idle)):
        for machine, tested in grouped(family, lambda cell: cell.place.machine):
            pairs = [
                (cell, [other for other in family if other.strength == cell.strength and other is not cell])
                for cell in tested
            ]
            times = {cell.strength: (_task_s(cell, others), cell.task_s) for cell, others in pairs if others}
            if len(times) > 1:
                errors = [abs(predicted / observed - 1.0) for predicted, observed in times.values()]
                best = [min(times, key=lambda strength: times[strength][which]) for which in (0, 1)]
                found.append(
                    HeldOutTime(lever, task, idle, machine, float(np.mean(errors)), float(np.max(errors)), *best)
                )
    return found


def _task_s(cell: Aggregate, others: Sequence[Aggregate]) -> float:
    """Task time of a cell, from the same setting on other machines."""
    chunks = float(np.average([other.chunks for other in others], weights=[other.successes for other in others]))
    # The last chunk is not played to its end, so a mean action counts here with the share of it that was.
    action_s = float(np.mean([(other.chunk_s - other.stall_s) / other.execute for other in others]))
    return float(exact_task_s(chunks, cell.inference_s, action_s, cell.execute, overlap=cell.overlap))
