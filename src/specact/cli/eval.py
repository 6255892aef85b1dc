"""``specact eval`` runs methods side by side on the same episodes, ``specact demo`` those that a pair is known by."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Table
from tyro.conf import Positional

from specact.cli.options import Maybe, Options, Parts, Rare
from specact.cli.output import command_line, print_result, progress_bars, table_of, value_at
from specact.errors import ConfigError
from specact.files import write_whole
from specact.gates.settings import check_options
from specact.pair import Pair
from specact.records import Count, InsideUnit, NotNegative, Positive, Seed

# Metrics of a method that are printed, on 80 characters, where there are some.
_SHOWN = {
    "method": "method", "success.rate": "success", "success.low": "low", "success.high": "high", "score.mean": "score",
    "sent": "sent", "true_skip_ratio": "true skip", "gated_loss": "loss", "action_change_loss": "change",
    "passes": "passes", "accepted_per_pass": "accepted", "full": "full", "latency.per_action_ms": "ms/action",
}  # fmt: skip
METHODS = ("draft", "target", "hybrid", "random", "adahi")
# Of flow and token policies; the first two need no drafter that was trained for the target.
FLOW, TOKENS = ("full", "full_2", "flash", "unchecked"), ("ar", "strict_last", "specvla", "kerv")

# Those of a demo of action codes.
_DEMO = ("method", "success.rate", "success.low", "success.high", "sent", "latency.per_action_ms")
# What needs no server, in words; and how much less success still counts as as much.
_ALONE = {
    "target_on_device": "the target on the device", "head_draft": "the head as draft", "draft": "the draft",
}  # fmt: skip
_MARGIN = 0.15


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
    deadline_ms: Maybe[Positive] = None  # with --realtime: how long a step waits for the target; 200 if not given

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.deadline_ms is not None and not self.realtime:
            raise ConfigError("--deadline-ms is for real sockets; add --realtime, or leave it out")


@dataclass(frozen=True, kw_only=True)
class Comparison(Options):
    """Methods that are compared."""

    pair: Positional[str]  # path or name of a pair, or MODULE:NAME
    out: Maybe[Path] = None  # run folder; runs/eval-PAIR if not given
    # also head_draft, target_on_device, uncertainty, learned, learned_action, oracle, MODULE:GATE; of a token policy
    # ar, specvla, kerv, heisd; of a flow policy full, flash
    methods: str = ",".join(METHODS)
    gate_options: tuple[str, ...] = ()  # parameters of gates, NAME=VALUE or GATE.NAME=VALUE, such as alpha=0.3
    rate: InsideUnit = 0.6  # rate that gates are calibrated for; random gates run at the rate of their rival
    seed: Seed = 0  # random seed
    workers: Maybe[Count] = None  # processes; one per core if not given
    json: bool = False  # print the summary as JSON
    parts: Rare[Parts] = field(default_factory=Parts)

    def __post_init__(self) -> None:
        from specact.lab.rollout.methods import load_method

        super().__post_init__()
        check_options(self.gate_options, [load_method(name).gate for name in self.names])

    @property
    def names(self) -> tuple[str, ...]:
        """The methods."""
        return tuple(filter(None, map(str.strip, self.methods.split(","))))

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.out or Path("runs") / f"{type(self).__name__.lower()}-{Path(self.pair).name}"

    def report(self, summary: dict[str, Any], table: Table) -> None:
        """Prints the result."""
        print_result(self.json, summary, [table, *contrast_lines(summary), f"run folder: {self.folder}"])


@dataclass(frozen=True, kw_only=True)
class Eval(Comparison):
    """Run methods side by side on the same episodes, in virtual or real time; writes a run folder that resumes.

    Without a simulator: specact offline eval. More options (times, gates, real time): --help-all.
    """

    episodes: Count = 100  # episodes per method; episode k starts the same for all of them
    env: Maybe[str] = None  # environment, a name or MODULE:TASK; the pair's own if not given
    link: str = "wifi-paper"  # wifi-paper, lan, 5g, lte, loopback, ..., see specact proxy --help
    # where it runs: here, ray for a Ray cluster that is started here, or ray:ADDRESS; see docs/how-to/scale.md
    on: str = "here"
    times: Rare[Times] = field(default_factory=Times)
    details: Rare[Details] = field(default_factory=Details)

    def run(self) -> None:
        from specact.lab.evaluation.run import Evaluation, evaluate
        from specact.lab.rollout.pool import Pool

        what = Evaluation(
            self.pair, self.env, self.names, self.episodes, self.seed, self.rate, self.link,
            gate_options=self.gate_options, **vars(self.times), **vars(self.parts),
            **vars(self.details) | {"deadline_ms": self.details.deadline_ms or 200.0},
        )  # fmt: skip
        with Pool(self.workers, self.on) as pool, progress_bars() as update:
            summary = evaluate(what, self.folder, update, pool, command=command_line())
        self.report(summary, summary_table(summary))


def summary_table(summary: dict[str, Any], columns: Sequence[str] = tuple(_SHOWN)) -> Table:
    """The methods of an evaluation side by side."""
    from specact.lab.report.tables import networks_of

    methods: dict[str, dict[str, Any]] = summary["methods"]
    rows = [{"method": name, **metrics} for name, metrics in methods.items()]
    binary = all(m["score"]["mean"] == m["success"]["rate"] for m in methods.values())
    headings = {
        name: _SHOWN[name] for name in columns
        if any(value_at(row, name) is not None for row in rows) and not (binary and name == "score.mean")
    }  # fmt: skip
    how = "measured over real sockets" if summary["realtime"] else "draft, link and target in virtual time"
    notes = ["measured in one process" if summary["link"] == "none" else how, "low, high: 95 % interval of success"]
    networks = [f"{name} {text}" for name, text in networks_of(methods.values()).items()]
    notes += [f"parameters and time at batch 1: {'; '.join(networks)}"] if networks else []
    for least in next(iter(methods.values())).get("success_at", {}):
        shares = ", ".join(f"{name} {m['success_at'][least]['rate']:.3f}" for name, m in methods.items())
        notes.append(f"success with a score above {least}: {shares}")
    title = f"{summary['env']}: {summary['episodes']} paired episodes, link {summary['link']}"
    return table_of(title, rows, headings, " · ".join(notes))


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


@dataclass(frozen=True)
class Demo(Options):
    """Run draft, target, hybrid, random and ADAHI on the same simulated episodes, and say what this shows.

    Beside them what needs no server: the target on the device, and the learned gate's head as the draft. For a token
    policy or a flow policy, compare its decodings, such as Spec-VLA, KERV and FLASH.
    """

    pair: Positional[str] = "ball"  # path or name of a bundle
    episodes: Count = 60  # episodes per method
    seed: Seed = 0  # random seed
    out: Maybe[Path] = None  # run folder; a new one under runs/ if not given
    workers: Maybe[Count] = None  # processes; one per core if not given
    json: bool = False  # print the summary as JSON

    def run(self) -> None:
        from specact.lab.evaluation.run import Evaluation, evaluate
        from specact.lab.rollout.pool import Pool
        from specact.load import load_pair

        methods = _methods_of(load_pair(self.pair))
        folder = self.out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
        with Pool(self.workers) as pool, progress_bars() as update:
            what = Evaluation(self.pair, None, methods, self.episodes, self.seed)
            summary = evaluate(what, folder, update, pool, command=command_line())
        pair_of_codes = "adahi" in summary["methods"]
        columns = _DEMO if pair_of_codes else tuple(_SHOWN)
        lines: list[str | Table] = [summary_table(summary, columns), *contrast_lines(summary)]
        if pair_of_codes:
            if (film := _film(folder)) is not None:
                summary |= {"shown": str(film[0]), "choice": film[1]}
                lines += [f"film: {film[0]}", film[1]]
            summary["conclusion"] = conclusion(summary)
        print_result(self.json, summary, [*lines, f"run folder: {folder}", *filter(None, [summary.get("conclusion")])])


def _methods_of(pair: Pair[Any]) -> tuple[Any, ...]:
    """What a pair is known by; of action codes ADAHI, compared with all others in one family of contrasts."""
    from specact.families.codes.pair import CodeParts
    from specact.families.tokens.pair import TokenParts
    from specact.gates.learned import has_fitting_head
    from specact.lab.rollout.methods import load_method
    from specact.systems.flow import FlowParts

    if isinstance(pair.parts, FlowParts):
        return FLOW if pair.parts.block is not None else FLOW[:2]
    if isinstance(pair.parts, TokenParts):
        return TOKENS if pair.parts.drafters is not None else TOKENS[:2]
    has_head = isinstance(pair.parts, CodeParts) and has_fitting_head(pair)
    alone = [name for name in _ALONE if has_head or name != "head_draft"]
    methods = [replace(load_method(name), rivals=()) for name in dict.fromkeys((*METHODS[:-1], *alone))]
    return *methods, replace(load_method("adahi"), rivals=("hybrid", "random", *alone))


def conclusion(summary: dict[str, Any]) -> str:
    """What a demo shows in words; a difference is called one only where its corrected test says so.

    What needs no server does as well where the interval of the difference allows no more than :data:`_MARGIN`.
    """
    methods, episodes, words, near = summary["methods"], summary["episodes"], dict[str, str](), list[str]()
    for row in summary["contrasts"]:
        test, second = row["success"], row["second"]
        more = "more" if test["difference"] > 0 else "less"
        words[second] = f"succeeds {more} often than" if test["p_holm"] < 0.05 else "is not shown to differ from"
        # Without a difference in n episodes, its rate is below 3 / n at 95 %.
        if second in _ALONE and max(test["high"], 3 / episodes) <= _MARGIN:
            near.append(second)
    adahi = methods["adahi"]
    text = (
        f"In these {episodes} episodes ADAHI asks the server at {adahi['sent']:.0%} of the inferences. In "
        f"success it {words['hybrid']} asking always, and {words['random']} asking as often at random. "
    )
    if near:
        named = " and ".join(f"{_ALONE[name]} ({methods[name]['success']['rate']:.2f})" for name in near)
        text += f"Without a server, {named} {'do' if len(near) > 1 else 'does'} as well to within {_MARGIN} (ADAHI "
        text += f"{adahi['success']['rate']:.2f}): on this task you need no server"
        return f"{text}{' if your device can run the target' * (near == ['target_on_device'])}."
    if all(words[name].startswith("succeeds more") for name in _ALONE if name in words):
        return f"{text}It succeeds more often than everything that needs no server, so here a server helps."
    return f"{text}The episodes are too few to say whether a server is needed."


def _film(folder: Path) -> tuple[Path, str] | None:
    """The film of an episode, and why this one; None if this machine cannot make it."""
    try:
        from specact.lab.evaluation.runs import find_runs
        from specact.lab.report.film import show_film

        film = show_film(find_runs([folder])[0][0], ("draft", "adahi", "hybrid"))
    except (ModuleNotFoundError, ConfigError):
        return None
    write_whole(folder / "film.webm", film.video)
    return folder / "film.webm", film.why
