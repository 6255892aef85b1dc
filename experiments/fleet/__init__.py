"""One server, many robots: does it pay to select inferences, or is it enough to limit their rate?

Real policies in virtual time, in lock step by control step: the world does not wait, robots have phases of their own,
and all share one uplink and one target. A robot that waits for a reply holds; one with late verdicts executes its draft
until the verdict comes. A reply is due before the chunk's end; without one the draft is executed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from experiments.delay.corrected import training_cells
from experiments.fleet import robots, sockets, tables
from experiments.fleet.robots import CORRECTOR, DISCIPLINES, FLEETS, PAIRS, disciplines, fair_share
from experiments.grid import Cell, Run

report = tables.report


def plan(run: Run) -> Iterator[Cell]:
    """A cell per pair, discipline and size of the fleets; the draft asks nobody, and a small fleet may always ask."""
    needed = {CORRECTOR.needs, replace(CORRECTOR, method="first").needs}
    yield from (cell for cell in training_cells() if cell.name in needed)
    for size in reversed(FLEETS):
        for name in PAIRS:
            scarce = fair_share(name, size) < 1.0
            for discipline in disciplines(name):
                how = DISCIPLINES[discipline]
                if (scarce or how.score is None) and (size == 1 or how.asks != "never"):
                    yield Cell(f"{name}/{discipline}/{size}", partial(robots.measure, name, discipline, size, False))
    for discipline in sockets.SENT:
        virtual = partial(robots.measure, sockets.PAIR, discipline, sockets.ROBOTS, True)
        yield Cell(f"{tables.NEAR}/{discipline}/virtual", virtual)
        yield Cell(f"{tables.NEAR}/{discipline}/sockets", partial(sockets.measure, discipline))
