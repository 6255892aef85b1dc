"""What a gate could gain at most, and what the scores that there are would gain, from branched states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.figures import points_of
from experiments.grid import Experiment
from experiments.measure import from_digits, paired
from experiments.report import Picture, Report, Table, contrast_table, one_family, under, verdict
from experiments.value import heads
from experiments.value.settings import SETTINGS
from experiments.value.targets import METAWORLD, SHOWN, draw, series_of
from experiments.value.targets import report as compared
from specact.lab.rollout.statistics import bootstrap_interval, wilson
from specact.types import Floats

ORACLE, HEAD, PRIVILEGED = "value oracle", "value head", "privileged head"
SHUFFLED, SCHEDULE, PERIODIC, DRAFT = "shuffled oracle", "schedule", "periodic", "distilled draft"
DEAD, SAMPLES = 0.05, 1000
HEADS = list(heads.all_of("summary"))
CONTROLS = [(HEAD, other) for other in ("deviation", "shuffled head", "time head", "history head", SCHEDULE, PERIODIC)]
CONTROLS += [(PRIVILEGED, HEAD), (HEAD, DRAFT)]


def gain(score: Floats, value: Floats, rate: float, inferences: float) -> float:
    """``N mean((g - rate) v)``: success over random of a gate g that asks where the score is largest, to first order.

    The performance difference lemma with the states and the continuations of the base gate. ``score`` and ``value`` are
    of the sampled states, ``[S]``; ties ask with equal probability; ``inferences`` is N, of an episode.
    """
    score, wanted = np.nan_to_num(score, nan=np.inf), rate * len(score)
    threshold = np.sort(score)[::-1][int(np.ceil(wanted)) - 1]
    above, tied = score > threshold, score == threshold
    asks = above + tied * (wanted - above.sum()) / tied.sum()
    return float(inferences * np.mean((asks - rate) * value))


def split_gain(first: Floats, values: Floats, rate: float, inferences: float) -> float:
    """The gain of the oracle: it chooses on one half of the continuations and is valued on the other, both ways.

    ``first`` and ``values`` are differences ``[S, K]``, of which the first choose.
    """
    halves = first[:, ::2].mean(1), first[:, 1::2].mean(1)
    return 0.5 * sum(gain(halves[half], values[:, 1 - half :: 2].mean(1), rate, inferences) for half in (0, 1))


def bound(values: Floats, rate: float, inferences: float) -> float:
    """``N sqrt(rate (1 - rate) Var v)``, at least the first-order gain of any gate (Cauchy and Schwarz).

    Var v is estimated without the noise of the continuations ``[S, K]``: what their means vary less what it explains.
    """
    noise = values.var(axis=1, ddof=1).mean() / values.shape[1]
    return float(inferences * np.sqrt(rate * (1.0 - rate) * max(0.0, values.mean(1).var(ddof=1) - noise)))


def summary(
    episodes: NDArray[np.int64], scores: Mapping[str, Floats], values: Floats, rate: float, inferences: float
) -> dict[str, Any]:
    """Gains by score, the bound, and the mean value, each with a 95 % bootstrap interval over episodes."""
    mean = values.mean(1)
    gains: dict[str, Callable[[NDArray[np.int64]], float]] = {
        name: lambda at, score=score: gain(score[at], mean[at], rate, inferences)  # type: ignore[misc]
        for name, score in scores.items()
    }
    gains[ORACLE] = lambda at: split_gain(values[at], values[at], rate, inferences)
    gains["bound"] = lambda at: bound(values[at], rate, inferences)
    gains["value"] = lambda at: float(mean[at].mean())
    rows = [np.flatnonzero(episodes == number) for number in np.unique(episodes)]
    rng, result = np.random.default_rng(0), dict[str, Any](states=len(values))
    drawn = [np.concatenate([rows[at] for at in rng.integers(len(rows), size=len(rows))]) for _ in range(SAMPLES)]
    for name, estimate in gains.items():
        low, high = np.quantile([estimate(sample) for sample in drawn], [0.025, 0.975])
        result[name] = {"mean": estimate(np.arange(len(values))), "low": float(low), "high": float(high)}
    shuffled = [split_gain(rng.permutation(values), values, rate, inferences) for _ in range(SAMPLES)]
    low, high = np.quantile(shuffled, [0.025, 0.975])
    return result | {SHUFFLED: {"mean": float(np.mean(shuffled)), "low": float(low), "high": float(high)}}


def report(results: Mapping[str, Any]) -> Report:
    """Headroom, gains and the picture."""
    cells = [(name, row) for name, rates in results["oracle"].items() for row in rates.values()]
    cells.sort(key=lambda cell: (cell[0], cell[1]["rate"]))
    rows = [{"pair": name, **row, "random": vars(wilson(row["success"], row["episodes"]))} for name, row in cells]
    for row in rows:
        row["left"] = {
            "mean": 1 - row["random"]["mean"], "low": 1 - row["random"]["high"], "high": 1 - row["random"]["low"]
        }  # fmt: skip
        row["ceiling"] = min(row["left"]["high"], row["bound"]["high"])
        row["verdict"] = "dead" if row["ceiling"] < DEAD else "open"
    headroom = Table(
        "headroom", "A row per pair and rate: success of random over its episodes; what is left to 1; the bound on the "
        "first-order gain of any gate; the oracle's, chosen and valued on different continuations; 95 % intervals over "
        "episodes; and the mean and 95 % range of a thousand oracles with values shuffled among states.",
        "pair | rate | states | random | left | bound | value oracle | shuffled | upper end | gating",
        "{pair} | {rate} | {states} | {random:ci2} | {left:ci2} | {bound:ci2} | {value oracle:+ci2} | "
        "{shuffled oracle:+ci2} | {ceiling:.2f} | {verdict}", rows,
    )  # fmt: skip
    gains = Table(
        "gains", "First-order gain over random of asking where a score is largest, on the states of `headroom`, with "
        "95 % intervals over episodes; no test. The head is fitted on other episodes.",
        "pair | rate | deviation | uncertainty | learned | rejection oracle | value head",
        "{pair} | {rate} | {deviation:+ci2} | {uncertainty:+ci2} | {learned:+ci2} | {rejection:+ci2} | "
        "{value head:+ci2}", rows,
    )  # fmt: skip
    # The deviation has the colour of ADAHI, whose score it is.
    styles = {"adahi": "deviation", **{name: name for name in ("learned", "rejection", HEAD, ORACLE)}}
    pairs = list(dict.fromkeys(row["pair"] for row in rows))
    gained = {
        pair: {
            style: points_of({row["rate"]: row[name] for row in rows if row["pair"] == pair})
            for style, name in styles.items()
        } for pair in pairs
    }  # fmt: skip
    # By what is said of the rates: of a further training, or of another pair.
    named = {name: name[5:] for name in sorted(results) if name.partition("-")[0] == "gate"}
    on = {name: f", {'training ' * end.isdigit()}{end}" if end else "" for name, end in named.items()}
    loops = {title: closed_loop(results[name], title) for name, title in on.items()}
    tests = one_family([test for contrasts, _ in loops.values() for test in contrasts])
    gates = [row for _, loop in loops.values() for row in loop]
    contrasts, further = closed_loop(results["fresh"], ", new episodes")
    retests = one_family(contrasts)
    learnt = []
    for rate, cell in results["heads"].items():
        sees = {name: head.about for name, head in heads.all_of(cell["chosen"]).items()}
        sees[ORACLE] = "half of the continuations; it is valued on the others"
        names = ("deviation", "uncertainty", "learned", "rejection", *HEADS, ORACLE)
        learnt += [{"wanted": rate, "score": name, "sees": sees.get(name, "-"), **cell[name]} for name in names]
    facts: dict[str, Any] = {
        "gated": gates[0]["episodes"], "heads": results["heads"],
        "gates": {f"{row['gate']} {row['on']}": row for row in gates},
        "again": {f"{row['gate']} {row['rate']}": row for row in further},
        "retest": {f"{row['first']} - {row['second']} {row['on'].partition(',')[0]}": row for row in retests},
        "greedy": {f"{row['second']} {row['on']}": row for row in tests if row["first"] == ORACLE},
        "test": {f"{row['first']} - {row['second']} {row['on']}": row for row in tests},
        "cells": len(rows), "threshold": DEAD, "dead": sum(row["verdict"] == "dead" for row in rows),
        "states": sum(row["states"] for row in rows),
    }  # fmt: skip
    trained = [f"0.2{title}" for title in loops if title[2:] not in pairs]
    facts |= {"trainings": len(trained), "worse": {
        gate: sum(verdict(facts["test"][f"{gate} - random {on}"]) == "worse than" for on in trained)
        for gate in ("rejection", "learned", "uncertainty", "deviation")
    }}  # fmt: skip
    for pair in pairs:
        rates = [row for row in rows if row["pair"] == pair]
        facts[pair] = {"rates": len(rates), "beyond": sum(row[ORACLE]["low"] > row[SHUFFLED]["high"] for row in rates)}
    closed = Table(
        "gates", f"Gates in closed loop, on swarm if no pair is named, on the same {facts['gated']} episodes; others "
        "at the rate that the greedy gate of the oracle had. Thresholds are of other episodes. 95 % intervals.",
        "wanted rate | gate | asked | success", "{on} | {gate} | {asked:.3f} | {success:ci2}", gates,
    )  # fmt: skip
    fresh = Table(
        "fresh", f"Gates in closed loop on swarm, on {further[0]['episodes']} episodes after the first hundred, on "
        "which choices were made; of heads the mean of seeds.", "wanted rate | gate | asked | success",
        "{rate} | {gate} | {asked:.3f} | {success:ci2}", further,
    )  # fmt: skip
    fitted = Table(
        "heads", "First-order gain over random at the rate of the oracle's greedy gate, on states of its path and of "
        "random's, with 95 % intervals over episodes; no test. Heads are fitted on other episodes; the mean of seeds.",
        "rate | score | it sees | gain", "{wanted} | {score} | {sees} | {0:+ci2}", learnt,
    )  # fmt: skip
    knows = [(setting, compared(setting, results[setting.name])) for setting in SETTINGS if setting.name in results]
    facts |= {setting.name: report.facts for setting, report in knows}
    libero, adahi = (Experiment.load(name) for name in ("libero", "adahi"))
    facts |= {"libero": libero.published.facts, "alone": adahi.stored()["ball"]["table"]["methods"]["head_draft"]}
    tables = [headroom, gains, fitted, closed, contrast_table(tests), fresh, contrast_table(retests, "fresh-contrasts")]
    tables += [table for _, report in knows for table in report.tables]
    shown = {
        f"the target knows {setting.knows}": series_of(report.tables[0].rows)
        for setting, report in knows if setting.suite is METAWORLD  # on LIBERO nothing is left to gain
    }  # fmt: skip
    succeeded = {
        title[2:] if title[2:] in pairs else f"swarm{title}": {
            style: points_of({row["asked"]: row["success"] for row in loop if row["gate"] == name})
            for style, name in {"random": "random", **styles}.items() if name != HEAD
        } for title, (_, loop) in loops.items()
    }  # fmt: skip
    pictures = [
        Picture("knows.svg", partial(draw, shown, "success", SHOWN)),
        Picture("value-loop.svg", partial(draw, succeeded, "success", styles)),
        Picture("value.svg", partial(draw, gained, "first-order gain over random", styles)),
    ]  # fmt: skip
    elsewhere = libero.elsewhere("libero-spatial-state/full") | libero.elsewhere("libero-spatial-flow-60/full")
    return Report(tables, facts, pictures, elsewhere | adahi.elsewhere("ball/table"))


def closed_loop(rates: Mapping[str, Any], suffix: str = "") -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Contrasts of the greedy gate with all others, of these with random, of heads; and a row per rate and gate."""
    rows, tests = [], []
    for rate, gates in rates.items():
        won = {}
        for gate in sorted(gates, key=lambda gate: bool(gate != ORACLE)):
            row = gates[gate]
            parts = [row] if "won" in row else [row[part] for part in sorted(row)]
            episodes = [from_digits(part["won"]) for part in parts]
            won[gate] = np.concatenate(episodes) if gate == ORACLE else np.mean(episodes, axis=0)
            single = len(parts) == 1 or gate == ORACLE
            interval = wilson(int(won[gate].sum()), len(won[gate])) if single else bootstrap_interval(won[gate])
            share = sum(part["asked"] for part in parts) / sum(part["inferences"] for part in parts)
            row = {"gate": gate, "success": vars(interval), "asked": share, "episodes": len(won[gate])}
            rows.append({"rate": rate, "on": rate + suffix, **row})
        pairs = [(ORACLE, name) for name in won if name != ORACLE] if ORACLE in won else []
        pairs += [(name, "random") for name in won if name not in (ORACLE, "random", DRAFT)]
        pairs += [pair for pair in CONTROLS if set(pair) <= set(won)]
        tests += under(f"{rate}{suffix}", paired(won, pairs))
    return tests, rows
