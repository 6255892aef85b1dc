"""Tables, contrasts, facts and pictures of stored sweeps; a row is one setting of a lever at one place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations, product
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.figures import Point, add_series, draw_series
from experiments.grid import Experiment
from experiments.report import Metrics, Picture, Report, Table, between, contrast_table, one_family, significant
from experiments.tised.findings import FRONTIER, method_of
from specact.lab.rollout.statistics import contrast
from specact.lab.tised.drivers import ON_BOARD

DEVICE = ("metaworld-tokens", "metaworld-flow")  # in real time, by another experiment
# Levers of a policy; of systems with a report of their own; and decodings that verify a draft.
POLICIES = ("levers-chase", "executions-chase", "levers-pusht", "window-pusht")
SYSTEMS = ("flash-chase", "reuse-metaworld", "split-ball")
# Where the world waits, with absolute latencies; and jerk, in episodes whose times the sweeps above compare.
STATIC = {"naive-pusht": "PushT", "naive-metaworld": "Meta-World", "naive-peg": "peg", "steps-pusht": "PushT"}
JERK = ("jerk-steps", "jerk-window", "naive-pusht")
# End points of contrasts: their names, and the sign with which more is better.
MEASURES = {
    "success": ("success", 1.0), "restricted_s": ("time saved [s]", -1.0), "score": ("score", 1.0),
    "own_s": ("time saved, successes only [s]", -1.0), "jerk": ("jerk saved", -1.0),
}  # fmt: skip
TITLES = {
    "roll_forward": "roll-forward without fine-tuning", "quantisation 4": "W8A8", "quantisation 8": "W4A8",
    "reuse": "reuse, before motion estimates had a window",
}  # fmt: skip
# KERV and HeiSD as they were when they were measured, which are variants of them now.
KERV, HEISD = "KERV, tail of the whole chunk", "HeiSD, without its switch"
DECODED = {"links-specvla": "Spec-VLA", "links-kerv": KERV, "links-heisd_fixed": HEISD}
CONTROLS = ("remote target, asynchronous", "target, waited for", "hybrid", "ADAHI", "late ADAHI", "draft")
WIFI, LTE = "rtt:", "mahimahi:"
PUBLISHED = {
    1: "pi0.5 on UR5e: with 1 step instead of 10 an inference takes .162 s, not .199, and the task 45.4 s, not 37.3",
    2: "pi0.5 on a moving object: 4 steps succeed in 45 of 60, 16 in 26, on the slower of two devices",
    3: "the best number of steps is 10 on an RTX 4070 and 5 on an AGX at 50 W",
}
FINDINGS = {
    1: "a faster chunk makes a task slower whose world waits",
    2: "a policy that is worse on fresh observations is better on old ones",
    3: "the best setting depends on the hardware or the link",
}
_CELLS = (
    "`{setting}` | {pace:g}, `{idle}` | {hardware}, {link} | {n} | {success:ci3} | {score:.3f} | {restricted_s:ci2} "
    "| {chunks:.1f} | {chunk_s:.3f} | {task_s:.2f} | {inference_ms:.1f} | {stall_ms:.1f} | {age_ms:.1f} | {jerk:.1f} "
    "| {path:.2f} | {sent:.2f}"
)
_HEADS = (
    "setting | pace, idle | device, link | episodes | success | score | mean time, failures at the limit [s] | chunks "
    "| time of a chunk [s] | time of a success [s] | inference [ms] | wait [ms] | age [ms] | jerk | path | sent"
)


def report(results: Mapping[str, Any]) -> Report:
    """All that docs/results/tised.md says."""
    sweeps = {name: found for name, found in results.items() if "cells" in found}
    metaworld = Experiment.load("metaworld")
    live, flow = (list(standing(metaworld.stored()["device"][name])) for name in DEVICE)
    faster = one_family(row for name in POLICIES for row in settings_of(name, sweeps[name], "restricted_s"))
    likelier = one_family(row for name in POLICIES for row in settings_of(name, sweeps[name], "success"))
    others = systems_of(sweeps)
    methods = one_family(longest(row for name, found in sweeps.items() for row in methods_of(name, found)))
    decodings = one_family(decodings_of({name: sweeps[name] for name in DECODED}))
    waiting = one_family(
        row for name in STATIC for key in ("own_s", "restricted_s", "success")
        for row in settings_of(name, sweeps[name], key, neighbours=name.startswith("naive"))
    )  # fmt: skip
    smoother = one_family(row for name in JERK for row in settings_of(name, sweeps[name], "jerk"))
    graded = one_family(
        row for key in ("score", "success") for row in settings_of("score-chase", sweeps["score-chase"], key)
    )
    looked = {name: found for name, found in sweeps.items() if not name.startswith("jerk")}
    seen = [row for name, found in looked.items() for row in findings_of(name, found)]
    frontier = sweeps["frontier-ball"]
    tables = [
        Table(
            "standing", "Meta-World's token and flow targets: share of the control periods in which the robot stood "
            "still because no action had come: its range over devices from a whole core to a twentieth of one; 20 "
            "episodes each, in real time.", "target | method | no link | fast Wi-Fi | LTE | recorded, 117 ms",
            "{target} | {method} | {none} | {wifi-paper} | {lte} | {recorded}",
            [{"target": name, **row} for name, rows in (("tokens", live), ("flow", flow)) for row in rows],
        ),
        Table(
            "links", "Success over the round trip of the link, in virtual time: ball, goal at rest, 40 episodes; while "
            "it waits the robot keeps the last command.",
            "method | 1 ms | 50 ms | 100 ms | 200 ms | LTE | Wi-Fi",
            "{method} | {1 ms:.2f} | {50 ms:.2f} | {100 ms:.2f} | {200 ms:.2f} | {LTE:.2f} | {Wi-Fi:.2f}",
            list(by_link(frontier, 0.0, "last")),
        ),
        Table(
            "findings", "Places where a finding was looked for, and where it was seen.",
            "finding | in the paper | here | seen with", "{finding} | {paper} | {seen} of {places} | {where}",
            list(counted(seen)),
        ),
        Table(
            "static", "The paper's asynchronous model where the world waits: actions of naive overlap, at a latency. "
            "Differences from no overlap are paired by episode, with 95 % intervals.",
            "task, latency | overlap | chunk [s] | chunks | success | successes only [s] | difference "
            "| failures counted [s] | difference",
            "{task} | {strength:g} | {chunk_s:.2f} | {chunks:.1f} | {success:ci2} | {own_s:.2f} | {own:+ci2} "
            "| {restricted_s:.2f} | {restricted:+ci2}",
            [row for name in STATIC if name.startswith("naive") for row in static_of(name, sweeps[name])],
        ),
        Table(
            "jerk", "Mean jerk of the end effector on PushT [px/s\u00b3] beside that of the first setting, in the same "
            "episodes.", "lever | setting | episodes | jerk | difference",
            "{about} | {setting} | {n} | {jerk:.0f} | {difference:+ci0}",
            [row for name in JERK for row in jerk_of(sweeps[name])],
        ),
        Table(
            "graded", "A moving goal: success, and how nearly the ball rested on the goal (1 on success).",
            "device | setting | inference [ms] | episodes | success | score",
            "{hardware} | `{setting}` | {inference_ms:.0f} | {n} | {success:ci2} | {score:.2f}",
            [cell_row(cell) for cell in sweeps["score-chase"]["cells"]],
        ),
        *(Table(name, f"All settings: {found['command']}", _HEADS, _CELLS, [cell_row(cell) for cell in found["cells"]])
          for name, found in sweeps.items()),
        Table(
            "gates", "Gates, calibrated where they run, on held-out episodes.",
            "sweep | gate of | wanted | threshold | held out | sent | episodes | inferences",
            "{sweep} | `{lever}`, {pace:g}, {idle}, {link} | {wanted} | {threshold:.4g} | {held_out:.2f} | {sent:.2f} "
            "| {episodes} | {inferences}", [row for name, found in sweeps.items() for row in gates_of(name, found)],
        ),
        Table(
            "places", "Every place where a finding was looked for, decided within its sweep.",
            "sweep | finding | place | seen", "{sweep} | {number} | {about} | {seen}", seen,
        ),
        contrast_table(faster, "faster", "a policy's settings and its first one: time saved"),
        contrast_table(likelier, "likelier", "a policy's settings and its first one: success"),
        contrast_table(waiting, "waiting", "settings where the world waits, and their first one or neighbour"),
        contrast_table(smoother, "smoother", "jerk of a lever's settings and its first one"),
        contrast_table(graded, "chased", "settings on a moving goal and their first one"),
        contrast_table(others, "systems", "the settings of FLASH, FreqCache and RoboECC and their first one"),
        contrast_table(methods, "methods", "every two methods over every link"),
        contrast_table(decodings, "decodings", "every two decodings under the same lever over the same link"),
    ]  # fmt: skip
    pictures = [
        Picture("tised-standing.svg", partial(draw_standing, live)),
        Picture("tised-links.svg", partial(draw_links, frontier)),
        Picture("tised-static.svg", partial(draw_static, sweeps)),
    ]
    facts = {
        **facts_of(faster, methods, decodings),
        **static_facts(waiting, smoother, graded),
        **quantised_facts(results),
        **load_facts(sweeps),
        **{f"still {row['method']}": row for row in live},
        **{f"flow {row['method']}": row for row in flow},
    }
    facts |= {f"finding {row['number']}": row for row in counted(seen)}
    policies = [row for row in seen if row["sweep"] in (*POLICIES, "score-chase", *STATIC)]
    facts |= {f"policies {row['number']}": row for row in counted(policies)}
    facts |= paradox_of(sweeps["levers-chase"], faster)
    return Report(tables, facts, pictures, metaworld.elsewhere("device/*"))


def systems_of(sweeps: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The settings of FLASH, FreqCache and RoboECC beside their first one."""
    measures = ("success", "restricted_s")
    return one_family(row for name in SYSTEMS for key in measures for row in settings_of(name, sweeps[name], key))


