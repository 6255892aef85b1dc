"""The report of the gates: trained gates at every rate of the study, older runs of every variant, a frontier.

The runs at equal rate are those of ADAHI's study; :mod:`experiments.adahi` makes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from matplotlib.figure import Figure

from experiments.adahi.tables import PAIRS, Study, contrasts_of, on_of, study_of, where
from experiments.figures import Point, add_series
from experiments.grid import Experiment
from experiments.report import Picture, Report, Table, between, contrast_table, named, one_family, significant, span

RATES = ("0.2", "0.4", "0.6")
GATES = ("uncertainty", "learned", "learned_action")
SHOWN = ("random_learned", "adahi", "uncertainty", "learned", "learned_action", "head_random")
# Methods of the frontier: those that never ask, drawn a little apart, one that always asks; and those at every rate.
ENDS = {"draft": 0.0, "head_draft": -0.025, "target_on_device": 0.025, "hybrid": 1.0}
CURVES = ("random", "adahi", "learned")
SIGNS = {"better": 1, "worse": -1}
LABELS = {"head_draft": "head as draft", "target_on_device": "target on device"}


def rates_of(study: Study) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Condition, the methods of the pair's table, and the summary, of every rate in order."""
    for pair in PAIRS:
        for run in ("rate-0.2", "rate-0.2-unlimited", "rate-0.4", "table"):
            if (pair, run) in study:
                yield on_of(pair, run, study[pair, run]), study[pair, "table"]["methods"], study[pair, run]


def tables_of(study: Study, results: Mapping[str, Any]) -> list[Table]:
    """What is shown, and every number of the runs that only this report has."""

    def successes(summary: Mapping[str, Any], *names: str) -> dict[str, Any]:
        metrics = {name: summary["methods"].get(name, {}) for name in names}
        return {"episodes": summary["episodes"], **{name: row.get("success") for name, row in metrics.items()}}

    rates = [{"on": on, **successes(summary, *SHOWN, "oracle")} for on, _, summary in rates_of(study)]
    names = ("draft", "head_draft", "random_learned", "adahi", "learned", "learned_action", "hybrid")
    distilled = [
        {"pair": bundle.partition("-")[0], **successes(summary, *names)}
        for (bundle, _), summary in study.items() if bundle.endswith("-distilled")
    ]  # fmt: skip
    heads = [
        {"pair": pair, "measure": on, **{key: methods[key]["success"] for key in ("draft", "head_draft", "hybrid")},
         "learned": methods["learned"]["success"],
         **{f"{key}_parameters": methods["learned"]["cost"][f"{key}_parameters"] for key in ("draft", "head")},
         "draft_ms": methods["draft"]["cost"]["draft_ms"],
         **{f"{key}_ms": methods[key]["cost"]["gate_ms"] for key in ("adahi", *GATES) if key in methods}}
        for on, methods, summary in rates_of(study) if summary["rate"] == 0.6 for pair in [on.partition(",")[0]]
    ]  # fmt: skip
    score = " | ".join(f"{{{name}:ci2}}" for name in SHOWN)
    return [
        Table("rates", "Success at the rate asked for, 100 to 500 paired episodes (kitchen 30). `random_learned` and "
              "the head's codes verified at random have the rate, forced steps and limits of the learned gate.",
              "pair | random | ADAHI | uncertainty | learned | learned_action | head's codes at random",
              f"{{on}} | {score}", rates),
        Table("heads", "Success of the draft, of the gate's head as the draft (both never ask), of the learned gate at "
              "0.6, and of asking always; parameters of draft and head, milliseconds of a draft and of a decision.",
              "pair | draft | head as draft | learned | hybrid | parameters: draft, head | ms: draft, learned",
              "{pair} | {draft:ci2} | {head_draft:ci2} | {learned:ci2} | {hybrid:ci2} "
              "| {draft_parameters:,}, {head_parameters:,} | {draft_ms:.3f}, {learned_ms:.3f}", heads),
        Table("distilled", "Success with a draft distilled from the target, at 0.4 (kitchen: alone only).",
              "pair | draft | head as draft | random | learned | learned_action | hybrid",
              "{pair} | {draft:ci2} | {head_draft:ci2} | {random_learned:ci2} | {learned:ci2} | {learned_action:ci2} "
              "| {hybrid:ci2}", distilled),
        Table("variants", "Every gate on ball and swarm at 0.4, no limit on skips, random without a forced first step.",
              rows=list(cells_of(results["gates"]))),
        Table("readings", "ADAHI under each reading of equation 5 and random at its rate: success of ball and swarm, "
              "score of the others; seed 0, other episodes than the tables above.",
              rows=list(cells_of(results["readings"]))),
    ]  # fmt: skip


