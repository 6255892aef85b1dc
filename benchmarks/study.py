"""The study's tables for README and docs, from the run folders of `specact reproduce adahi`.

Run: specact reproduce adahi --out results/adahi --data path/to/demonstrations
     python benchmarks/study.py results/adahi

The summaries are kept in benchmarks/results/study/PAIR-CHAPTER.json; benchmarks/results/study.md and the marked tables
of README.md, docs/reproduce.md and docs/gates.md are written from those.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from pages import fill

from specact.evaluation.study import PAIRS
from specact.report.drawing import legend_below, style
from specact.report.goals import goals_of
from specact.report.looks import look_of
from specact.report.runs import find_runs
from specact.report.studies import group

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"

Summary = dict[str, Any]
GATES = ("hybrid", "random", "adahi", "uncertainty", "learned", "learned_action", "oracle")
# Of the figures beside the study's page, those that docs show, and what they are called there.
PICTURES = {"ball-success-over-rate.png": "gates.png", "ball-rejection.png": "rejection.png"}
PAPER: dict[str, dict[str, Any]] = {
    "kitchen": {"adahi": 0.394, "hybrid": 0.430, "draft": 0.060, "target": 0.430, "random": 0.325, "sent": 0.543,
                "skips": (0.607, 0.539)},
    "ball": {"adahi": 0.811, "hybrid": 0.834, "draft": 0.001, "target": 0.850, "random": 0.726, "sent": 0.603,
             "skips": (0.553, 0.343)},
    "swarm": {"adahi": 0.294, "hybrid": 0.295, "draft": 0.065, "target": 0.303, "random": 0.230, "sent": 0.591,
              "skips": (0.504, 0.395)},
}  # fmt: skip


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/study.py RESULTS, the folder given to specact reproduce adahi --out")
    folder = Path(sys.argv[1])
    kept = RESULTS / "study"
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    study: dict[str, Summary] = {}
    for path in sorted(folder.glob("*/*/summary.json")):
        name = "-".join(path.parts[-3:-1])
        study[name] = json.loads(path.read_text())
        (kept / f"{name}.json").write_text(json.dumps(study[name], indent=1) + "\n")
    (RESULTS / "study.md").write_text("\n\n".join(whole(name, summary) for name, summary in study.items()) + "\n")
    tables = {
        "overview": overview(study),
        "rates": rates(study),
        "rows": rows(study),
        "goals": goals(folder),
        "hours": f"{sum(summary['seconds'] for summary in study.values()) / 3600:.1f} hours",
    }
    for page in (ROOT / "README.md", ROOT / "docs" / "reproduce.md", ROOT / "docs" / "gates.md"):
        for name, table in tables.items():
            fill(page, name, table)
    draw(study, ROOT / "docs" / "pairs.png")
    for picture, kept_as in PICTURES.items():
        drawn = folder / "report_files" / picture
        if drawn.exists():
            shutil.copy(drawn, ROOT / "docs" / kept_as)


def draw(study: dict[str, Summary], to: Path) -> None:
    """Success of the main methods on every pair at a rate of .4, with their intervals."""
    shown = ("draft", "random", "adahi", "learned", "learned_action", "hybrid")
    pairs = [
        pair for pair in PAIRS if f"{pair}-rate-0.4" in study and "learned" in study[f"{pair}-rate-0.4"]["methods"]
    ]
    with style():
        figure = Figure(figsize=(8.4, 3.6), layout="constrained")
        axes = figure.subplots()
        for number, method in enumerate(shown):
            # The draft alone is the same at every rate, and stands in the table.
            runs = [study[f"{pair}-table" if method == "draft" else f"{pair}-rate-0.4"] for pair in pairs]
            found = [run["methods"][method]["success"] for run in runs]
            x = [place + 0.11 * (number - (len(shown) - 1) / 2) for place in range(len(pairs))]
            y = [success["rate"] for success in found]
            down = [success["rate"] - success["low"] for success in found]
            up = [success["high"] - success["rate"] for success in found]
            look = look_of(method)
            axes.errorbar(x, y, (down, up), fmt=look.marker, color=look.light, label=method.replace("_", " "), ms=6)
        axes.set_xticks(range(len(pairs)), [f"{pair}\n{study[f'{pair}-rate-0.4']['episodes']}" for pair in pairs])
        axes.grid(visible=False, axis="x")
        axes.set_ylim(0.0, 1.02)
        axes.set_ylabel("success, 95 % interval")
        axes.set_xlabel("pair, paired episodes")
        legend_below(figure, columns=len(shown))
        figure.savefig(to, dpi=150)


def overview(study: dict[str, Summary]) -> str:
    """One line per pair on the end point that says most: the score, or the success itself."""
    shown = ("draft", "target", "hybrid", "random", "adahi", "learned")
    lines = [
        "| pair, episodes | " + " | ".join(shown) + " | adahi - random | learned - random | sent, adahi / learned "
        "| latency, adahi / hybrid |",
        "|---|" + "---|" * (len(shown) + 4),
    ]
    for pair in PAIRS:
        summary = study.get(f"{pair}-table")
        if summary is None:
            continue
        methods = summary["methods"]
        cells = [f"{pair}, {summary['episodes']}"]
        cells += [_interval(methods[name]["score"], 2) if name in methods else "-" for name in shown]
        cells += [_contrast(summary, first, "random", "score") for first in ("adahi", "learned")]
        cells.append(" / ".join(_number(methods.get(m, {}).get("transmission_rate"), 2) for m in ("adahi", "learned")))
        times = [methods[name]["latency"]["per_action_ms"] for name in ("adahi", "hybrid")]
        cells.append(f"{times[0]:.2f} / {times[1]:.2f} ms ({times[0] / times[1] - 1:+.0%})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def rates(study: dict[str, Summary]) -> str:
    """Success of every gate at .2, .4 and .6, gate efficiency in brackets, with the trained and the distilled draft."""
    sending = ("random", "adahi", "learned", "learned_action")
    pairs = (("learned", "random"), ("learned_action", "random"), ("learned", "hybrid"))
    contrasts = [f"{first} - {second}" for first, second in pairs]
    heads = ["pair, rate, episodes", *GATES, f"sent, {' / '.join(sending)}", *contrasts]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---|" * (len(heads) - 1)]
    for name, summary in _at_rates(study):
        cells, methods = [name], summary["methods"]
        for gate in GATES:
            found = methods.get(gate)
            if found is None:
                cells.append("-")
                continue
            efficiency = found["gate_efficiency"]
            shown = gate not in ("hybrid", "random") and efficiency is not None
            cells.append(f"{found['success']['rate']:.3f}" + (f" ({efficiency:.2f})" if shown else ""))
        cells.append(" / ".join(_number(methods.get(name, {}).get("transmission_rate"), 2) for name in sending))
        cells += [_contrast(summary, first, second, "success") for first, second in pairs]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _at_rates(study: dict[str, Summary]) -> Iterator[tuple[str, Summary]]:
    for pair in PAIRS:
        for bundle in (pair, f"{pair}-distilled"):
            for rate in ("0.2", "0.4", "0.6"):
                endings = ("",) if rate == "0.6" else ("", "-unlimited")
                for ending in endings:
                    summary = study.get(f"{bundle}-table" if rate == "0.6" else f"{bundle}-rate-{rate}{ending}")
                    if summary is not None and "learned" in summary["methods"]:
                        free = ", no limit on skips" if ending else ""
                        yield f"{bundle}, {rate}{free}, {summary['episodes']}", summary


def rows(study: dict[str, Summary]) -> str:
    """The paper's table beside ours: success, rate, true skip ratio."""
    shown = ("adahi", "hybrid", "draft", "target", "random")
    lines = [
        "| | | ADAHI | hybrid | draft | target | random | sent | true skip, ADAHI / random |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for pair in PAIRS:
        if pair in PAPER:
            paper = PAPER[pair]
            cells = [f"{paper[name]:.3f}" for name in shown]
            skips = " / ".join(f"{skip:.3f}" for skip in paper["skips"])
            lines.append(f"| {pair} | paper, success | {' | '.join(cells)} | {paper['sent']:.3f} | {skips} |")
        summary = study.get(f"{pair}-table")
        if summary is None:
            continue
        methods = summary["methods"]
        cells = [f"{methods[name]['success']['rate']:.3f}" for name in shown]
        skips = " / ".join(f"{methods[name]['true_skip_ratio']:.3f}" for name in ("adahi", "random"))
        sent = f"{methods['adahi']['transmission_rate']:.3f}"
        lines.append(f"| {pair} | here, success | {' | '.join(cells)} | {sent} | {skips} |")
        if any(methods[name]["score"]["mean"] != methods[name]["success"]["rate"] for name in shown):
            cells = [f"{methods[name]['score']['mean']:.3f}" for name in shown]
            lines.append(f"| {pair} | here, score | {' | '.join(cells)} | | |")
    return "\n".join(lines)


def goals(folder: Path) -> str:
    """The goals as on the study's page."""
    found = goals_of(group(find_runs([folder])[0]))
    lines = ["| goal | bundle | rate | reached | met | beside it |", "|---|---|---|---|---|---|"]
    for goal in found:
        cells = (goal.what, goal.bundle, f"{goal.rate:g}", goal.reached, "yes" if goal.met else "**no**", goal.beside)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"{sum(goal.met for goal in found)} of {len(found)} met."])


