"""Tables, contrasts, facts and pictures of stored sweeps; a row is one setting of a lever at one place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.figures import Point, add_series, draw_series
from experiments.grid import Experiment
from experiments.report import Metrics, Picture, Report, Table, between, contrast_table, one_family, significant
from experiments.tised.findings import FRONTIER, method_of
from specact.lab.tised.drivers import ON_BOARD

DEVICE = {"tokens": "metaworld-tokens", "flow": "metaworld-flow"}  # in real time, by another experiment
SYSTEMS, LINKED = ("flash-chase", "split-ball"), ("frontier-ball", "idle-ball", "split-ball")
# Where the world waits, with absolute latencies; and jerk, in episodes whose times the sweeps above compare.
OVERLAPPED = {"naive-pusht": "PushT", "naive-metaworld": "Meta-World", "naive-peg": "peg"}
WAITING = (*OVERLAPPED, "steps-pusht")
JERK = {
    "jerk-steps": "Euler steps", "jerk-window": "observations, pruned", "naive-pusht": "naive overlap, 480 ms",
}  # fmt: skip
# End points of contrasts: their names, and the sign with which more is better.
MEASURES = {
    "success": ("success", 1.0), "restricted_s": ("time saved [s]", -1.0), "score": ("score", 1.0),
    "own_s": ("time saved, successes only [s]", -1.0), "jerk": ("jerk saved", -1.0),
}  # fmt: skip
TITLES = {"roll_forward": "roll-forward without fine-tuning", "quantisation 4": "W8A8", "quantisation 8": "W4A8"}
CONTROLS = ("remote target, asynchronous", "target, waited for", "hybrid", "ADAHI", "late ADAHI", "draft")
WIFI, LTE = "rtt:", "mahimahi:"
FINDINGS = {
    1: ("a faster chunk makes a task slower whose world waits",
        "pi0.5 on UR5e: with 1 step instead of 10 an inference takes .162 s, not .199, and the task 45.4 s, not 37.3"),
    2: ("a policy that is worse on fresh observations is better on old ones",
        "pi0.5 on a moving object: 4 steps succeed in 45 of 60, 16 in 26, on the slower of two devices"),
    3: ("the best setting depends on the hardware or the link",
        "the best number of steps is 10 on an RTX 4070 and 5 on an AGX at 50 W"),
}  # fmt: skip
# Contrasts of methods over links that the prose cites: the condition and the two methods.
FAR, FARTHER = "ball at 0, last, 100 ms", "ball at 0, last, 200 ms"
CITED = {
    "late_async": (FAR, "late adahi", "async target"), "late_head": (FAR, "late adahi", "head as draft"),
    "late_device": (FAR, "late adahi", "target on device"),
    "level": (FAR.replace("last", "neutral"), "late adahi", "async target"),
    "beyond": (FARTHER, "late adahi", "async target"), "beyond_draft": (FARTHER, "late adahi", "draft"),
}  # fmt: skip


def report(results: Mapping[str, Any]) -> Report:
    """All that docs/results/tised.md says."""
    sweeps = {name: sweep for name, sweep in results.items() if "cells" in sweep}
    metaworld = Experiment.load("metaworld")
    still = {name: list(standing(metaworld.stored()["device"][cells])) for name, cells in DEVICE.items()}
    chase, frontier = sweeps["chase"], sweeps["frontier-ball"]
    settings = {
        "waiting": [
            row for name in WAITING for measure in ("own_s", "restricted_s", "success")
            for row in settings_of(name, sweeps[name], measure, neighbours=name in OVERLAPPED)
        ],
        "smoother": [row for name in JERK for row in settings_of(name, sweeps[name], "jerk")],
        "chased": [row for measure in ("score", "success", "restricted_s")
                   for row in settings_of("chase", chase, measure)],
    }  # fmt: skip
    families = {name: one_family(rows) for name, rows in settings.items()}
    others = systems_of(sweeps)
    methods = one_family(methods_of(sweeps.values()))
    seen = [
        row for name, sweep in sweeps.items() if not name.startswith("jerk") for row in findings_of(name, sweep)
    ]  # fmt: skip
    tables = [
        Table(
            "standing", "Meta-World's token and flow targets: share of the control periods in which the robot stood "
            "still because no action had come: its range over devices from a whole core to a twentieth of one; 20 "
            "episodes each, in real time.", "target | method | no link | fast Wi-Fi | LTE | recorded, 117 ms",
            "{target} | {method} | {none} | {wifi-paper} | {lte} | {recorded}",
            [{"target": name, **row} for name, rows in still.items() for row in rows],
        ),
        Table(
            "links", "Success over the round trip of the link, in virtual time: ball, goal at rest, 40 episodes; while "
            "it waits the robot keeps the last command.",
            "method | 1 ms | 50 ms | 100 ms | 200 ms | LTE | Wi-Fi",
            "{method} | {1 ms:.2f} | {50 ms:.2f} | {100 ms:.2f} | {200 ms:.2f} | {LTE:.2f} | {Wi-Fi:.2f}",
            list(by_link(frontier)),
        ),
        Table(
            "findings", "Places where a finding was looked for, and where it was seen; the first one on episodes "
            "in which both succeed.",
            "finding | in the paper | here | seen with", "{finding} | {paper} | {seen} of {places} | {where}",
            list(counted(seen)),
        ),
        Table(
            "static", "The paper's asynchronous model where the world waits: actions of naive overlap, at a latency. "
            "Differences from no overlap are paired by episode, with 95 % intervals.",
            "task, latency | overlap | chunk [s] | chunks | success | successes only [s] | difference "
            "| failures counted [s] | difference",
            "{task} | {strength:g} | {chunk_s:.2f} | {chunks:.1f} | {success:ci2} | {task_s:.2f} "
            "| {own_s difference:+ci2} | {restricted_s[mean]:.2f} | {restricted_s difference:+ci2}",
            [row for name in OVERLAPPED for row in overlapped(name, sweeps[name])],
        ),
        Table(
            "jerk", "Mean jerk of the end effector on PushT [px/s\u00b3] beside that of the first setting, in the same "
            "episodes.", "lever | setting | episodes | jerk | difference",
            "{about} | {strength:g} | {n} | {jerk:.0f} | {jerk difference:+ci0}",
            [{"about": about, **row} for name, about in JERK.items() for row in beside_first(sweeps[name])],
        ),
        Table(
            "graded", "A moving goal: success on devices, and, after it, how nearly the ball rested on the goal (1 on "
            "success).", "device | setting | inference [ms] | episodes | success | score",
            "{hardware} | `{setting}` | {inference_ms:.0f} | {n} | {success:ci2} | {score:.2f}",
            [cell_row(cell) for cell in chase["cells"] if cell["pace"] and cell["strength"]],
            "`{setting}` | {hardware} | {success:ci2}, {score:.2f}",
        ),
        *(Table(name, f"All settings: {sweep['command']}", rows=[cell_row(cell) for cell in sweep["cells"]])
          for name, sweep in sweeps.items()),
        Table("places", "Every place where a finding was looked for, decided within its sweep.", rows=seen),
        contrast_table(families["waiting"], "waiting", "settings where the world waits, and their first or neighbour"),
        contrast_table(families["smoother"], "smoother", "jerk of a lever's settings and its first one"),
        contrast_table(families["chased"], "chased", "settings on a goal at rest and a moving one, and their first"),
        contrast_table(others, "systems", "the settings of FLASH and RoboECC and their first one"),
        contrast_table(methods, "methods", "every two methods over every link"),
    ]  # fmt: skip
    pictures = [
        Picture("tised-standing.svg", partial(draw_standing, still["tokens"])),
        Picture("tised-links.svg", partial(draw_links, frontier)),
        Picture("tised-static.svg", partial(draw_static, sweeps)),
    ]
    gates = [row for row in methods if (row["first"], row["second"]) == ("adahi", "random")]
    none, two = (
        cell for cell in chase["cells"] if cell["hardware"] == "agx-50w" and cell["pace"]
        and (cell["lever"], cell["strength"]) in (("naive", 0.0), ("naive", 2.0))
    )  # fmt: skip
    facts: dict[str, Any] = {
        row["key"]: test for name, rows in settings.items() for row, test in zip(rows, families[name], strict=True)
    }
    facts |= {name: between(methods, *cited) for name, cited in CITED.items()}
    facts |= {f"{target} {row['method']}": row for target, rows in still.items() for row in rows}
    facts |= {
        f"{group} {row['number']}": row
        for group, names in {"finding": tuple(sweeps), "policies": ("chase", *WAITING), "links": LINKED}.items()
        for row in counted([row for row in seen if row["sweep"] in names])
    }
    facts |= {
        "adahi_random": len(significant(gates, 1)), "places": len(gates),
        "chunk_speedup": none["chunk_s"] / two["chunk_s"], "more_chunks": two["chunks"] / none["chunks"],
        **results["quantised"],
    }  # fmt: skip
    return Report(tables, facts, pictures, metaworld.elsewhere("device/*"))


def systems_of(sweeps: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The settings of FLASH and RoboECC beside their first one."""
    measures = ("success", "restricted_s")
    return one_family(row for name in SYSTEMS for key in measures for row in settings_of(name, sweeps[name], key))


