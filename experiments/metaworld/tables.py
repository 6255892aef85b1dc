"""The report of docs/results/metaworld.md, from stored results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from experiments.figures import add_series, points_of
from experiments.measure import largest_p
from experiments.metaworld import device
from experiments.report import Picture, Report, Table, contrast_table, named, one_family, significant, under
from specact.lab.rollout.statistics import wilson

# Hybrid is the target, asked at every inference.
METHODS = ("draft", "random", "adahi", "hybrid")
RECORDED = f"rtt:{device.RECORDING}"
# Methods of the page's table and picture, and the link of those that use one.
SHOWN = {
    "target, waited for": "", "target, asynchronous": "", "target, fewer steps": "", "draft": "",
    "ADAHI": RECORDED, "hybrid": RECORDED, "late ADAHI": RECORDED, "remote target, asynchronous": RECORDED,
}  # fmt: skip
DRAWN = {
    "target, waited for": "target_on_device", "target, fewer steps": "full_5", "draft": "draft",
    "late ADAHI": "adahi", "remote target, asynchronous": "target",
}  # fmt: skip
_SHARE = 0.1  # of a core, in the page's table


def report(results: Mapping[str, Any]) -> Report:
    """The suite's policies, gates before them, and how they do in real time."""
    cells = {name: [_cell(name, cell) for shares in results["device"][name].values() for cell in shares]
             for name in device.TARGETS}  # fmt: skip
    every = {
        (cell["target"], cell["method"], cell["link"], cell["share"]): cell for rows in cells.values() for cell in rows
    }
    pairs = [
        {"pair": name, **{method: run["seen"]["methods"][method] for method in METHODS}}
        for name, run in results["policies"].items()
    ]
    gated = one_family(_gated(results))
    timed = one_family(row for name in cells for row in _timed(name, cells[name], results["device"]["contrasts"]))
    covered = one_family(under("pusht", results["cameras"]["contrasts"], "coverage"))
    methods: list[dict[str, Any]] = [
        {"method": method, "where": link and "recorded Wi-Fi"}
        | {f"{kind}_{share:g}".replace(".", ""): every.get((target, method, link, share))
           for kind, target in (("tokens", "metaworld-tokens"), ("flow", "metaworld-flow")) for share in (1.0, _SHARE)}
        for method, link in SHOWN.items()
    ]  # fmt: skip
    seeds = results["seeds"]
    tables = [
        Table(
            "main", "Success in 200 paired episodes, 20 of each task; sent: by `adahi`, whose rate is 0.4.",
            "pair | draft | random | adahi | hybrid | sent",
            "{pair} | {draft[success]:ci2} | {random[success]:ci2} | {adahi[success]:ci2} | {hybrid[success]:ci2} "
            "| {adahi[sent]:.2f}", pairs,
        ),
        Table(
            "shown", f"In real time at 20 Hz with {_SHARE:g} of a core: success in 20 episodes, and the "
            "share of the periods in which the robot held.",
            "method | link | token target | held | flow target | held",
            "{method} | {where} | {tokens_success:ci2} | {tokens_held:.0%} | {flow_success:ci2} | {flow_held:.0%}",
            [row | {f"{kind}_{key}": None if row[f"{kind}_01"] is None else row[f"{kind}_01"][key]
                    for kind in ("tokens", "flow") for key in ("success", "held")} for row in methods],
        ),
        Table(
            "real-time", "Every method in real time, 20 episodes: success, share of the periods in which the robot "
            "held, share of the requests without an answer in time.",
            rows=[cell for rows in cells.values() for cell in rows],
        ),
        Table(
            "policies", "Every pair and method: 200 episodes, and 50 with blank cameras.",
            rows=[{"pair": name, "cameras": cameras, **_kept(row)} for name, run in results["policies"].items()
                  for cameras in ("seen", "blank") for row in named(run[cameras]["methods"])],
        ),
        Table("tasks", "Success of every task, 20 episodes.",
              rows=[{"pair": pair["pair"], "task": task, "method": method, **rate}
                    for pair in pairs for method in METHODS for task, rate in pair[method]["tasks"].items()]),
        Table("gates", "Every gate of a pair at a rate of 0.4, 200 episodes, on another machine.",
              rows=[{"pair": name, **_kept(row)} for name, run in results["gates"].items()
                    for row in named(run["methods"])]),
        Table("seeds", "The pair of codes trained with three seeds; intervals over seeds and episodes.",
              rows=named(seeds["rows"])),
        Table("replanning", "Success by the number of executed actions, which is chosen on episodes of its own.",
              rows=[{"policy": name, "number": number, "tried": tried,
                     "judged": row["judged"].get(number, {"success": None})["success"]}
                    for name, row in results["replanning"].items() for number, tried in row["tried"].items()]),
        contrast_table(gated, "contrasts", "gates, verification and executed actions"),
        contrast_table(timed, "real-time-contrasts", "methods in real time, both targets"),
        contrast_table(covered, "cameras-contrasts", "cameras on PushT"),
    ]  # fmt: skip
    facts: dict[str, Any] = {
        "shown": {row["method"]: row for row in methods}, "significant": len(significant(timed)), "tests": len(timed),
        "seeds": {name: row["all"] for name, row in seeds["rows"].items()},
        "blank": {name: run["blank"]["methods"] for name, run in results["policies"].items()},
        "cameras": {f"{row['first']} {row['second']}": row for row in covered},
        **{f"{row['on'].split(',')[0]}_{row['first']}_{row['second']}": row for row in gated},
    }  # fmt: skip
    for row in timed:
        target, link, share = row["on"].split(", ")
        if share == f"{_SHARE:g} of a core" and link not in ("lte", "wifi-paper"):
            facts[f"{target.removeprefix('metaworld-')}_{row['first']}_{row['second']}"] = row
    return Report(tables, facts, [Picture("metaworld.svg", partial(draw, every))])


