"""The sweeps of docs/tised.md: methods over links, and the effect of levers on tasks.

Run: python benchmarks/tised.py [NAME ...] [--episodes N] [--workers N] [--pages]
Names are below. Each takes minutes to an hour, and resumes; --episodes (200 if not given) may be raised later.

Sweeps go to runs/tised/NAME. What they say is kept in benchmarks/results/tised/NAME.json, and their figures in
runs/tised/NAME/analysis; benchmarks/results/tised.md is written from the former. Recorded links are read from
$SPECACT_DATA and left out without it. Of the three decodings of a token policy the outcome of every episode is kept,
too, and they are compared over each link.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray
from pages import fill

from specact.lab.report.drawing import INK, style
from specact.lab.statistics import Contrast, contrast, holm
from specact.lab.tised.curves import ON_BOARD, sort_curves
from specact.lab.tised.frontier import FRONTIER, method_of
from specact.lab.tised.records import read_sweeps

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "tised"
DATA = Path(os.environ.get("SPECACT_DATA", ""))

STEADY = [f"loopback+delay={ms}" for ms in (1, 20, 50, 100, 200)]
# Recordings of Wi-Fi and an internet provider between a real robot and its operator, and of an LTE phone.
RECORDED = [
    "rtt:network/telerobot_rtt/tyrell_roundtrip024.csv",
    "mahimahi:network/mahimahi/TMobile-LTE-short.up,network/mahimahi/TMobile-LTE-short.down",
]
METHODS = ["verification=1,0.6,0", "late=1,0.6", "chance=0.6", "remote", "remote_async=2"]
# Methods without a server: the target, and the learned gate's head.
ALONE = "alone=0,1"
# A draft at 50 times its time here, and a server whose target takes what a 12-layer, 768-wide transformer takes on two
# cores.
FAR = ["--hardware", "vla-rtx-4070", "--target-ms", "38"]
MACHINES = ["this-machine", "agx-50w", "agx-15w", "vla-rtx-4070"]

# A token policy on a server, which decodes a chunk in 21 ms on one core here (docs/tokens.md), and a small draft.
TOKENS = [
    "--bundle", "metaworld-tokens", "--draft", "metaworld-draft", "--levers", "verification=1,0.6,0", "late=1,0.6",
    "chance=0.6", "--target-ms", "21", "--calibration-episodes", "10",
]  # fmt: skip

# The systems of docs/tokens.md, by the decoding that verifies.
DECODED = {"specvla": "Spec-VLA", "kerv": "KERV", "heisd_fixed": "HeiSD"}
# Marker, whether it is filled, and label of the levers at their strengths.
MARKERS = {
    ("verification", 1.0): ("o", True, "hybrid"), ("verification", 0.6): ("o", False, "ADAHI"),
    ("chance", 0.6): ("X", False, "random"), ("late", 1.0): ("s", True, "late"),
    ("late", 0.6): ("s", False, "late ADAHI"), ("verification", 0.0): ("v", True, "nothing verified"),
}  # fmt: skip
# End points of every episode, by lever, strength and link.
Outcomes = dict[tuple[str, float, str], dict[str, NDArray[np.float64]]]

# The figures of a sweep in docs/tised.md, and their names there.
PICTURES = {
    "levers-chase": {
        "tised-naive-ball-chase-0-hold-agx-50w": "tised-paradox",
        "tised-staleness-steps-ball-chase-hold": "tised-staleness",
    },
}
TITLES = {
    1: "A faster chunk and a slower task",
    2: "A setting that is worse where least is stale, and succeeds more often where more is",
    3: "A sweet spot that moves with the hardware or the link",
}

SWEEPS: dict[str, list[str]] = {
    # On ball the task's holding action is the last one, on PushT it is the neutral one.
    "frontier-ball": [
        "--bundle", "ball", "--levers", *METHODS, ALONE, "--paces", "0", "0.02", "--idle", "last", "neutral", *FAR,
        "--calibration-episodes", "15",
    ],
    "frontier-pusht": [
        "--bundle", "pusht", "--levers", *METHODS, ALONE, "--paces", "0", "--idle", "hold", "last", *FAR,
    ],
    # What is verified, and executed where nothing is: by a head's tree; with a Kalman tail; a memory's chunk.
    **{f"links-{name}": [*TOKENS, "--decoding", name] for name in DECODED},
    # One link, more episodes: what the robot does while it waits.
    "idle-ball": [
        "--bundle", "ball", "--levers", "verification=1,0", "late=0.6", "remote_async=2", ALONE, "--paces", "0",
        "--idle", "last", "neutral", *FAR, "--links", "loopback+delay=100",
    ],
    "levers-chase": [
        "--bundle", "ball-chase-flow", "--levers", "steps", "naive=0,2,4,6", "aligned=0,2,4,6", "quantisation=0,4,8",
        "--paces", "0", "0.1", "--hardware", *MACHINES,
    ],
    "flash-chase": [
        "--bundle", "ball-chase-flow", "--levers", "steps", "flash", "--paces", "0", "0.1", "--hardware", *MACHINES,
    ],
    # A device on which the target takes 50 and 485 times as long as here, and a server on which it takes 2 ms.
    "split-ball": [
        "--bundle", "ball", "--levers", "split", "--paces", "0", "0.02", "--idle", "last", "--hardware", "vla-rtx-4070",
        "vla-agx-50w", "--target-ms", "2", "--links", *STEADY[:3],
    ],
    "reuse-metaworld": [
        "--bundle", "metaworld-flow", "--execute", "4", "--levers", "reuse", "steps=10,2,1", "--paces", "0",
        "--hardware", "agx-50w", "vla-rtx-4070",
    ],
    # Guidance costs three times as much, so that it is for few steps.
    "executions-chase": [
        "--bundle", "ball-chase-flow", "--steps", "2", "--levers", "naive=0,2,4,6", "roll_forward=0,2,4,6",
        "aligned=0,2,4,6", "inpainting=0,2,4,6", "--paces", "0", "0.1", "--hardware", *MACHINES,
    ],
    "levers-pusht": [
        "--bundle", "pusht-flow", "--levers", "steps", "aligned=0,4", "inpainting=0,4", "--paces", "0",
        "--hardware", *MACHINES,
    ],
    "window-pusht": ["--bundle", "pusht", "--levers", "window", "--paces", "0", "--hardware", *MACHINES],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", choices=[*SWEEPS, []], default=[])
    parser.add_argument("--episodes", default="200")
    parser.add_argument("--workers", default=None)
    parser.add_argument("--pages", action="store_true", help="write the pages from the results, and run nothing")
    given = parser.parse_args()
    for name in () if given.pages else given.names or SWEEPS:
        run(name, given.episodes, given.workers)
    parts = [markdown(path.stem, json.loads(path.read_text())) for path in sorted(RESULTS.glob("*.json"))]
    (RESULTS.parent / "tised.md").write_text("\n".join(parts))
    fill(ROOT / "docs" / "tised.md", "frontier", frontier())
    fill(ROOT / "docs" / "tised.md", "idle-ball", idling("idle-ball"))
    for name in ("levers-chase", "executions-chase", "levers-pusht"):
        fill(ROOT / "docs" / "tised.md", name, levers(name))
    others = {"flash-chase": "flash", "split-ball": "split", "reuse-metaworld": "freqcache"}
    others |= {f"links-{name}": "tokens" for name in DECODED}
    for name, page in others.items():
        fill(ROOT / "docs" / f"{page}.md", name, levers(name))
    decoded = {system: kept_outcomes(f"links-{name}") for name, system in DECODED.items()}
    if all(decoded.values()):
        fill(ROOT / "docs" / "tokens.md", "links between", between(decoded))
        with style():
            draw_decoded(decoded).savefig(ROOT / "docs" / "tokens-links.png", dpi=110)


def run(name: str, episodes: str, workers: str | None) -> None:
    """Runs the commands of one sweep and its analysis."""
    folder, arguments = ROOT / "runs" / "tised" / name, list(SWEEPS[name])
    if name.startswith(("frontier", "links")):
        steady = STEADY if name.startswith("frontier") else STEADY[::2]
        arguments += ["--links", *steady, *(RECORDED if (DATA / "network").is_dir() else ())]
    where = DATA if (DATA / "network").is_dir() else ROOT
    command = ["tised", "sweep", *arguments, "--episodes", episodes, "--seed", "1"]
    how = ["--out", str(folder), *(() if workers is None else ("--workers", workers))]
    subprocess.run(["specact", *command, *how], check=True, cwd=where)
    subprocess.run(["specact", "tised", "analyse", str(folder)], check=True, cwd=where, stdout=subprocess.DEVNULL)
    RESULTS.mkdir(parents=True, exist_ok=True)
    found = json.loads((folder / "analysis" / "analysis.json").read_text())
    manifest = json.loads((folder / "manifest.json").read_text())
    kept = {"command": " ".join(["specact", *command]), "latency_ms": manifest["latency_ms"], **found}
    if name.startswith("links"):
        kept["outcomes"] = outcomes(folder)
    (RESULTS / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")
    for picture in (folder / "analysis").glob("tised-frontier-success*.png") if name.startswith("frontier") else ():
        pace, _, rest = picture.stem.partition("-at-pace-")[2].partition("-idle-")
        shutil.copy(picture, ROOT / "docs" / f"{name}-{pace}-{rest.partition('-')[0]}.png")
    for picture, kept_as in PICTURES.get(name, {}).items():
        shutil.copy(folder / "analysis" / f"{picture}.png", ROOT / "docs" / f"{kept_as}.png")


def frontier() -> str:
    """Success of every method over the round trip, for every pair, pace and idle mode of the sweeps."""
    found = {path.stem.partition("-")[2]: _methods(path) for path in sorted(RESULTS.glob("frontier-*.json"))}
    if not found:
        return "Not run yet."
    links = {cell["link"] for cells in found.values() for _, cell in cells} - {ON_BOARD}
    columns = sorted(links, key=_order)
    lines = [
        "| pair, pace, idle | method | " + " | ".join(map(_title, columns)) + " |",
        "|---|---|" + "---|" * len(columns),
    ]
    for pair, cells in found.items():
        for pace, idle in sorted({(cell["pace"], cell["idle"]) for _, cell in cells}):
            for method in FRONTIER:
                own = (method, pace, idle)
                here = {cell["link"]: cell for name, cell in cells if (name, cell["pace"], cell["idle"]) == own}
                shown = [here.get(link, here.get(ON_BOARD)) for link in columns]
                values = ["-" if cell is None else f"{cell['success.mean']:.3f}" for cell in shown]
                lines.append(f"| {pair}, {pace:g}, {idle} | {method} | {' | '.join(values)} |")
    return "\n".join(lines)


def idling(name: str) -> str:
    """Success of every method over one link, with each idle mode."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return "Not run yet."
    cells = _methods(path)
    ways = sorted({cell["idle"] for _, cell in cells})
    lines = ["| method | " + " | ".join(f"idle `{way}`" for way in ways) + " |", "|---|" + "---|" * len(ways)]
    for method in FRONTIER:
        here = {cell["idle"]: cell for found, cell in cells if found == method}
        if here:
            lines.append(f"| {method} | {' | '.join(_interval(here[way], 'success', 3) for way in ways)} |")
    return "\n".join(lines)