def facts_of(
    faster: Sequence[Metrics], methods: Sequence[Metrics], decodings: Sequence[Metrics]
) -> dict[str, Any]:  # fmt: skip
    """Contrasts that the prose cites, and how many of others are significant."""
    far = "ball at 0, last, 100 ms, 200 episodes"
    cited = {
        "late_async": (far, "late adahi", "async target"), "late_head": (far, "late adahi", "head as draft"),
        "late_device": (far, "late adahi", "target on device"),
        "level": (far.replace("last", "neutral"), "late adahi", "async target"),
        "beyond": ("ball at 0, last, 200 ms, 40 episodes", "late adahi", "async target"),
        "beyond_draft": ("ball at 0, last, 200 ms, 40 episodes", "late adahi", "draft"),
    }  # fmt: skip
    facts: dict[str, Any] = {name: _either(methods, *key) for name, key in cited.items()}
    facts["adahi_random"] = len(significant([_either(methods, on, "adahi", "random") for on in _places(methods)], 1))
    facts["decodings_shown"] = len(significant(decodings))
    facts["places"] = len(_places(methods))
    key = ("levers-pusht, pusht at 0, hold, vla-rtx-4070", "steps 2", "steps 10")
    facts["two_steps"] = between(faster, *key, "time saved [s]")
    return facts