def settings_of(sweep: str, results: Metrics, measure: str, *, neighbours: bool = False) -> Iterator[dict[str, Any]]:
    """Every setting and its lever's first one, also the one before it: a measure of :data:`MEASURES`.

    ``key`` names it in the prose: sweep, device, setting, and the strength that it is compared to.
    """
    name, sign = MEASURES[measure]
    for row in [*results["contrasts"], *(results["neighbours"] if neighbours else ())]:
        if row[measure] is None:
            continue  # one of the two has no success
        place = f"{sweep}, {row['task']} at {row['pace']:g}, {row['idle']}, {row['hardware']}"
        interval = row[measure]["difference"]
        low, high = sorted(sign * interval[end] for end in ("low", "high"))
        where = f"{sweep}{' moving' if row['pace'] else ''} {row['hardware']}"
        yield {
            "on": place if row["link"] == ON_BOARD else f"{place}, {title(row['link'])}", "measure": name,
            "first": setting_name(row["lever"], row["strength"]), "second": setting_name(row["lever"], row["baseline"]),
            "difference": sign * interval["mean"], "low": low, "high": high, "p": row[measure]["p"],
            "key": f"{where} {row['lever']} {row['strength']:g}-{row['baseline']:g} {measure}",
        }  # fmt: skip


