"""ADAHI's study: tables, sweeps over the transmission rate, rejection over deviation, real time (docs/reproduce.md).

``docs/gates.png`` and ``docs/rejection.png`` are two figures of ``specact report OUT``: ``ball-success-over-rate.png``
and ``ball-rejection.png``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.adahi.tables import PAIRS, Study, tables_of, whole
from experiments.grid import DOCS, Cell, Part, Picture, Results, Run, evaluation_cell
from specact.lab.evaluation.run import Evaluation
from specact.lab.report.figures import legend_below, style_of
from specact.lab.rollout.methods import METHODS as GENERAL

HERE = Path(__file__).parent
PAGES = {
    "results.md": ("overview", "costs"), "reproduce.md": ("hours", "rows"), "gates.md": ("rates",),
    "speed.md": ("sockets",),
}  # fmt: skip
# ADAHI's ablations beside the general methods, in the order of the tables.
METHODS = {
    name: GENERAL[name]
    for name in (
        "draft", "head_draft", "target", "target_on_device", "hybrid", "random", "plain_random", "random_learned",
        "head_random", "adahi", "gated_target", "uncertainty", "learned", "learned_action", "oracle", "oracle_action",
    )
}  # fmt: skip

AT_RATE = (
    "hybrid", "random", "random_learned", "head_random", "adahi", "uncertainty", "learned", "learned_action", "oracle",
)  # fmt: skip
DISTILLED = (
    "draft", "head_draft", "hybrid", "random", "random_learned", "adahi", "learned", "learned_action", "oracle",
)  # fmt: skip
CURVE = ("random", "random_learned", "adahi", "uncertainty", "learned", "oracle")
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
        rates, at_rate: the other rates with a table of their own, and their episodes; curve, on_curve: those between.
        rejection: of ADAHI for rejection over deviation, where the table has too few.
        undertrained, distilled: with these drafts, the latter at the first of the other rates.
        left_out: methods that are left out because they take too long.
        lowest: rate that the limit on ADAHI's skips forces, as the pair recommends it.
    """

    table: int
    rates: tuple[float, ...]
    at_rate: int
    curve: tuple[float, ...]
    on_curve: int
    rejection: int
    real: int
    undertrained: int
    distilled: int = 0
    left_out: tuple[str, ...] = ()
    calibration: int = 40
    lowest: float = 0.2


_CHEAP = Size(500, (0.4, 0.2), 300, (0.3, 0.8), 150, rejection=1500, real=15, undertrained=300, distilled=300)
_OTHERS = Size(100, (0.4,), 100, (), 0, rejection=200, real=4, undertrained=50, distilled=60, calibration=20)
SIZES = {
    "ball": replace(_CHEAP, lowest=0.0),
    "swarm": replace(_CHEAP, table=300, curve=(), on_curve=0),
    # An episode has 450 inferences, so a few are enough for a threshold, and takes two seconds each: parts that other
    # pairs show as well are left out, and the table's episodes are enough for rejection over deviation.
    "kitchen": Size(
        30, (0.4,), 20, (), 0, rejection=0, real=0, undertrained=0,
        left_out=("plain_random", "gated_target", "learned_action", "oracle_action"), calibration=3,
    ),
    "pusht": Size(
        200, (0.4, 0.2), 150, (), 0, rejection=500, real=5, undertrained=60, distilled=100, calibration=20
    ),
    "relocate": _OTHERS, "peg": _OTHERS,
}  # fmt: skip


def plan(run: Run) -> Iterator[Cell]:
    """First the table of every pair, then the next run of every pair, so that a stopped study covers all."""
    by_pair = [list(_evaluations(pair, run)) for pair in PAIRS]
    for number in range(max(map(len, by_pair))):
        for name, evaluation in (cells[number] for cells in by_pair if number < len(cells)):
            yield evaluation_cell(name, evaluation, None)


