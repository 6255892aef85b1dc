"""The tables of docs/metaworld.md, from stored results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.tables import difference_table, interval_text, markdown, named, optional_text, table
from specact.lab.rollout.statistics import holm

# Hybrid is the target, asked at every inference.
METHODS = ("draft", "random", "adahi", "hybrid")
# Observations of draft and target, by bundle.
SEES = {
    "pusht": ("state", "state"),
    "pusht-camera": ("frames, agent's position", "frames, agent's position"),
    "pusht-camera-state": ("state", "frames, agent's position"),
}


def rendering(kept: Mapping[str, Any]) -> str:
    """Time of a control step by cameras and pixels."""
    rows = [{**row, "seen": ", ".join(row["cameras"]) or "none", "per_s": 1e3 / row["ms"]} for row in kept["rows"]]
    return table(
        "environment | cameras | pixels | ms of a core for a control step | steps per second and core",
        "{env} | {seen} | {size} | {ms:.1f} | {per_s:.0f}",
        ({**row, "size": row["pixels"] or ""} for row in rows),
    )


def experts(kept: Sequence[Mapping[str, Any]]) -> str:
    """Demonstrations that were kept of those that were tried, by task."""
    rows = [
        [task, *(f"{run['tasks'][task]['kept']} of {run['tasks'][task]['tried']}" for run in kept)]
        for task in kept[0]["tasks"]
    ]
    rows.append(["all", *(f"{run['kept']} of {run['tried']}, {run['steps']} steps" for run in kept)])
    return markdown(["instruction", *(f"noise {run['noise']:g}" for run in kept)], rows)


def policies(kept: Mapping[str, Any]) -> str:
    """For every pair: success of each task and of all with its interval, and what was sent."""
    parts = []
    for name, runs in kept.items():
        seen, blank = runs["seen"]["methods"], runs["blank"]["methods"]
        shown = [seen[method] for method in METHODS if method in seen]
        names = [method for method in METHODS if method in seen]
        rows = [[task, *(interval_text(one["tasks"][task]) for one in shown)] for task in shown[0]["tasks"]]
        rows.append(["**all**", *(_bold(one["success"]) for one in shown)])
        rows.append(["all, cameras blank", *(_blanked(blank.get(method)) for method in names)])
        titles = {
            "transmission rate": "transmission_rate", "true skip ratio": "true_skip_ratio",
            "distance of the target's actions from the drafted ones": "distance",
        }  # fmt: skip
        for title, key in titles.items():
            if any(one.get(key) is not None for one in shown):
                rows.append([title, *(optional_text(one.get(key), 2, "") for one in shown)])
        rows.append(["ms an action", *(f"{one['latency']['per_action_ms']:.1f}" for one in shown)])
        parts.append(f"`{name}`\n\n{markdown(['task', *names], rows)}")
    return "\n\n".join(parts)


def gates(kept: Mapping[str, Any]) -> str:
    """Every gate of a pair, and its contrasts."""
    parts = []
    for name, pair in kept.items():
        rows = [
            {"true_skip_ratio": None, **row, "bold": _bold(row["success"]), "ms": row["latency"]["per_action_ms"]}
            for row in named(pair["methods"])
        ]
        parts += [
            f"`{name}`, {pair['episodes']} paired episodes:",
            table(
                "method | success | transmission rate | true skip ratio | ms an action",
                "{name} | {bold} | {transmission_rate:.2f?} | {true_skip_ratio:.2f?} | {ms:.1f}", rows,
            ),
            difference_table(pair["contrasts"], "{first} - {second}"),
        ]  # fmt: skip
    return "\n\n".join(parts)


def seeds(found: Mapping[str, Any]) -> str:
    """Success, rates and times of every training seed."""
    rows = []
    for name, row in found["rows"].items():
        sign = "+" if " - " in name else ""
        rows.append([name, *(f"{value:{sign}.3f}" for value in row["each"]), interval_text(row["all"], 3, sign)])
    more = found["more"]
    for key in next(iter(more.values())):
        for method in ("random", "adahi", "hybrid"):
            values = more[method][key]
            if None not in values:
                # Milliseconds of several runs on a shared machine have no mean, only their ratios do.
                mean = "" if key == "ms an action" else f"{np.mean(values):.2f}"
                rows.append([f"{method}: {key.replace('_', ' ')}", *(f"{value:.2f}" for value in values), mean])
    for method in ("random", "adahi"):
        times = (more[one]["ms an action"] for one in (method, "hybrid"))
        shares = [mine / whole for mine, whole in zip(*times, strict=True)]
        each = (f"{share:.2f}" for share in (*shares, np.mean(shares)))
        rows.append([f"{method}: time an action, of hybrid's", *each])
    return markdown(["success", *(f"`{name}`" for name in found["pairs"]), "over seeds and episodes"], rows)


def curve(found: Sequence[Mapping[str, Any]]) -> str:
    """Success over the training time."""
    rows = [{"gained": None, **row, "bold": _bold(row["success"]), "weak": _weak(row["tasks"])} for row in found]
    return table(
        "bundle | steps | samples | success | more than the one before | tasks below .8",
        "`{bundle}` | {steps:,} | {samples:,} | {bold} | {gained:+ci3?} | {weak}",
        rows,
    )


def replanning(found: Sequence[Mapping[str, Any]]) -> str:
    """Success by the number of executed actions: on the episodes of the choice, and on the others."""
    executed, rows = list(found[0]["tried"]), []
    for row, p in zip(found, holm([row["gained"]["p"] for row in found]), strict=True):
        best = row["judged"][str(row["best"])]
        rows.append([
            f"`{row['policy']}`", *(f"{row['tried'][number]['rate']:.2f}" for number in executed),
            _bold(row["judged"][executed[0]]["success"]), f"{row['best']}: {_bold(best['success'])}",
            interval_text(row["gained"]["difference"], 3, "+"), f"{p:.2g}", _weak(best["tasks"]),
        ])  # fmt: skip
    heads = [f"{number} executed, for the choice" for number in executed]
    more = (f"{executed[0]} executed", "the best choice", "more", "p (Holm)", "tasks below .8")
    return markdown(["policy", *heads, *more], rows)


def cameras(summary: Mapping[str, Any]) -> str:
    """The table of PushT's methods, and the contrasts as text."""
    rows = [
        {**row, "pair": name, "draft": SEES[name][0], "target": SEES[name][1], "above": row["success_at"]["0.95"]}
        for name, methods in summary["methods"].items()
        for row in named(methods)
    ]
    whole = table(
        "pair | method | draft sees | target sees | largest coverage | success, above .85 | above .95",
        "{pair} | {name} | {draft} | {target} | {score:ci3} | {success:ci2} | {above:ci2}",
        rows,
    )
    texts = [
        f"{row['first']} - {row['second']}: {interval_text(row['difference'], 3, '+')}, p = {row['p_holm']:.2g}"
        for row in summary["contrasts"]
    ]
    remark = f"Coverage, p after Holm's correction over these {len(texts)}: {'; '.join(texts)}."
    return f"{whole}\n\n{remark}"


def _weak(tasks: Mapping[str, float]) -> str:
    return ", ".join(f"{task} {rate:.2f}" for task, rate in tasks.items() if rate < 0.8)


def _bold(success: Mapping[str, Any]) -> str:
    return f"**{success['rate']:.2f}** [{success['low']:.2f}, {success['high']:.2f}]"


def _blanked(found: Mapping[str, Any] | None) -> str:
    """Success without cameras, and how much draft and target agree then."""
    if found is None:
        return ""
    accepted, distance = (found.get("acceptance") or {}).get("all"), found.get("distance")
    agreed = "" if accepted is None else f", {accepted:.2f} accepted"
    return _bold(found["success"]) + agreed + ("" if distance is None else f", distance {distance:.2f}")


OF_PARTS: dict[str, Callable[[Any], str]] = {
    "rendering": rendering, "experts": experts, "policies": policies, "gates": gates, "seeds": seeds, "curve": curve,
    "replanning": replanning,
}  # fmt: skip