def _methods(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The cells of the frontier's methods in a sweep, with their names."""
    cells = json.loads(path.read_text())["cells"]
    found = [(method_of(cell["lever"], cell["strength"]), cell) for cell in cells]
    return [(method, cell) for method, cell in found if method is not None]


def levers(name: str) -> str:
    """Success and restricted mean time of every setting of one sweep over hardware and links."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return "Not run yet."
    cells = json.loads(path.read_text())["cells"]
    places = sorted({(c["kappa"], c["hardware"], c["link"]) for c in cells}, key=lambda at: (at[0], _rtt(at[2]), at[2]))
    heads = ["lever", "pace", *(_column(*place) for place in places)]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---|" * (len(heads) - 1)]
    for lever, strength, pace in dict.fromkeys((c["lever"], c["strength"], c["pace"]) for c in cells):
        own = [c for c in cells if (c["lever"], c["strength"], c["pace"]) == (lever, strength, pace)]
        here = {(c["kappa"], c["hardware"], c["link"]): c for c in own}
        values = [f"{here[at]['success.mean']:.3f}, {here[at]['restricted_s.mean']:.2f} s" for at in places]
        lines.append(f"| {lever} {strength:g} | {pace:g} | {' | '.join(values)} |")
    return "\n".join(lines)


def _column(kappa: float, hardware: str, link: str) -> str:
    return f"{hardware} (x {kappa:g})" + ("" if link == ON_BOARD else f", {_title(link)}")


def _title(link: str) -> str:
    steady = link.startswith("loopback")
    return f"{_rtt(link):g} ms" if steady else "recorded Wi-Fi" if link.startswith("rtt") else "recorded LTE"


def _rtt(link: str) -> float:
    return float(link.partition("=")[2] or 0.0)


def outcomes(folder: Path) -> list[dict[str, Any]]:
    """Success and restricted time [s] of every episode of a sweep, in order, by lever, strength and link."""
    table, baselines, _ = read_sweeps([folder])
    return [
        {
            "lever": curve.place.lever, "strength": strength, "link": curve.place.link,
            "success": curve.success[number].astype(int).tolist(),
            "restricted_s": np.round(curve.restricted_s[number], 4).tolist(),
        }
        for curve in sort_curves(table, baselines)
        for number, strength in enumerate(curve.strengths)
    ]  # fmt: skip


def kept_outcomes(name: str) -> Outcomes:
    """Those of a sweep's results; empty where they were not kept."""
    path = RESULTS / f"{name}.json"
    rows = json.loads(path.read_text()).get("outcomes", []) if path.exists() else []
    return {
        (row["lever"], row["strength"], row["link"]): {
            point: np.array(row[point], np.float64) for point in ("success", "restricted_s")
        }
        for row in rows
        if (row["lever"], row["strength"]) != ("chance", 1.0)  # the same as verification 1
    }


def between(decoded: dict[str, Outcomes]) -> str:
    """Every two decodings under the same lever over the same link, paired; Holm over the table for each end point."""
    pairs = list(combinations(decoded, 2))
    common = set.intersection(*map(set, decoded.values()))
    # Without a verification a link has no effect, so that one of them is enough.
    distinct = [at for at in common if at[1] > 0.0 or at[2] == STEADY[0]]
    settings = sorted(distinct, key=lambda at: (at[0], -at[1], _order(at[2])))
    found: dict[str, list[Contrast]] = {
        point: [contrast(decoded[one][at][point], decoded[two][at][point]) for at in settings for one, two in pairs]
        for point in ("success", "restricted_s")
    }
    p = {point: iter(holm([one.p for one in contrasts])) for point, contrasts in found.items()}
    cells = iter([_differences(*both, next(p["success"]), next(p["restricted_s"]))
                  for both in zip(found["success"], found["restricted_s"], strict=True)])  # fmt: skip
    lines = ["| lever | link | " + " | ".join(f"{one} - {two}" for one, two in pairs) + " |", "|---" * 5 + "|"]
    for lever, strength, link in settings:
        over, row = _title(link) if strength else "any", " | ".join(next(cells) for _ in pairs)
        lines.append(f"| {lever} {strength:g} | {over} | {row} |")
    return "\n".join(lines)


def _differences(won: Contrast, took: Contrast, *p: float) -> str:
    """Differences of success and of restricted mean time; p where it is below .05."""
    texts = f"{won.difference.mean:+.3f}", f"{took.difference.mean:+.2f} s"
    return ", ".join(text + f" (**p {at:.2g}**)" * (at < 0.05) for text, at in zip(texts, p, strict=True))


def draw_decoded(decoded: dict[str, Outcomes]) -> Figure:
    """Success over restricted mean time of every decoding and lever, a panel for each link."""
    links = sorted({link for runs in decoded.values() for _, _, link in runs}, key=_order)
    figure = Figure(figsize=(11.0, 3.8), layout="constrained")
    (panels,) = figure.subplots(1, len(links), sharex=True, sharey=True, squeeze=False)
    for axes, link in zip(panels, links, strict=True):
        for number, runs in enumerate(decoded.values()):
            for (lever, strength, over), run in runs.items():
                if over == link:
                    marker, filled, _ = MARKERS[lever, strength]
                    axes.plot(
                        run["restricted_s"].mean(), run["success"].mean(), marker, color=f"C{number}", markersize=6,
                        markerfacecolor=f"C{number}" if filled else "none",
                    )  # fmt: skip
        axes.set_title(_title(link), fontsize=10, color=INK.light)
    panels[0].set(ylabel="success", ylim=(0.5, 1.0))
    panels[len(links) // 2].set(xlabel="restricted mean time [s]")
    handles = [Line2D([], [], marker="o", ls="", color=f"C{number}", label=name) for number, name in enumerate(decoded)]
    handles += [
        Line2D([], [], marker=marker, ls="", color=INK.light, mfc=INK.light if filled else "none", label=label)
        for marker, filled, label in MARKERS.values()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), columnspacing=0.9, handletextpad=0.2)
    return figure


def _order(link: str) -> tuple[bool, float, str]:
    return not link.startswith("loopback"), _rtt(link), link


def markdown(name: str, found: dict[str, Any]) -> str:
    """Every cell, and the findings."""
    lines = [
        f"### {name}",
        "",
        f"`{found['command']}`",
        "",
        "Measured on this machine, ms: " + ", ".join(
            f"{label} {' + '.join(f'{part:.3f}' for part in parts)}" for label, parts in found["latency_ms"].items()
        ),
        "",
        "| place | strength | n | success [95 %] | N | T chunk s | T task s | restricted s [95 %] | T inf ms "
        "| stall ms | age ms | jerk | path | sent |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for cell in found["cells"]:
        place = f"{cell['lever']}, {cell['task']} at {cell['pace']:g}, {cell['idle']}, {cell['hardware']}"
        place += "" if cell["link"] == "none" else f", {cell['link']}"
        cells = [
            place, f"{cell['strength']:g}", str(cell["n"]), _interval(cell, "success", 3), _number(cell["chunks"], 1),
            _number(cell["chunk_s"], 3), _number(cell["task_s"], 2), _interval(cell, "restricted_s", 2),
            *(_number(cell[key], 1, 1e3) for key in ("inference_s", "stall_s", "age_s")), _number(cell["jerk"], 1),
            _number(cell["path"], 2), _number(cell["transmission_rate"], 2),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    lines += [*_calibrations(found["calibrations"]), *_comparisons(found["methods"])]
    for number, title in TITLES.items():
        here = [finding for finding in found["findings"] if finding["number"] == number]
        if here:
            seen = sum(finding["seen"] for finding in here)
            lines += ["", f"{number}. {title}: seen {seen} times of {len(here)}.", ""]
            lines += [f"   - {_place(finding)}: {finding['words']}" for finding in here]
    return "\n".join([*lines, ""])


def _calibrations(rows: list[dict[str, Any]]) -> list[str]:
    """The calibrated gates of every place, and their rates on held-out episodes."""
    if not rows:
        return []
    lines = [
        "", "Gates, each calibrated where it runs:", "",
        "| gate of | wanted | threshold | held out | sent | episodes | inferences |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        place = f"{row['lever']}, {row['pace']:g}, {row['idle']}, {row['hardware']}, {row['link']}"
        rates = f"{row['held_out_rate']:.3f} | {row['held_out_sent']:.3f} | {row['episodes']} | {row['inferences']}"
        lines.append(f"| {place} | {row['rate']:g} | {row['gate']['threshold']:.4f} | {rates} |")
    return lines


def _comparisons(rows: list[dict[str, Any]]) -> list[str]:
    """Every pair of methods over every link; p after Holm's correction over all of them, in bold where below .05."""
    if not rows:
        return []
    lines = [
        "", f"Methods pair by pair: difference of success [95 %], exact McNemar, Holm over all {len(rows)} pairs:", "",
        "| pace, idle, link | first | second | n | first minus second | p |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        away = ", ".join(f"{row[f'success.difference.{key}']:+.3f}" for key in ("low", "high"))
        p = f"**{row['p']:.2g}**" if row["p"] < 0.05 else f"{row['p']:.2g}"
        lines.append(
            f"| {row['pace']:g}, {row['idle']}, {row['link']} | {row['first']} | {row['second']} | {row['episodes']} "
            f"| {row['success.difference.mean']:+.3f} [{away}] | {p} |"
        )
    return lines


def _place(finding: dict[str, Any]) -> str:
    """In bold where the finding was seen."""
    return f"**{finding['about']}**" if finding["seen"] else str(finding["about"])


def _interval(cell: dict[str, Any], name: str, digits: int) -> str:
    mean, low, high = (cell[f"{name}.{key}"] for key in ("mean", "low", "high"))
    return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _number(value: float | None, digits: int, factor: float = 1.0) -> str:
    return "-" if value is None else f"{factor * value:.{digits}f}"


if __name__ == "__main__":
    main()
