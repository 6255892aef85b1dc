"""``specact eval`` runs methods side by side on the same episodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table
from tyro.conf import Positional

from specact.cli.options import Flat, Maybe, Names, Options, Parts, Rare
from specact.cli.output import command_line, print_result, progress_bars, table_of
from specact.records import Count, InsideUnit, NotNegative, Positive, Seed

# Columns of the report's table of methods that are printed, under a short heading.
_SHOWN = {
    "success": "success", "score": "score", "sent": "sent", "true skip": "true skip", "gated loss": "loss",
    "action change": "change", "passes": "passes", "accepted per pass": "accepted", "full": "full",
    "ms per action": "ms/action",
}  # fmt: skip


@dataclass(frozen=True)
class Times(Options):
    """Accounted times, to model other machines; measured if not given."""

    draft_ms: Maybe[NotNegative] = None  # of a draft inference
    gate_ms: Maybe[NotNegative] = None  # of a gate's decision
    head_ms: Maybe[NotNegative] = None  # of the learned gate's head where it is the draft
    target_ms: Maybe[NotNegative] = None  # of a target inference
    kappa: Positive = 1.0  # factor on the computation times of the device


@dataclass(frozen=True)
class Details(Options):
    """Options that few need."""

    shard: Count = 20  # episodes that run in one batch; part of what makes a result reproducible to the last bit
    calibration_episodes: Count = 40  # per round, where a calibration has to be made first
    realtime: bool = False  # over real sockets: a server process of its own, behind a relay that behaves like the link
    deadline_ms: Positive = 200.0  # with --realtime: how long a step waits for the target
    mse: bool = False  # also measure each method's error along the demonstrations that were kept back in training
    data: Maybe[str] = None  # of these demonstrations: folder that the recipe's data paths are relative to
    demonstrations: Maybe[Count] = None  # at most so many of them


@dataclass(frozen=True, kw_only=True)
class Comparison(Options):
    """Methods that are compared."""

    out: Path  # run folder
    # also head_draft, target_on_device, uncertainty, learned, learned_action, oracle, MODULE:GATE; of a token policy
    # ar, specvla, kerv, heisd (docs/tokens.md); of a flow policy full, flash (docs/flash.md)
    methods: Names = ("draft", "target", "hybrid", "random", "adahi")
    gate_options: tuple[str, ...] = ()  # parameters of gates, NAME=VALUE or GATE.NAME=VALUE, such as alpha=0.3
    rate: InsideUnit = 0.6  # rate that gates are calibrated for; random gates run at the rate of their rival
    seed: Seed = 0  # random seed
    workers: Maybe[Count] = None  # processes; one per core if not given
    json: bool = False  # print the summary as JSON
    parts: Rare[Parts] = field(default_factory=Parts)

    def __post_init__(self) -> None:
        from specact.gates.settings import check_options
        from specact.lab.rollout.methods import load_method

        super().__post_init__()
        check_options(self.gate_options, [load_method(name).gate for name in self.methods])

    def report(self, summary: dict[str, Any], table: Table) -> None:
        """Prints the result."""
        print_result(self.json, summary, [table, *contrast_lines(summary), f"run folder: {self.out}"])


@dataclass(frozen=True)
class Eval(Options):
    """Run methods side by side on the same episodes, in virtual or real time; writes a run folder that resumes.

    Without a simulator: specact offline eval. More options (times, gates, real time, errors): --help-all.
    """

    pair: Positional[str]  # path or name of a pair, or MODULE:NAME
    options: Flat[Comparison]
    episodes: Count = 100  # episodes per method; episode k starts the same for all of them
    env: Maybe[str] = None  # environment, a name or MODULE:TASK; the pair's own if not given
    link: str = "wifi-paper"  # wifi-paper, lan, 5g, lte, loopback, ..., see specact proxy --help
    # where it runs: here, ray for a Ray cluster that is started here, or ray:ADDRESS; see docs/scale.md
    on: str = "here"
    times: Rare[Times] = field(default_factory=Times)
    details: Rare[Details] = field(default_factory=Details)

    def run(self) -> None:
        from specact.lab.evaluation.evaluation import Evaluation
        from specact.lab.evaluation.run import evaluate
        from specact.lab.rollout.pool import Pool

        options = self.options
        what = Evaluation(
            self.pair, self.env, options.methods, self.episodes, options.seed, options.rate, self.link,
            gate_options=options.gate_options, **vars(self.times), **vars(self.details), **vars(options.parts),
        )  # fmt: skip
        with Pool(options.workers, self.on) as pool, progress_bars() as update:
            summary = evaluate(what, options.out, update, pool, command=command_line())
        options.report(summary, summary_table(summary))


def summary_table(summary: dict[str, Any]) -> Table:
    """The methods of an evaluation side by side, narrow enough for 80 columns; without columns that no method has."""
    from specact.lab.report.tables import COLUMNS, NONE, networks_of

    methods: dict[str, dict[str, Any]] = summary["methods"]
    binary = all(m["score"]["mean"] == m["success"]["rate"] for m in methods.values())
    rows, notes = [{"method": name} for name in methods], list[str]()
    for head, hint, cell in COLUMNS:
        cells = [cell(metrics) for metrics in methods.values()]
        if head not in _SHOWN or set(cells) == {NONE} or (head == "score" and binary):
            continue
        notes += [] if head in ("success", "score") else [f"{_SHOWN[head]}: {hint}"]
        for row, found in zip(rows, cells, strict=True):
            row[_SHOWN[head]] = found if isinstance(found, str) else found[0][0]
            if head == "success":
                row["95 %"] = found[0][1].replace(" to ", "-")
    how = "measured over real sockets" if summary["realtime"] else "draft, link and target in virtual time"
    notes.append("measured in one process" if summary["link"] == "none" else how)
    networks = [f"{name} {text}" for name, text in networks_of(methods.values()).items()]
    notes += [f"parameters and time at batch 1: {'; '.join(networks)}"] if networks else []
    for least in next(iter(methods.values())).get("success_at", {}):
        shares = ", ".join(f"{name} {m['success_at'][least]['rate']:.3f}" for name, m in methods.items())
        notes.append(f"success with a score above {least}: {shares}")
    title = f"{summary['env']}: {summary['episodes']} paired episodes, link {summary['link']}"
    return table_of(title, rows, " · ".join(notes))


def contrast_lines(summary: dict[str, Any]) -> list[str]:
    """The paired contrasts as text; p values after Holm's correction over all of them."""
    lines = []
    for row in summary["contrasts"]:
        ends = ["error"] if "error" in row else ["success"] if row["score"] == row["success"] else ["success", "score"]
        parts = [
            f"{end} {row[end]['difference']:+.3f} [{row[end]['low']:+.3f}, {row[end]['high']:+.3f}], "
            f"p = {row[end]['p_holm']:.2g} ({row[end]['test']})"
            for end in ends
        ]
        lines.append(f"{row['first']} - {row['second']}: " + "; ".join(parts))
    if lines:
        lines.append(f"p is after Holm's correction over all contrasts above ({len(lines)}).")
    return lines