def _evaluations(pair: str, run: Run) -> Iterator[tuple[str, Evaluation]]:
    """The cells of a pair with its own draft, and with its under-trained and its distilled one where these exist.

    ``scripts/make-pretrained`` brings back those that are not in a checkout.

    Learned gates and heads run where they were trained. Rates below the one that the limit on skips forces are run
    without ADAHI, the only gate with that limit.
    """
    size = SIZES[pair]

    def cell(name: str, methods: Sequence[str], episodes: int, rate: float = 0.6, **settings: Any) -> Any:
        kept = tuple(METHODS[method] for method in methods if method not in size.left_out)
        bundle = name.partition("/")[0]
        what = Evaluation(
            bundle, None, kept, episodes, run.seed, rate, calibration_episodes=size.calibration, **settings
        )
        return name, replace(what, shard=max(1, min(20, episodes // 8)))  # small shards keep all workers busy

    yield cell(f"{pair}/table", tuple(METHODS), size.table, **_imitation(pair, run))

    def at(rate: float) -> Any:
        ending, methods = ("", AT_RATE) if rate > size.lowest else ("-unlimited", UNLIMITED)
        return cell(f"{pair}/rate-{rate:g}{ending}", methods, size.at_rate, rate)

    yield at(size.rates[0])
    if size.distilled:
        yield cell(f"{pair}-distilled/rate-{size.rates[0]:g}", DISTILLED, size.distilled, size.rates[0])
    else:
        yield cell(f"{pair}-distilled/table", ("draft", "head_draft"), size.table)
    if size.real:
        yield cell(f"{pair}/real-time", REAL, size.real, realtime=True, deadline_ms=500.0)
    if size.rejection:
        yield cell(f"{pair}/rejection", ("adahi",), size.rejection)
    if size.undertrained:
        yield cell(f"{pair}-undertrained/table", UNDERTRAINED, size.undertrained)
    yield from map(at, size.rates[1:])
    for rate in size.curve:
        yield cell(f"{pair}/rate-{rate:g}", CURVE, size.on_curve, rate)


def _imitation(pair: str, run: Run) -> dict[str, Any]:
    """Settings that measure the error on demonstrations, of a scripted expert or in the run's folder of data."""
    files = pair not in SCRIPTED
    if run.quick or (files and run.data is None):
        return {}
    return {"mse": True, "data": str(run.data) if files else None, "demonstrations": 100}


def pages(results: Results) -> Iterator[Part | Picture]:
    """The marked tables of four pages of docs, study.md, and the picture of the pairs."""
    study = dict(sorted((f"{bundle}-{name}", one) for bundle, runs in results.items() for name, one in runs.items()))
    made = tables_of(study)
    for page, names in PAGES.items():
        yield from (Part(DOCS / page, name, made[name]) for name in names)
    yield Part(HERE / "study.md", "", "\n\n".join(whole(name, one) for name, one in study.items()) + "\n")
    yield Picture(DOCS / "pairs.png", partial(draw_pairs, study), dpi=150)


def draw_pairs(study: Study) -> Figure:
    """Success of the main methods on every pair at a rate of .4, with intervals."""
    names = ("draft", "head_draft", "random", "adahi", "learned", "learned_action", "hybrid")
    pairs = [
        pair for pair in PAIRS if f"{pair}-rate-0.4" in study and "learned" in study[f"{pair}-rate-0.4"]["methods"]
    ]
    figure = Figure(figsize=(8.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for number, method in enumerate(names):
        # Methods without a rate, except hybrid, are only in the table's run.
        run = "table" if method in ("draft", "head_draft") else "rate-0.4"
        found = {place: study[f"{pair}-{run}"]["methods"].get(method) for place, pair in enumerate(pairs)}
        success = {place: metrics["success"] for place, metrics in found.items() if metrics}
        x = [place + 0.11 * (number - (len(names) - 1) / 2) for place in success]
        bars = [[abs(one[end] - one["rate"]) for one in success.values()] for end in ("low", "high")]
        drawn = style_of(method)
        axes.errorbar(
            x, [one["rate"] for one in success.values()], bars, fmt=drawn.marker, color=drawn.colour,
            label=method.replace("_", " "), ms=6,
        )  # fmt: skip
    axes.set_xticks(range(len(pairs)), [f"{pair}\n{study[f'{pair}-rate-0.4']['episodes']}" for pair in pairs])
    axes.grid(visible=False, axis="x")
    axes.set_ylim(0.0, 1.02)
    axes.set(ylabel="success, 95 % interval", xlabel="pair, paired episodes")
    legend_below(figure, columns=len(names))
    return figure
