"""ADAHI's study as a report: the paper's figures beside ours, its claims one by one, and every number of every run."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.adahi.thresholds import EPISODES, RATE, spread
from experiments.grid import Experiment
from experiments.report import Metrics, Picture, Report, Table, between, contrast_table, named, one_family, span
from specact.lab.report.figures import style_of

# The paper's (kitchen, ball, swarm), human demonstrations (PushT), a hand (relocate), and an arm (Meta-World).
PAIRS = ("ball", "swarm", "kitchen", "pusht", "relocate", "peg")
DRAFTS = {"": "", "distilled": ", distilled draft", "undertrained": ", under-trained draft"}
RUNS = {"unlimited": ", no limit on skips", "time": ", over sockets"}
# Methods that look at more than ADAHI does; their contrasts stand in the report of the gates.
GATES = {"uncertainty", "learned", "learned_action", "oracle", "oracle_action", "random_learned", "head_random"}
PAPER = tomllib.loads(Path(__file__).with_name("paper.toml").read_text())
SHOWN = ("adahi", "hybrid", "target", "random", "draft")
_NAMES = "ADAHI | hybrid | target | random | draft"

Study = Mapping[tuple[str, str], Metrics]


def study_of(results: Mapping[str, Any]) -> Study:
    """The summary of every run, by bundle and run."""
    return {
        (bundle, run): summary for bundle, runs in results.items() if bundle != "thresholds"
        for run, summary in runs.items()
    }  # fmt: skip


def on_of(bundle: str, run: str, summary: Metrics) -> str:
    """A condition in words: pair, draft, rate."""
    pair, _, draft = bundle.partition("-")
    return f"{pair}{DRAFTS[draft]}, rate {summary['rate']:g}{RUNS.get(run.rpartition('-')[2], '')}"


def measures_of(summary: Metrics) -> tuple[str, ...]:
    """Success, and the score where it is another number."""
    binary = all(row["score"]["mean"] == row["success"]["rate"] for row in summary["methods"].values())
    return ("success",) if binary else ("success", "score")


def contrasts_of(study: Study, *, gates: bool) -> list[dict[str, Any]]:
    """The family of this report, or of that of the gates: all contrasts of their methods in virtual time."""
    return one_family(
        {**row, "on": on_of(bundle, run, summary), "measure": measure}
        for (bundle, run), summary in study.items() if not summary["realtime"]
        for row in summary["contrasts"]
        if gates == bool({row["first"], row["second"]} & GATES or row["first"] == "head_draft")
        for measure in measures_of(summary)
    )  # fmt: skip


def where(tests: Sequence[Metrics], first: str | tuple[str, ...], second: str, sign: int, *endings: str) -> str:
    """The pairs on which a corrected test finds a method better (1), worse (-1) or either (0), in words.

    ``endings`` follow the pair's name in ``on``; at a rate of 0.6 if none is given.
    """
    firsts = (first,) if isinstance(first, str) else first
    pairs: dict[str, list[str]] = {}
    for row in tests:
        pair, comma, ending = row["on"].partition(",")
        compared = row["first"] in firsts and row["second"] == second
        if (
            compared
            and comma + ending in (endings or (", rate 0.6",))
            and row["p_holm"] < 0.05
            and row["difference"] * sign >= 0
        ):
            pairs.setdefault(pair, []).append(row["measure"])
    texts = [f"`{pair}`" + (" (score)" if measures == ["score"] else "") for pair, measures in pairs.items()]
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if texts[1:] else texts) or "no pair"


def method_rows(study: Study) -> Iterator[dict[str, Any]]:
    """Every method of every run with all that was measured."""
    for (bundle, run), summary in study.items():
        for row in named(summary["methods"]):
            yield {
                "on": on_of(bundle, run, summary), "bundle": bundle, "run": run,
                **{key: summary[key] for key in ("episodes", "seed", "rate", "link", "realtime")}, **row,
                "gate": summary["gates"].get(row["name"]), "accepted": row.get("acceptance", {}).get("all"),
            }  # fmt: skip


def tables_of(study: Study, tabled: Mapping[str, Metrics]) -> list[Table]:
    """What is shown, of the runs at a rate of 0.6 as ``tabled``, and every number."""
    paper, errors, pairs = [], [], []
    for pair, summary in tabled.items():
        methods, measure = summary["methods"], measures_of(summary)[-1]
        if pair in PAPER:
            row, name = PAPER[pair], f"{pair}, paper"
            paper.append({"name": name, **{key: row[key] for key in SHOWN}, "sent": row["sent"]})
            errors.append({"name": name, **{key: row["mse"].get(key) for key in SHOWN}})
        here, sent = f"{pair}, here", methods["adahi"]["sent"]
        paper.append({"name": here, **{key: methods[key]["success"]["rate"] for key in SHOWN}, "sent": sent})
        errors.append({"name": here, **{key: methods[key].get("mse", {}).get("mean") for key in SHOWN}})
        cells = {key: methods.get(key, {}).get(measure) for key in (*SHOWN, "target_on_device", "head_draft")}
        alone = next(
            run["methods"]["draft"][measure] for (bundle, _), run in study.items() if bundle == f"{pair}-distilled"
        )
        pairs.append({"name": pair, "measure": measure, "episodes": summary["episodes"], **cells, "distilled": alone})
    sockets = [
        {"pair": bundle, "episodes": summary["episodes"], "asked": summary["methods"]["adahi"]["sent"],
         **{key: row["latency"]["per_action_ms"] for key, row in summary["methods"].items()}}
        for (bundle, run), summary in study.items() if summary["realtime"]
    ]  # fmt: skip
    hundredth = " | ".join(f"{{{key}:.3f}}" for key in SHOWN)
    return [
        Table(
            "pairs", "Success (ball, swarm) or score (subtasks of kitchen, coverage of PushT, steps at the target of "
            "relocate, share of the way of peg) with its interval, at 0.6. The distilled draft ran on fewer episodes.",
            "pair | ADAHI | random | hybrid | target on device | head as draft | distilled draft",
            "{name} | {adahi:ci2} | {random:ci2} | {hybrid:ci2} | {target_on_device:ci2} | {head_draft:ci2} "
            "| {distilled:ci2}", pairs,
        ),
        Table("paper", "Success, and the share of inferences that ask under ADAHI; the paper's beside ours.",
              f"pair | {_NAMES} | asks", f"{{name}} | {hundredth} | {{sent:.2f}}", paper),
        Table("mse", "Mean squared error of actions on demonstrations; the paper's scales are not ours.",
              f"pair | {_NAMES}", f"{{name}} | {hundredth}", errors),
        Table("sockets", "Milliseconds per action over real sockets on one machine, link `wifi-paper`; one run.",
              "pair | episodes | ADAHI | random | hybrid | target | target on device | learned",
              "{pair} | {episodes} | {adahi:.2f} | {random:.2f} | {hybrid:.2f} | {target:.2f} | {target_on_device:.2f} "
              "| {learned:.2f}", sockets),
        Table("methods", "Every method of every run, the gates and the drafts trained otherwise too.",
              rows=[{"gate_efficiency": None, "choice_efficiency": None, **row} for row in method_rows(study)]),
    ]  # fmt: skip


def threshold_table(rows: Mapping[str, list[dict[str, Any]]]) -> Table:
    """Which rates equations 9 and 10 as written lead to, over readings and fits."""
    heads = {"sampled": "the sampled code's rejection", "expected": "its expectation", "any": "rejection of any code",
          "fitted": "fitted rejection: the quantile"}  # fmt: skip
    cells = " | ".join(f"{{{name}[low]:.2f}} to {{{name}[high]:.2f}}" for name in heads)
    return Table(
        "thresholds", f"Where a rate of {RATE} is wanted, the share of decisions that ask, over five readings of "
        f"the deviation and two fits, on {min(EPISODES.values())} to {max(EPISODES.values())} other episodes, "
        "without a limit on skips. Columns: what F is the distribution of.",
        f"pair | {' | '.join(heads.values())} | undefined | near",
        f"{{pair}} | {cells} | {{undefined}} of {{of}} | {{met}}", list(spread(rows)),
    )  # fmt: skip


def report(results: Mapping[str, Any]) -> Report:
    """The report of ADAHI; the gates' has the rest of the study's contrasts."""
    study = study_of(results)
    tests, thresholds = contrasts_of(study, gates=False), threshold_table(results["thresholds"])
    tabled = {pair: study[pair, "table"] for pair in PAIRS if (pair, "table") in study}
    tables = {table.name: table for table in (*tables_of(study, tabled), thresholds)}
    runs = {pair: summary["methods"] for pair, summary in tabled.items()}
    fits = {pair: summary["calibration"]["deviation"] for pair, summary in tabled.items()}
    settings = {pair: summary["gates"]["adahi"] for pair, summary in tabled.items()}
    chosen = {pair: dict(row["options"])["reading"] for pair, row in settings.items()}
    ms = {pair: {key: row["latency"]["per_action_ms"] for key, row in run.items()} for pair, run in runs.items()}
    mse = {pair: {key: run[key]["mse"]["mean"] for key in ("adahi", "hybrid", "random")} for pair, run in runs.items()}
    sockets = {row["pair"]: 1 - row["adahi"] / row["hybrid"] for row in tables["sockets"].rows}
    by = {
        pair: {
            "saved": 1 - ms[pair]["adahi"] / ms[pair]["hybrid"],
            "random_saved": 1 - ms[pair]["random"] / ms[pair]["hybrid"], "sockets": sockets.get(pair),
            "kept": run["adahi"]["success"]["rate"] / run["hybrid"]["success"]["rate"],
            "skips": 100 * (run["adahi"]["true_skip_ratio"] - run["random"]["true_skip_ratio"]),
            "rank": fits[pair]["spearman"], "errors": mse[pair]["adahi"] / mse[pair]["hybrid"] - 1,
        }
        for pair, run in runs.items()
    }  # fmt: skip
    ranks = {pair: row["rank"] for pair, row in by.items()}
    # Contrasts of other families, and the readings that were compared there.
    gates, tokens = (Experiment.load(name) for name in ("gates", "tokens"))
    euclidean = gates.published.facts
    written = [row for rows in results["thresholds"].values() for row in rows if row["rejection"] != "fitted"]
    rates = [row["rate"] for row in written if row["rate"] is not None]
    facts: dict[str, Any] = {
        "euclidean": {pair: euclidean[f"{pair}_euclidean"] for pair in ("kitchen", "swarm", "ball", "pusht")},
        "tokens": tokens.published.facts["gate_adahi_random"],
        "limits": " and ".join(f"`{pair}` ({row['max_skips']})" for pair, row in settings.items() if row["max_skips"]),
        "chosen": " and ".join(f"`{reading}` on {pair}" for pair, reading in chosen.items() if reading != "euclidean"),
        "hybrid_errors": max(row["errors"] for row in by.values()),
        "written": span(rates), "missed": max(abs(rate - RATE) for rate in rates),
        **{f"written_{key}": sum(row[key] for row in thresholds.rows) for key in ("met", "of", "undefined")},
        "written_always": sum(row["outcome"] == "always" for row in written),
        "held": max(abs(fit["held_out_rate"] - RATE) for fit in fits.values()), "by": by,
        "better": where(tests, "adahi", "random", 1), "worse": where(tests, "adahi", "random", -1),
        "better_lower": where(tests, "adahi", "random", 1, ", rate 0.4"),
        "better_weak": where(tests, "adahi", "random", 1, ", under-trained draft, rate 0.6"),
        "behind": where(tests, "adahi", "hybrid", -1),
        "behind_lower": where(tests, "adahi", "hybrid", -1, ", rate 0.4"),
        "behind_lowest": where(tests, "adahi", "hybrid", -1, ", rate 0.2"), "lowest_rate": 0.2,
        "behind_weak": where(tests, "adahi", "hybrid", -1, ", under-trained draft, rate 0.6"),
        "above_head": where(tests, "adahi", "head_draft", 1), "hybrid_differs": where(tests, "hybrid", "target", -1),
        "device_differs": where(tests, "target_on_device", "hybrid", 0),
        "device_time": max(row["target_on_device"] / row["hybrid"] for row in ms.values()),
        "kept": span(row["kept"] for row in by.values()),
        "claimed": span(row["adahi"] / row["hybrid"] for row in PAPER.values()),
        "saved": span(row["saved"] for row in by.values()), "sockets": span(sockets.values()),
        "claimed_saved": PAPER["ball"]["saved"], "skips": span(row["skips"] for row in by.values()),
        "claimed_skips": span(100 * (adahi - random) for adahi, random in (row["skips"] for row in PAPER.values())),
        "lowest": min(ranks, key=lambda pair: ranks[pair]), "highest": max(ranks, key=lambda pair: ranks[pair]),
        "rank": span(ranks.values()), "errors": max(row["random"] / row["adahi"] - 1 for row in mse.values()),
        "logarithmic": sum(fit["logarithmic"]["r2"] > fit["linear"]["r2"] for fit in fits.values()), "pairs": len(fits),
        "rate": study["ball", "table"]["rate"], "lower": study["ball", "rate-0.4"]["rate"], "tests": len(tests),
        "weak": span(study[f"{pair}-undertrained", "table"]["methods"]["draft"]["success"]["rate"] for pair in PAIRS
                     if (f"{pair}-undertrained", "table") in study),
    }  # fmt: skip
    for pair, summary in tabled.items():
        for rival in ("random", "hybrid"):
            facts[f"{pair}_{rival}"] = between(tests, f"{pair}, rate 0.6", "adahi", rival, measures_of(summary)[-1])
    every = [*tables.values(), contrast_table(tests, family="all methods without a trained gate, in virtual time")]
    return Report(every, facts, [Picture("adahi.svg", lambda: draw(tests))], gates.elsewhere("readings/*"))


def draw(tests: Sequence[Metrics]) -> Figure:
    """ADAHI's differences from random and from hybrid on every pair."""
    figure = Figure(figsize=(4.8, 3.4), layout="constrained")
    axes = figure.subplots()
    for number, rival in enumerate(("random", "hybrid")):
        rows = [between(tests, f"{pair}, rate 0.6", "adahi", rival) for pair in PAIRS]
        colour, marker = style_of(rival)
        means, lows, highs = (np.array([row[key] for row in rows]) for key in ("difference", "low", "high"))
        heights = [place - 0.15 + 0.3 * number for place in range(len(PAIRS))]
        axes.errorbar(
            means, heights, xerr=[means - lows, highs - means], fmt=marker, color=colour, ms=5, elinewidth=1, capsize=2
        )
        axes.text(0.98, 0.97 - 0.08 * number, f"ADAHI - {rival}", color=colour, ha="right", va="top",
                  transform=axes.transAxes, fontsize=10)  # fmt: skip
    axes.axvline(0.0, color="#586372", lw=0.8)
    axes.set_yticks(range(len(PAIRS)), PAIRS)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set(xlabel="difference in success, 95 % interval")
    return figure
