"""How well task time on one machine can be told from the others: as many chunks, each timed anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specact.lab.tised.aggregates import Aggregate, grouped
from specact.tised.timing import exact_task_s

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