def beside_first(sweep: Metrics) -> Iterator[dict[str, Any]]:
    """The settings of a sweep with one curve, and how the measures of each differ from the first one's."""
    contrasts = {row["strength"]: row for row in sweep["contrasts"]}
    for cell in sweep["cells"]:
        row = contrasts.get(cell["strength"], {})
        yield cell | {f"{name} difference": row[name]["difference"] if row.get(name) else None for name in MEASURES}


def overlapped(sweep: str, results: Metrics) -> Iterator[dict[str, Any]]:
    """The settings of naive overlap where the world waits."""
    for row in beside_first(results):
        yield {**row, "task": f"{OVERLAPPED[sweep]}, {row['hardware'].replace('ms', ' ms')}"}


def methods_of(sweeps: Iterable[Metrics]) -> Iterable[dict[str, Any]]:
    """Every two methods at every place, where several sweeps compare them in that of the most episodes."""
    rows = {
        (f"{row['task']} at {row['pace']:g}, {row['idle']}, {title(row['link'])}", row["first"], row["second"]): row
        for row in sorted((row for sweep in sweeps for row in sweep["methods"]), key=lambda row: int(row["episodes"]))
    }
    return [{"on": on, "measure": "success", **row} for (on, *_), row in rows.items()]


def findings_of(sweep: str, results: Metrics) -> Iterator[dict[str, Any]]:
    """Where each finding was looked for."""
    for row in results["findings"]:
        lever, _, where = row["about"].partition(" ")
        name = TITLES.get(lever, lever)
        yield {
            "sweep": sweep, "number": row["number"], "about": f"{name} {where}", "lever": name,
            "seen": "yes" if row["seen"] else "no",
        }  # fmt: skip


def counted(rows: Sequence[Metrics]) -> Iterator[dict[str, Any]]:
    """A row per finding."""
    for number, (finding, paper) in FINDINGS.items():
        here = [row for row in rows if row["number"] == number]
        seen = [row for row in here if row["seen"] == "yes"]
        levers = dict.fromkeys(f"`{row['lever']}` ({row['sweep']})" for row in seen)
        yield {
            "number": number, "finding": finding, "paper": paper, "seen": len(seen), "places": len(here),
            "where": ", ".join(levers) or "none",
        }  # fmt: skip


def cell_row(cell: Metrics) -> dict[str, Any]:
    """A setting as its table has it, with times in ms."""
    row = {**cell, "setting": setting_name(cell["lever"], cell["strength"]), "link": title(cell["link"])}
    for key in ("inference", "stall", "age"):
        seconds = row.pop(f"{key}_s")
        row[f"{key}_ms"] = None if seconds is None else 1e3 * seconds
    return row


def setting_name(lever: str, strength: float) -> str:
    """A setting, in the field's words where the lever's own mislead."""
    setting = f"{lever} {strength:g}"
    return TITLES.get(setting, f"{TITLES.get(lever, lever)} {strength:g}")


def title(link: str) -> str:
    """A link in words."""
    names = {ON_BOARD: "none", WIFI: "Wi-Fi", LTE: "LTE"}
    return next((name for start, name in names.items() if link.startswith(start)), f"{link.partition('=')[2]} ms")


def resting(sweep: Metrics) -> list[Metrics]:
    """The settings with the goal at rest that keep the last command while they wait."""
    return [cell for cell in sweep["cells"] if (cell["pace"], cell["idle"]) == (0.0, "last")]


def by_link(sweep: Metrics) -> Iterator[dict[str, Any]]:
    """Success of every method over each link; a method without a link has the same success over all."""
    cells = resting(sweep)
    titles = dict.fromkeys(title(cell["link"]) for cell in cells if cell["link"] != ON_BOARD)
    for method in reversed(FRONTIER):
        won = {title(c["link"]): c["success"]["mean"] for c in cells if method_of(c["lever"], c["strength"]) == method}
        yield {"method": method, **{name: won.get(name, won.get("none")) for name in titles}}