def static_facts(
    waiting: Sequence[Metrics], smoother: Sequence[Metrics], graded: Sequence[Metrics]
) -> dict[str, Metrics]:  # fmt: skip
    """Contrasts that the prose and the claims cite: of neighbours in naive overlap, of steps, jerk and score."""
    latencies = {"naive-pusht": "480ms", "naive-metaworld": "100ms", "naive-peg": "40ms"}
    facts = {}
    for sweep, latency in latencies.items():
        task = sweep.partition("-")[2]
        for m, to in ((1, 0), (2, 0), (2, 1), (4, 3)):
            for key, measure in (("own", MEASURES["own_s"][0]), ("counted", MEASURES["restricted_s"][0])):
                on = f"{sweep}, {task} at 0, hold, {latency}"
                fact = between(waiting, on, f"naive {m}", f"naive {to}", measure)
                facts[f"{task}_{key}_{m}_{to}"] = fact
    for device in ("pi05-rtx-4070", "pi05-agx-30w"):
        for key, measure in (("own", MEASURES["own_s"][0]), ("counted", MEASURES["restricted_s"][0])):
            on = f"steps-pusht, pusht at 0, hold, {device}"
            for steps in (1, 2):
                facts[f"steps_{key}_{steps}_{device}"] = between(waiting, on, f"steps {steps}", "steps 10", measure)
    for sweep, on, first, second in (
        ("jerk-steps", "pusht at 0, hold, this-machine", "steps 1", "steps 10"),
        ("jerk-window", "pusht at 0, hold, this-machine", "window 1", "window 5"),
        ("naive-pusht", "pusht at 0, hold, 480ms", "naive 2", "naive 0"),
    ):
        facts[f"jerk_{first.partition(' ')[0]}"] = between(smoother, f"{sweep}, {on}", first, second, "jerk saved")
    on = "score-chase, ball-chase at 0.1, hold, vla-rtx-4070"
    for measure in ("score", "success"):
        facts[f"chase_{measure}"] = between(graded, on, "steps 2", "steps 10", measure)
        facts[f"chase_overlap_{measure}"] = between(graded, on, "naive 2", "naive 0", measure)
    return facts


