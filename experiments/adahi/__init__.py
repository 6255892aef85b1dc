"""ADAHI's study: methods at three rates on six pairs, with drafts trained otherwise, and over real sockets.

``specact report OUT`` draws rejection over deviation from the folder of a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.adahi.tables import PAIRS
from experiments.adahi.tables import report as report
from experiments.adahi.thresholds import thresholds
from experiments.grid import Cell, Run, evaluated, evaluation_cell
from specact.files import write_json
from specact.lab.data.generate import split_demonstrations
from specact.lab.evaluation.offline import demonstrations_of, run_open_loop
from specact.lab.evaluation.run import Evaluation, read_gates
from specact.load import load_pair

# ADAHI's ablations beside the general methods, in the order of the tables.
METHODS = (
    "draft", "head_draft", "target", "target_on_device", "hybrid", "random", "plain_random", "random_learned",
    "head_random", "adahi", "gated_target", "uncertainty", "learned", "learned_action", "oracle", "oracle_action",
)  # fmt: skip
AT_RATE = (
    "hybrid", "random", "random_learned", "head_random", "adahi", "uncertainty", "learned", "learned_action", "oracle",
)  # fmt: skip
DISTILLED = (
    "draft", "head_draft", "hybrid", "random", "random_learned", "adahi", "learned", "learned_action", "oracle",
)  # fmt: skip
UNLIMITED = ("random_learned", "head_random", "learned", "learned_action", "oracle")
# Pairs whose demonstrations a scripted expert makes; the others' were recorded.
SCRIPTED = ("ball", "swarm", "peg")
UNDERTRAINED = ("draft", "target", "hybrid", "random", "plain_random", "adahi", "uncertainty", "oracle")
REAL = ("draft", "head_draft", "target", "target_on_device", "hybrid", "random", "adahi", "learned")


@dataclass(frozen=True)
class Size:
    """Paired episodes per method of each part of one pair's study; 0 leaves a part out.

    Attributes:
        table: at a rate of .6; real: over real sockets; calibration: of a round, where a threshold has to be found.
        rates, at_rate: the other rates, and their episodes.
        undertrained, distilled: with these drafts, the latter at the first of the other rates.
        left_out: methods that are left out because they take too long.
        lowest: rate that the limit on ADAHI's skips forces, as the pair recommends it.
    """

    table: int
    rates: tuple[float, ...]
    at_rate: int
    real: int
    undertrained: int
    distilled: int = 0
    left_out: tuple[str, ...] = ()
    calibration: int = 40
    lowest: float = 0.2


_CHEAP = Size(500, (0.4, 0.2), 300, real=15, undertrained=300, distilled=300)
_OTHERS = Size(100, (0.4,), 100, real=4, undertrained=50, distilled=60, calibration=20)
SIZES = {
    "ball": replace(_CHEAP, lowest=0.0),
    "swarm": replace(_CHEAP, table=300),
    # An episode has 450 inferences, so a few are enough for a threshold, and takes two seconds each: parts that other
    # pairs show as well are left out.
    "kitchen": Size(
        30, (0.4,), 20, real=0, undertrained=0,
        left_out=("plain_random", "gated_target", "learned_action", "oracle_action"), calibration=3,
    ),
    "pusht": Size(200, (0.4, 0.2), 150, real=5, undertrained=60, distilled=100, calibration=20),
    "relocate": _OTHERS, "peg": _OTHERS,
}  # fmt: skip


def plan(run: Run) -> Iterator[Cell]:
    """First the table of every pair, then the next run of every pair, so that a stopped study covers all."""
    by_pair = [list(_evaluations(pair, run)) for pair in PAIRS]
    for number in range(max(map(len, by_pair))):
        yield from (cells[number] for cells in by_pair if number < len(cells))
    for pair in PAIRS:
        yield Cell(f"thresholds/{pair}", partial(thresholds, pair))


def _evaluations(pair: str, run: Run) -> Iterator[Cell]:
    """The cells of a pair with its own draft, and with its under-trained and its distilled one where these exist.

    ``scripts/make-pretrained`` brings back those that are not in a checkout.

    Learned gates and heads run where they were trained. Rates below the one that the limit on skips forces are run
    without ADAHI, the only gate with that limit.
    """
    size = SIZES[pair]

    def cell(name: str, methods: Sequence[str], episodes: int, rate: float = 0.6, **settings: Any) -> Cell:
        kept = tuple(method for method in methods if method not in size.left_out)
        bundle = name.partition("/")[0]
        what = Evaluation(
            bundle, None, kept, episodes, run.seed, rate, calibration_episodes=size.calibration, **settings
        )
        what = replace(what, shard=max(1, min(20, episodes // 8)))  # small shards keep all workers busy
        # The error on demonstrations, of a scripted expert or in the run's folder of data.
        if name == f"{pair}/table" and not run.quick and (pair in SCRIPTED or run.data is not None):
            return Cell(name, partial(imitated, what, None if pair in SCRIPTED else run.data))
        return evaluation_cell(name, what, None)

    yield cell(f"{pair}/table", METHODS, size.table)

    def at(rate: float) -> Cell:
        ending, methods = ("", AT_RATE) if rate > size.lowest else ("-unlimited", UNLIMITED)
        return cell(f"{pair}/rate-{rate:g}{ending}", methods, size.at_rate, rate)

    yield at(size.rates[0])
    if size.distilled:
        yield cell(f"{pair}-distilled/rate-{size.rates[0]:g}", DISTILLED, size.distilled, size.rates[0])
    else:
        yield cell(f"{pair}-distilled/table", ("draft", "head_draft"), size.table)
    if size.real:
        yield cell(f"{pair}/real-time", REAL, size.real, realtime=True, deadline_ms=500.0)
    if size.undertrained:
        yield cell(f"{pair}-undertrained/table", UNDERTRAINED, size.undertrained)
    yield from map(at, size.rates[1:])


def imitated(evaluation: Evaluation, data: Path | None, folder: Path, run: Run) -> dict[str, Any]:
    """An evaluation's summary, in which ``mse`` of a method is its error along 100 held-out demonstrations."""
    pair = load_pair(evaluation.source)
    _, episodes = split_demonstrations(demonstrations_of(pair), data)  # first, because they may be missing
    episodes = episodes.select(np.arange(min(100, len(episodes))))
    summary, gates = evaluated(evaluation, folder, run, None), read_gates(folder)
    for method in evaluation.resolved:
        result = run_open_loop(pair, method, gates[method.name], episodes, run.pool, run.seed)
        summary["methods"][method.name]["mse"] = result.summary
    write_json(folder / "summary.json", summary)  # where specact report finds it
    return summary