def whole(name: str, summary: Summary) -> str:
    """One run's methods and contrasts."""
    methods = summary["methods"].values()
    binary = all(m["score"]["mean"] == m["success"]["rate"] for m in methods)
    timed = f"link {summary['link']}, " + ("measured over real sockets" if summary["realtime"] else "in virtual time")
    lines = [
        f"### {name}",
        "",
        f"{summary['episodes']} paired episodes, seed {summary['seed']}, gates calibrated for a rate of "
        f"{summary['rate']}, {timed}; {summary['seconds']:.0f} s.",
        "",
        "| method | success [95 %] |" + ("" if binary else " score [95 %] |") + " sent | true skip | accepted "
        "| gated loss | action change | gate efficiency | choice | MSE [95 %] | ms per action |",
        "|---|---|" + ("" if binary else "---|") + "---|" * 9,
    ]
    for method, m in summary["methods"].items():
        success, mse = m["success"], m.get("mse")
        cells = [method, f"{success['rate']:.3f} [{success['low']:.3f}, {success['high']:.3f}]"]
        if not binary:
            cells.append(_interval(m["score"], 3))
        cells += [
            f"{m['transmission_rate']:.3f}",
            _number(m["true_skip_ratio"]),
            _number(m["acceptance"]["all"]),
            _number(m["gated_loss"]),
            _number(m["action_change_loss"]),
            _number(m["gate_efficiency"], 2),
            _number(m["choice_efficiency"], 2),
            "-" if mse is None else _interval(mse, 4),
            f"{m['latency']['per_action_ms']:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    if summary["contrasts"]:
        lines += ["", "| contrast | success: difference [95 %], p | score: difference [95 %], p |", "|---|---|---|"]
    for row in summary["contrasts"]:
        cells = [f"{row['first']} - {row['second']}"]
        cells += [_contrast(summary, row["first"], row["second"], end) for end in ("success", "score")]
        lines.append("| " + " | ".join(cells) + " |")
    if summary["calibration"]:
        held = ", ".join(f"{gate} {entry['held_out_rate']:.3f}" for gate, entry in summary["calibration"].items())
        lines += ["", f"Held-out transmission rates of the calibrated gates, wanted {summary['rate']}: {held}."]
    return "\n".join(lines)


def _contrast(summary: Summary, first: str, second: str, end_point: str) -> str:
    for row in summary["contrasts"]:
        if (row["first"], row["second"]) == (first, second):
            c = row[end_point]
            return f"{c['difference']:+.3f} [{c['low']:+.3f}, {c['high']:+.3f}], p = {c['p']:.2g}"
    return "-"


def _interval(found: dict[str, float], digits: int) -> str:
    return f"{found['mean']:.{digits}f} [{found['low']:.{digits}f}, {found['high']:.{digits}f}]"


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    main()