def quantised_facts(results: Mapping[str, Any]) -> dict[str, float]:
    """Median time of an inference with W8A8 and W4A8 over that with float32, measured in turns."""
    ms = {name: times[0] for name, times in results["levers-chase"]["latency_ms"].items()}
    return {name: ms[f"quantisation {at}"] / ms["quantisation 0"] for name, at in (("w8a8", 4), ("w4a8", 8))}


def load_facts(sweeps: Mapping[str, Any]) -> dict[str, Any]:
    """What another load of the machine did to ten steps on the slowest device, before times were stored."""
    facts: dict[str, Any] = {
        "latency": {name: sweeps[name]["latency_ms"]["steps 10"][0] for name in ("levers-chase", "flash-chase")}
    }
    for fact, name in (("loaded", "levers-chase"), ("stored", "score-chase")):
        where = {"lever": "steps", "strength": 10.0, "pace": 0.1, "hardware": "vla-rtx-4070"}
        facts[fact] = next(
            _interval(cell, "success") for cell in sweeps[name]["cells"] if where.items() <= cell.items()
        )
    return facts


def static_of(sweep: str, found: Metrics) -> Iterator[dict[str, Any]]:
    """The settings of naive overlap, with both times and their paired differences."""
    differences = {row["strength"]: row for row in found["contrasts"]}
    for cell in found["cells"]:
        row = {key: _short(cell[key]) for key in ("strength", "chunk_s", "chunks", "n")}
        row |= {"task": f"{STATIC[sweep]}, {cell['hardware'].replace('ms', ' ms')}", "own_s": _short(cell["task_s"])}
        row |= {"success": _interval(cell, "success"), "restricted_s": _short(cell["restricted_s.mean"])}
        against = differences.get(cell["strength"], {})
        for name, key in (("own", "own_s"), ("restricted", "restricted_s")):
            row[name] = _interval(against, f"{key}.difference")
        yield row


def jerk_of(found: Metrics) -> Iterator[dict[str, Any]]:
    """Jerk of the settings of a lever, and how it differs from the first one's."""
    abouts = {"steps": "Euler steps", "window": "observations, pruned", "naive": "naive overlap, 480 ms"}
    differences = {row["strength"]: row for row in found["contrasts"]}
    for cell in found["cells"]:
        against = differences.get(cell["strength"], {})
        yield {
            "about": abouts[cell["lever"]], "setting": f"{cell['strength']:g}", "n": cell["n"],
            "jerk": _short(cell["jerk"]), "difference": _interval(against, "jerk.difference"),
        }  # fmt: skip