def _cell(target: str, cell: Mapping[str, Any]) -> dict[str, Any]:
    """A cell in real time, with its rates."""
    kept = {key: cell[key] for key in ("method", "link", "share", "episodes", "inferences", "sent")}
    spent = {f"inference_{key}": value for key, value in cell["inference_ms"].items()}
    return {
        "target": target, **kept, "success": vars(wilson(cell["successes"], cell["episodes"])), "won": cell.get("won"),
        "held": cell["held"] / max(1, cell["steps"]), "missed": device.missed_share(cell),
        "world_late_ms": cell["world_late_ms"], **spent,
    }  # fmt: skip


def _gated(results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Contrasts of gates before every pair, and of executed actions."""
    for name, run in results["policies"].items():
        yield from under(name, run["seen"]["contrasts"])
    for name, run in results["gates"].items():
        had = {(row["first"], row["second"]) for row in results["policies"][name]["seen"]["contrasts"]}
        rows = [row for row in largest_p(run["contrasts"]) if (row["first"], row["second"]) not in had]
        yield from under(f"gates of {name}", rows)
    for name, row in results["replanning"].items():
        names = {"first": f"{row['best']} executed", "second": f"{next(iter(row['tried']))} executed"}
        yield from under(f"{name}, alone", [{**names, **row["gained"]}])


def _timed(target: str, cells: list[dict[str, Any]], stored: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Contrasts in real time; those of earlier runs were stored without every episode."""
    if all(cell["won"] is not None for cell in cells):
        rows = device.contrasts(cells)
    else:
        rows = largest_p([{"p_holm": row["p"], **{k: v for k, v in row.items() if k != "p"}} for row in stored[target]])
    return [
        {**row, "on": f"{target}, {row['link'] or 'no link'}, {row['share']:g} of a core", "measure": "success"}
        for row in rows
    ]


def _kept(row: Mapping[str, Any]) -> dict[str, Any]:
    """A method's row with one time."""
    kept = {"true_skip_ratio": None, "distance": None, **row, "ms": row["latency"]["per_action_ms"]}
    return {k: v for k, v in kept.items() if k not in ("latency", "cost", "sent_ahead", "tasks", "success_at")}


def draw(every: Mapping[tuple[str, str, str, float], Mapping[str, Any]]) -> Figure:
    """Success in real time over the device's share of a core, a panel for each target."""
    figure = Figure(figsize=(4.8, 6.2), layout="constrained")
    for target, axes in zip(device.TARGETS, figure.subplots(2, 1), strict=True):
        series = {
            style: points_of({share: cell["success"] for (policy, name, link, share), cell in every.items()
                              if (policy, name, link) == (target, method, SHOWN[method])})
            for method, style in DRAWN.items()
        }  # fmt: skip
        names = {
            style: method.replace(", async", ",\nasync") + " (Wi-Fi)" * bool(SHOWN[method])
            for method, style in DRAWN.items()
        }
        axes.set_xscale("log")
        add_series(axes, series, "share of a core that the device has", "success", target, names)
        axes.set_xticks([1.0, 0.25, 0.1, 0.05], ["1", "1/4", "1/10", "1/20"], minor=False)
        axes.set_xticks([], minor=True)
    return figure