def standing(cells: Mapping[str, Sequence[Metrics]]) -> Iterator[dict[str, Any]]:
    """Share of periods without an action, least and most over the devices, of each method and link."""
    rows: dict[str, dict[str, Any]] = {}
    for row in (row for cell in cells.values() for row in cell if row["method"] in CONTROLS):
        link = "recorded" if row["link"].startswith(WIFI) else row["link"] or "none"
        rows.setdefault(row["method"], {}).setdefault(link, []).append(row["held"] / row["steps"])
    for method in sorted(rows, key=CONTROLS.index):
        links = {link: Share(shares) for link, shares in rows[method].items()}
        yield {"method": method, **{link: links.get(link) for link in ("none", "wifi-paper", "lte", "recorded")}}


class Share(dict[str, float]):
    """The least and the most of some shares, written as percentages."""

    def __init__(self, shares: Iterable[float]) -> None:
        ordered = sorted(shares)
        super().__init__(low=ordered[0], middle=float(np.median(ordered)), high=ordered[-1])

    def __format__(self, spec: str) -> str:
        low, high = f"{self['low']:.0%}", f"{self['high']:.0%}"
        return low if low == high else f"{low[:-1]} to {high[:-1]} %"


def draw_standing(rows: Sequence[Metrics]) -> Figure:
    """Share of periods standing still, by link; a method without a link has the same share over all."""
    links = {"wifi-paper": "fast Wi-Fi", "lte": "LTE", "recorded": "recorded Wi-Fi\n(117 ms)"}
    names = {
        "asynchronous": "remote target, asynchronous", "late adahi": "late ADAHI", "target on device":
        "target, waited for", "draft": "draft",
    }  # fmt: skip
    shares = {row["method"]: [row[link] or row["none"] for link in links] for row in rows}
    figure = draw_series(
        {style: [Point(x, *(100 * share[end] for end in ("middle", "low", "high")))
                 for x, share in enumerate(shares[method])] for style, method in names.items()},
        "link to the server", "control periods standing still [%]",
        "Meta-World's token target: standing still over a slow link",
        {"asynchronous": "target over the link,\nasynchronous", "target on device": "target on device,\nwaited for"},
    )  # fmt: skip
    figure.axes[0].set_xticks(range(3), list(links.values()))
    figure.axes[0].set_ylim(-3, 103)
    return figure


def draw_links(sweep: Metrics) -> Figure:
    """Success over the round trip of steady links, goal at rest, last command while waiting."""
    methods = ("draft", "head as draft", "target on device", "target", "async target", "late adahi")
    cells = [cell for cell in resting(sweep) if not cell["link"].startswith((WIFI, LTE))]
    links = dict.fromkeys(cell["link"] for cell in cells if cell["link"] != ON_BOARD)
    series: dict[str, list[Point]] = {}
    for cell in cells:
        if (name := method_of(cell["lever"], cell["strength"])) in methods:
            for link in links if cell["link"] == ON_BOARD else [cell["link"]]:
                at = Point(float(link.partition("=")[2]), *(cell["success"][key] for key in ("mean", "low", "high")))
                series.setdefault("asynchronous" if name == "async target" else name, []).append(at)
    return draw_series(
        series, "round trip of the link [ms]", "success", "Ball, goal at rest: success over the link's round trip",
        {"asynchronous": "target, asynchronous", "target": "target, waited for"},
    )  # fmt: skip


def draw_static(sweeps: Mapping[str, Metrics]) -> Figure:
    """Both times of the task over naive overlap where the world waits, with the intervals of their differences."""
    figure = Figure(figsize=(4.8, 6.6), layout="constrained")
    for name, axes in zip(OVERLAPPED, figure.subplots(len(OVERLAPPED), 1, sharex=True), strict=True):
        rows = list(overlapped(name, sweeps[name]))
        series = {}
        for style, none, measure in (
            ("target", rows[0]["restricted_s"]["mean"], "restricted_s"), ("draft", rows[0]["task_s"], "own_s"),
        ):  # fmt: skip
            away = [row[f"{measure} difference"] or dict.fromkeys(("mean", "low", "high"), 0.0) for row in rows]
            series[style] = [
                Point(row["strength"], *(none + ends[end] for end in ("mean", "low", "high")))
                for row, ends in zip(rows, away, strict=True)
            ]
        labels = {"target": "failures counted", "draft": "successes only"}
        add_series(axes, series, "actions of naive overlap", "time of the task [s]", rows[0]["task"], labels)
        axes.set_xticks([row["strength"] for row in rows])
        axes.label_outer()
    return figure