def _interval(row: Metrics, name: str) -> dict[str, Any] | None:
    ends = {end: row.get(f"{name}.{end}") for end in ("mean", "low", "high")}
    return None if None in ends.values() else {end: _short(value) for end, value in ends.items()}


def _places(methods: Sequence[Metrics]) -> list[str]:
    return list(dict.fromkeys(row["on"] for row in methods if row["on"].startswith("ball") and " 40 " in row["on"]))


def _either(rows: Sequence[Metrics], on: str, first: str, second: str) -> Metrics:
    """The contrast of two methods, in this order."""
    try:
        return between(rows, on, first, second)
    except StopIteration:
        row = between(rows, on, second, first)
        turned = {"difference": -row["difference"], "low": -row["high"], "high": -row["low"]}
        return {**row, "first": first, "second": second, **turned}


def paradox_of(sweep: Metrics, faster: Sequence[Metrics]) -> dict[str, Any]:
    """Two actions of naive overlap, goal at rest, on the fifty-watt device."""
    zero, two = _naive(sweep)[:2]
    on = "levers-chase, ball-chase at 0, hold, agx-50w"
    return {
        "paradox": between(faster, on, "naive 2", "naive 0", "time saved [s]"),
        "chunk_speedup": zero["chunk_s"] / two["chunk_s"], "more_chunks": two["chunks"] / zero["chunks"],
    }  # fmt: skip


def _naive(sweep: Metrics) -> list[Metrics]:
    return [
        cell for cell in sweep["cells"] if (cell["lever"], cell["pace"], cell["hardware"]) == ("naive", 0, "agx-50w")
    ]


def title(link: str) -> str:
    """A link in words."""
    steady = f"{link.partition('=')[2]} ms"
    return (
        "none" if link == ON_BOARD else "Wi-Fi" if link.startswith(WIFI) else "LTE" if link.startswith(LTE) else steady
    )


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def cell_row(cell: Metrics) -> dict[str, Any]:
    """A setting, with its times in ms."""
    row = {
        key: _short(cell[key]) for key in ("lever", "strength", "pace", "idle", "hardware", "kappa", "execution", "n")
    }
    row["link"] = title(cell["link"])
    row |= {"setting": setting_name(cell["lever"], cell["strength"]), "score": _short(cell["score"])}
    for name in ("success", "restricted_s"):
        row[name] = {key: _short(cell[f"{name}.{key}"]) for key in ("mean", "low", "high")}
    row |= {key: _short(cell[key]) for key in ("chunks", "chunk_s", "task_s", "jerk", "path")}
    for key in ("inference", "stall", "age"):
        row[f"{key}_ms"] = None if cell[f"{key}_s"] is None else _short(1e3 * cell[f"{key}_s"])
    return {**row, "sent": _short(cell["sent"])}


def setting_name(lever: str, strength: float) -> str:
    """A setting, in the field's words where the lever's own mislead."""
    setting = f"{lever} {strength:g}"
    return TITLES.get(setting, f"{TITLES.get(lever, lever)} {strength:g}")


def settings_of(sweep: str, found: Metrics, measure: str, *, neighbours: bool = False) -> Iterator[dict[str, Any]]:
    """Every setting and its lever's first one, also the one before it: a measure of :data:`MEASURES`."""
    name, sign = MEASURES[measure]
    for row in [*found["contrasts"], *(found["neighbours"] if neighbours else ())]:
        if row.get(f"{measure}.difference.mean") is None:
            continue  # one of the two has no success
        place = f"{sweep}, {row['task']} at {row['pace']:g}, {row['idle']}, {row['hardware']}"
        low, high = sorted(sign * row[f"{measure}.difference.{end}"] for end in ("low", "high"))
        yield {
            "on": place if row["link"] == ON_BOARD else f"{place}, {title(row['link'])}", "measure": name,
            "first": setting_name(row["lever"], row["strength"]), "second": setting_name(row["lever"], row["baseline"]),
            "difference": _short(sign * row[f"{measure}.difference.mean"]), "low": _short(low), "high": _short(high),
            "p": row[f"{measure}.p"],
        }  # fmt: skip


