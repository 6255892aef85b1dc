"""What came of fleets: success over their size, its contrasts, and the queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from experiments.figures import add_series, points_of
from experiments.fleet.robots import CHASE, DISCIPLINES, PAIRS
from experiments.measure import from_digits
from experiments.report import Picture, Report, Table, contrast_table, glossary, one_family, significant
from specact.lab.rollout.statistics import Contrast, bootstrap_interval, contrast

# Cells of robots without a link, at a server that answers one by one: in virtual time, and over sockets.
NEAR = "near"
# Disciplines of the picture, by the method in whose colour they are drawn.
SHOWN = {
    "draft": "draft", "hybrid": "late always", "random": "late random", "learned": "late learned",
    "adahi": "late adahi", "plain_random": "central random", "learned_action": "central learned",
}  # fmt: skip
OF_CORRECTOR = {
    "draft": "draft", "hybrid": "late always", "random": "late chance", "adahi": "late staleness",
    "plain_random": "late cadence",
}  # fmt: skip
# The same rate, chosen; what the server's choice adds; and what limits and requests are worth.
SELECTION = [("late staleness", "late chance")]
SELECTION += [(f"{ask}{score}", f"{ask}random") for ask in ("", "late ", "central ") for score in ("adahi", "learned")]
CENTRAL = [(f"central {score}", f"late {score}") for score in ("random", "adahi", "learned")]
LIMITS = [("late random", rival) for rival in ("late always", "random", "draft")]
CLOCK = [("late staleness", "late cadence"), ("late cadence", "late always"), ("late cadence", "draft")]
RIVALS = [*SELECTION, *CENTRAL, *LIMITS, *CLOCK]


def compared(first: Mapping[str, Any], second: Mapping[str, Any]) -> Contrast:
    """The paired contrast of two rows, on the robots and episodes that both ran."""
    won = [won_of(row) for row in (first, second)]
    robots, episodes = np.min([outcomes.shape for outcomes in won], axis=0)
    return contrast(*(outcomes[:robots, :episodes].ravel() for outcomes in won))


def report(results: Mapping[str, Any]) -> Report:
    """Every discipline at every size, the contrasts where the server is the bottleneck, and the picture."""
    near, results = results.get(NEAR, {}), {pair: results[pair] for pair in PAIRS if pair in results}
    cells = [
        (pair, int(size), name, cell)
        for pair, disciplines in results.items() for name, sizes in disciplines.items() for size, cell in sizes.items()
    ]  # fmt: skip
    rows = [
        {"pair": pair, "robots": size, "discipline": name, **cell, **success_of(won_of(cell))}
        for pair, size, name, cell in sorted(cells, key=lambda cell: cell[:2])
    ]
    at = {(row["pair"], row["robots"], row["discipline"]): row for row in rows}
    draft = {row["pair"]: row for row in rows if row["discipline"] == "draft"}
    busy = sorted({(pair, size) for pair, size, name, _ in cells if name in ("late random", "late cadence")})
    at |= {(pair, size, "draft"): draft[pair] for pair, size, *_ in cells}
    tests: list[tuple[str, str, str, Mapping[str, Any], Mapping[str, Any]]] = [
        (f"{pair}, {size} robots", first, second, at[pair, size, first], at[pair, size, second])
        for pair, size in busy for first, second in RIVALS
        if (pair, size, first) in at and (pair, size, second) in at
    ]  # fmt: skip
    tests += [
        (f"{NEAR}, {name}", "sockets", "virtual", ways["sockets"], ways["virtual"]) for name, ways in near.items()
    ]
    over = {name: ways["sockets"] for name, ways in near.items()} | ({"draft": draft["ball"]} if near else {})
    tests += [(f"{NEAR}, sockets", *pair, over[pair[0]], over[pair[1]]) for pair in RIVALS if set(pair) <= set(over)]
    family = one_family(
        {"on": on, "measure": "success", "first": first, "second": second, **asdict(compared(*rows))}
        for on, first, second, *rows in tests
    )
    success = Table(
        "success", "Success by discipline, pair and robots in a fleet, with 95 % intervals over robots. In the file "
        "also that of the worst tenth of robots; of inferences, requests, those that the target served, and replies in "
        "time; and how long 99 % of requests waited at most for the target, and for their reply [ms].",
        "pair | robots | discipline | success | worst tenth | asked | served | in time | queue | reply",
        "{pair} | {robots} | {discipline} | {success:ci2} | {worst:ci2} | {asked:.2f} | {served:.2f} | {in_time:.2f} | "
        "{queue_p99_ms:.0f?} | {reply_p99_ms:.0f?}", [row | {"won": None} for row in rows],
        "{discipline} | {pair}, {robots} | {success:ci2}",
    )  # fmt: skip
    sleeping = Table(
        "sockets", "Sixteen robots on ball at a target that answers one by one and sleeps for as long as a large one "
        "computes (synthetic), without a link, in real and in virtual time; lateness of 99 % of the steps [ms].",
        "discipline | time | success | asked | in time | lateness",
        "`{discipline}` | {way} | {success:ci2} | {asked:.2f} | {in_time:.2f} | {late_p99_ms:.0f?}",
        [{"discipline": name, "way": way, "late_p99_ms": None, **row, **success_of(won_of(row)), "won": None}
         for name, ways in near.items() for way, row in ways.items()],
    )  # fmt: skip
    pairs = list(results)

    def named(on: str) -> dict[str, Any]:
        return {f"{row['first']} - {row['second']}": row for row in family if row["on"] == on}

    def draw() -> Figure:
        figure = Figure(figsize=(4.8, 3.4 * len(pairs)), layout="constrained")
        for axes, pair in zip(np.ravel(figure.subplots(len(pairs))), pairs, strict=True):
            sizes, names = sorted({key[1] for key in at if key[0] == pair}), OF_CORRECTOR if pair == CHASE else SHOWN
            series = {
                style: points_of({size: at[pair, size, name]["success"] for size in sizes if (pair, size, name) in at})
                for style, name in names.items()
            }
            add_series(axes, series, "robots at one server", "success", pair, names)
            axes.set_xscale("log", base=2)
            axes.set_xticks(sizes, [str(size) for size in sizes])
        return figure

    fleet = won_of(rows[-1])
    facts: dict[str, Any] = {"episodes": fleet.size, "robots": len(fleet)}
    for name, chosen in {"selection": SELECTION, "central": CENTRAL, "limits": LIMITS[:1]}.items():
        part = [row for row in family if (row["first"], row["second"]) in chosen]
        facts[name] = {"all": len(part), "better": len(significant(part, 1)), "worse": len(significant(part, -1))}
    for pair, size in busy:  # the last one of a pair is of most robots
        by_name = {key[2]: row for key, row in at.items() if key[:2] == (pair, size)}
        facts[pair] = facts[f"{pair} {size}"] = by_name | {"most": size, "tests": named(f"{pair}, {size} robots")}
    facts[NEAR] = named(f"{NEAR}, sockets") | {
        name: named(f"{NEAR}, {name}") | {way: row | success_of(won_of(row)) for way, row in ways.items()}
        for name, ways in near.items()
    }
    tables = [success, sleeping, contrast_table(family), glossary(DISCIPLINES, "disciplines")]
    return Report(tables, facts, [Picture("fleet.svg", draw)])


def won_of(row: Mapping[str, Any]) -> NDArray[np.float64]:
    """Who won, ``[robots, episodes]``."""
    return np.array([from_digits(robot) for robot in row["won"]])


def success_of(won: NDArray[np.float64]) -> dict[str, Any]:
    """The mean over robots and over the worst tenth of them; the interval of the latter is of the worst of a sample."""
    robots, tenth = won.mean(1), -(-len(won) // 10)
    drawn = np.random.default_rng(0).integers(len(robots), size=(2000, len(robots)))
    low, high = np.quantile(np.sort(robots[drawn])[:, :tenth].mean(1), [0.025, 0.975])
    worst = {"mean": float(np.sort(robots)[:tenth].mean()), "low": float(low), "high": float(high)}
    return {"success": asdict(bootstrap_interval(robots)), "worst": worst}