def cells_of(results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of a group of cells, which know their pair and name."""
    for pair, cells in sorted(results.items()):
        yield from ({"pair": pair, **row} for cell in cells.values() for row in named(cell))


def families_of(results: Mapping[str, Any]) -> dict[str, tuple[str, list[dict[str, Any]]]]:
    """The contrasts of the runs that only this report has: a family for each of their questions, in words."""
    variants = [
        {"on": f"{row['pair']}, every gate at 0.4", "measure": "success", "first": row["name"], "second": "random",
         **row["against_random"]}
        for row in cells_of(results["gates"]) if row["against_random"]
    ]  # fmt: skip
    readings = [
        {"on": f"{row['pair']}, {row['name']}", "measure": "score", "first": "adahi", "second": "random",
         **row["difference"]}
        for row in cells_of(results["readings"])
    ]  # fmt: skip
    chunks = [
        {**row, "on": "pusht-flow with a VQ draft, rate 0.4", "measure": measure}
        for row in results["chunks"]["contrasts"] for measure in ("success", "score")
    ]  # fmt: skip
    return {
        "variant_contrasts": ("every gate on ball and swarm against random", one_family(variants)),
        "reading_contrasts": ("the readings of equation 5 against random", one_family(readings)),
        "chunk_contrasts": ("the chunk pair's learned gate", one_family(chunks)),
    }  # fmt: skip


def report(results: Mapping[str, Any]) -> Report:
    """The gates at equal rate, and which variants were tried."""
    adahi = Experiment.load("adahi")
    study = study_of(adahi.stored())
    tests, families = contrasts_of(study, gates=True), families_of(results)
    tables = {table.name: table for table in tables_of(study, results)}
    variants, readings, chunks = (rows for _, rows in families.values())
    rates = [f", rate {rate}" for rate in RATES]
    efficiency = {
        gate: span(
            summary["methods"][gate]["gate_efficiency"] for on, _, summary in rates_of(study)
            if gate in summary["methods"] and "no limit" not in on
        )
        for gate in ("adahi", "learned")
    }  # fmt: skip
    facts: dict[str, Any] = {
        "tests": len(tests), "variants": len(variants), "readings": len(readings), "r2": 0.2, "r4": 0.4,
        "swarm_oracle": between(tests, "swarm, rate 0.4", "oracle", "random_learned"),
        "above_head": where(tests, "learned", "head_draft", 1),
        "head_below_hybrid": where(tests, "head_draft", "hybrid", -1),
        "above_head_at_random": where(tests, "learned", "head_random", 1, *rates),
        "uncertainty_above_adahi_2": where(tests, "uncertainty", "adahi", 1, rates[0]),
        "uncertainty_below_adahi_4": where(tests, "uncertainty", "adahi", -1, rates[1]),
        "distilled_above": where(
            tests, ("learned", "learned_action"), "random_learned", 1, ", distilled draft, rate 0.4"
        ),
        **{f"{gate}_efficiency": shares for gate, shares in efficiency.items()},
        **{f"{pair}_variants_{word}": sum(row["on"].startswith(pair) for row in significant(variants, sign))
           for pair in ("ball", "swarm") for word, sign in SIGNS.items()},
        **{f"{pair}_euclidean": between(readings, f"{pair}, euclidean", "adahi", "random", "score")
           for pair in ("kitchen", "swarm", "ball", "pusht")},
        **{f"chunks_{rival}": between(chunks, "pusht-flow with a VQ draft, rate 0.4", "learned", rival)
           for rival in ("random_learned", "hybrid")},
        "decision": span(row["learned_ms"] / row["draft_ms"] for row in tables["heads"].rows),
    }  # fmt: skip
    verdicts = [
        {"gate": gate, **{f"at_{rate}": "; ".join(
            f"{word}: {places}" for word, sign in SIGNS.items()
            for places in [where(tests, gate, "random_learned", sign, f", rate {rate}")] if places != "no pair") or "-"
            for rate in RATES}}
        for gate in ("uncertainty", "learned", "learned_action", "head_random", "oracle")
    ]  # fmt: skip
    verdict_table = Table(
        "verdicts", "Where a gate is shown to be better or worse than random with its rate, forced steps and limit, "
        f"in success unless said otherwise; after Holm's correction over the {len(tests)} contrasts of the study.",
        "gate | at 0.2 (`ball`) | at 0.4 (five pairs) | at 0.6 (six pairs)",
        "`{gate}` | {0[at_0.2]} | {0[at_0.4]} | {0[at_0.6]}", verdicts,
    )  # fmt: skip
    about = "all methods with trained gates, heads or oracles in the study, success and score"
    contrasts = [contrast_table(rows, name, family) for name, (family, rows) in families.items()]
    picture = Picture("frontier.svg", lambda: frontier(study))
    runs = adahi.elsewhere("[!t]*")  # of a pair; not of thresholds
    every = [*tables.values(), verdict_table, contrast_table(tests, family=about), *contrasts]
    return Report(every, facts, [picture], runs)


def frontier(study: Study) -> Figure:
    """Success over the share of inferences that ask, of all methods and controls, a panel per pair."""
    figure = Figure(figsize=(5.2, 8.4), layout="constrained")
    panels = figure.subplots(3, 2)
    for axes, pair in zip(panels.flat, PAIRS, strict=True):
        series: dict[str, list[Point]] = {}
        for _, _, summary in (rate for rate in rates_of(study) if rate[0].startswith(pair)):
            for method in (*CURVES, *ENDS):
                row = summary["methods"].get(method)
                if row is None or (method in ENDS and summary["rate"] != 0.6):
                    continue
                x, success = ENDS.get(method, row["sent"]), row["success"]
                series.setdefault(method, []).append(Point(x, success["rate"], success["low"], success["high"]))
        axes.set(xlim=(-0.12, 1.08), ylim=(-0.03, 1.08), xticks=(0, 0.5, 1))
        add_series(axes, series, "", "", pair, LABELS, lead=False)
    figure.supxlabel("share of inferences that ask", fontsize=10)
    figure.supylabel("success, 95 % interval", fontsize=10)
    return figure