def methods_of(sweep: str, found: Metrics) -> Iterator[dict[str, Any]]:
    """Every two methods at every place of a sweep."""
    for row in found["methods"]:
        task = f"{row['task']}, {DECODED[sweep]}" if sweep in DECODED else row["task"]
        yield {
            "on": f"{task} at {row['pace']:g}, {row['idle']}, {title(row['link'])}, {row['episodes']} episodes",
            "measure": "success", **{key: row[key] for key in ("first", "second", "episodes")}, "p": row["success.p"],
            **{end: _short(row[f"success.difference.{end}"]) for end in ("low", "high")},
            "difference": _short(row["success.difference.mean"]),
        }  # fmt: skip


def longest(rows: Iterable[Metrics]) -> Iterable[Metrics]:
    """Of the contrasts of two methods at a place that of the most episodes, which are the others', too."""
    ordered = sorted(rows, key=lambda row: int(row["episodes"]))
    return {(row["on"].rpartition(", ")[0], row["first"], row["second"]): row for row in ordered}.values()


def decodings_of(sweeps: Mapping[str, Metrics]) -> Iterator[dict[str, Any]]:
    """Every two decodings under the same lever over the same link, on the same episodes."""
    runs = {
        name: {(row["lever"], row["strength"], row["link"]): row for row in found["outcomes"]}
        for name, found in sweeps.items()
    }
    for at in sorted(set.intersection(*map(set, runs.values()))):
        lever, strength, link = at
        # The same as verification 1; and without a verification a link has no effect.
        if (lever, strength) == ("chance", 1.0) or (strength == 0.0 and title(link) != "1 ms"):
            continue
        for one, other in combinations(runs, 2):
            for key, name, sign in (("success", "success", 1.0), ("restricted_s", "time saved [s]", -1.0)):
                test = contrast(*(sign * np.array(runs[of][at][key], np.float64) for of in (one, other)))
                ends = {end: _short(getattr(test.difference, end)) for end in ("mean", "low", "high")}
                yield {
                    "on": f"metaworld, {lever} {strength:g}, {title(link)}", "measure": name, "first": DECODED[one],
                    "second": DECODED[other], "difference": ends, "p": test.p,
                }  # fmt: skip


def findings_of(sweep: str, found: Metrics) -> Iterator[dict[str, Any]]:
    """Where each finding was looked for."""
    for row in found["findings"]:
        lever, _, where = row["about"].partition(" ")
        about = f"{TITLES.get(lever, lever)} {where}"
        yield {
            "sweep": sweep,
            "number": row["number"],
            "about": about,
            "lever": lever,
            "seen": "yes" if row["seen"] else "no",
        }


def counted(rows: Sequence[Metrics]) -> Iterator[dict[str, Any]]:
    """A row per finding."""
    for number, finding in FINDINGS.items():
        here = [row for row in rows if row["number"] == number]
        seen = [row for row in here if row["seen"] == "yes"]
        levers = dict.fromkeys(f"`{TITLES.get(row['lever'], row['lever'])}` ({row['sweep']})" for row in seen)
        yield {
            "number": number, "finding": finding, "paper": PUBLISHED[number], "seen": len(seen), "places": len(here),
            "where": ", ".join(levers) or "none",
        }  # fmt: skip


def gates_of(sweep: str, found: Metrics) -> Iterator[dict[str, Any]]:
    """Calibrations of a sweep."""
    for row in found["calibrations"]:
        yield {
            "sweep": sweep, **{key: row[key] for key in ("lever", "pace", "idle", "episodes", "inferences")},
            "link": title(row["link"]), "wanted": row["rate"], "threshold": _short(row["gate"]["threshold"]),
            "held_out": _short(row["held_out_rate"]), "sent": _short(row["held_out_sent"]),
        }  # fmt: skip


def by_link(sweep: Metrics, pace: float, idle: str) -> Iterator[dict[str, Any]]:
    """Success of every method over each link; without a link it is the same over all."""
    cells = [cell for cell in sweep["cells"] if (cell["pace"], cell["idle"]) == (pace, idle)]
    titles = dict.fromkeys(title(cell["link"]) for cell in cells if cell["link"] != ON_BOARD)
    for method in FRONTIER:
        own = {title(c["link"]): c["success.mean"] for c in cells if method_of(c["lever"], c["strength"]) == method}
        if own:
            yield {"method": method, **{name: own.get(name, own.get("none")) for name in titles}}


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
    """Share of periods standing still, by link; what needs none is the same over all."""
    links, styles = ("wifi-paper", "lte", "recorded"), {"remote target, asynchronous": "asynchronous"}
    series = {}
    for row in rows:
        shares = [(x, row[link] or row["none"]) for x, link in enumerate(links)]
        name = styles.get(row["method"], row["method"].replace("ADAHI", "adahi").replace(", waited for", " on device"))
        series[name] = [Point(x, *(100 * share[end] for end in ("middle", "low", "high"))) for x, share in shares]
    figure = draw_series(
        {name: points for name, points in series.items() if name not in ("adahi", "hybrid")},
        "link to the server",
        "control periods standing still [%]",
        "Meta-World's token target: standing still over a slow link",
        {"asynchronous": "target over the link,\nasynchronous", "target on device": "target on device,\nwaited for"},
    )
    figure.axes[0].set_xticks(range(3), ["fast Wi-Fi", "LTE", "recorded Wi-Fi\n(117 ms)"])
    figure.axes[0].set_ylim(-3, 103)
    return figure


def draw_links(sweep: Metrics) -> Figure:
    """Success over the round trip of steady links, goal at rest, last command while waiting."""
    styles = {"async target": "asynchronous"}
    shown = ("draft", "head as draft", "target on device", "target", "async target", "late adahi")
    cells = [cell for cell in sweep["cells"] if (cell["pace"], cell["idle"]) == (0.0, "last")]
    xs = sorted({_rtt(cell["link"]) for cell in cells if cell["link"].startswith("loopback")})
    series: dict[str, list[Point]] = {}
    for cell in cells:
        name = method_of(cell["lever"], cell["strength"])
        if name in shown and not cell["link"].startswith((WIFI, LTE)):
            own = series.setdefault(styles.get(name, name), [])
            for x in xs if cell["link"] == ON_BOARD else [_rtt(cell["link"])]:
                own.append(Point(x, *(cell[f"success.{key}"] for key in ("mean", "low", "high"))))
    return draw_series(
        series,
        "round trip of the link [ms]",
        "success",
        "Ball, goal at rest: success over the link's round trip",
        {"asynchronous": "target, asynchronous", "target": "target, waited for"},
    )


def _rtt(link: str) -> float:
    return float(link.partition("=")[2])


def draw_static(sweeps: Mapping[str, Metrics]) -> Figure:
    """Both times of the task over naive overlap where the world waits, with the intervals of their differences."""
    figure = Figure(figsize=(4.8, 6.6), layout="constrained")
    names = [name for name in STATIC if name.startswith("naive")]
    for name, axes in zip(names, figure.subplots(len(names), 1, sharex=True), strict=True):
        series: dict[str, list[Point]] = {"target": [], "draft": []}
        rows = list(static_of(name, sweeps[name]))
        for row, (style, key, own) in product(
            rows, (("target", "restricted_s", "restricted"), ("draft", "own_s", "own"))
        ):
            none = rows[0][key]
            away = row[own] or {"mean": 0.0, "low": 0.0, "high": 0.0}
            series[style].append(Point(row["strength"], *(none + away[end] for end in ("mean", "low", "high"))))
        labels = {"target": "failures counted", "draft": "successes only"}
        add_series(axes, series, "actions of naive overlap", "time of the task [s]", rows[0]["task"], labels)
        axes.set_xticks([row["strength"] for row in rows])
        axes.label_outer()
    return figure
