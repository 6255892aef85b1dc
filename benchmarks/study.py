"""The study's tables for docs, from the run folders of `specact reproduce adahi`.

Run: specact reproduce adahi --out results/adahi --data path/to/demonstrations
     python benchmarks/study.py results/adahi

The summaries are kept in benchmarks/results/study/PAIR-CHAPTER.json; benchmarks/results/study.md and the marked tables
of docs are written from those. Given that folder itself, it writes the same again, but for the goals
and the rejections, which need the episodes and steps.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import study_tables as tables
from matplotlib.figure import Figure
from pages import fill
from specact.lab.evaluation.study import PAIRS
from specact.lab.report.goals import count, goals_of
from study_tables import Summary

from specact.lab.report.drawing import legend_below, style, style_of
from specact.lab.report.rejection import rejections_of
from specact.lab.report.runs import Study, find_runs, group

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
KEPT = RESULTS / "study"
PAGES = ("docs/results.md", "docs/reproduce.md", "docs/gates.md", "docs/speed.md")
# Of the figures beside the study's page, those that docs show, and what they are called there.
PICTURES = {"ball-success-over-rate.png": "gates.png", "ball-rejection.png": "rejection.png"}


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/study.py RESULTS, the folder given to specact reproduce adahi --out")
    folder = Path(sys.argv[1])
    study = keep(folder)
    (RESULTS / "study.md").write_text("\n\n".join(tables.whole(name, run) for name, run in study.items()) + "\n")
    made = {
        "overview": tables.overview(study),
        "costs": tables.costs(study),
        "sockets": tables.sockets(study),
        "rates": tables.rates(study),
        "rows": tables.rows(study),
        "hours": f"{sum(summary['seconds'] for summary in study.values()) / 3600:.1f} hours",
    }
    if folder.resolve() != KEPT.resolve():
        studies = group(find_runs([folder])[0])
        made |= {"goals": goals(studies), "rejection": rejection(studies)}
    for page in PAGES:
        for name, table in made.items():
            fill(ROOT / page, name, table)
    draw(study, ROOT / "docs" / "pairs.png")
    for picture, kept_as in PICTURES.items():
        drawn = folder / "report_files" / picture
        if drawn.exists():
            shutil.copy(drawn, ROOT / "docs" / kept_as)


def keep(folder: Path) -> dict[str, Summary]:
    """Reads the summaries of the study's runs by name, and writes them to benchmarks/results."""
    if folder.resolve() != KEPT.resolve():
        shutil.rmtree(KEPT, ignore_errors=True)
        KEPT.mkdir(parents=True)
        for path in sorted(folder.glob("*/*/summary.json")):
            summary = json.loads(path.read_text())
            (KEPT / f"{'-'.join(path.parts[-3:-1])}.json").write_text(json.dumps(summary, indent=1) + "\n")
    return {path.stem: json.loads(path.read_text()) for path in sorted(KEPT.glob("*.json"))}


def rejection(studies: Sequence[Study]) -> str:
    """Rejection over ADAHI's deviation on every pair, of any code and of the primary one, as in the page's figures."""
    lines = [
        "| pair, steps | rejection of | R², linear (slope) | R², logarithmic (slope) | Spearman | AUROC |",
        "|---|---|---|---|---|---|",
    ]
    for found in (rejections_of(study) for pair in PAIRS for study in studies if study.title == pair):
        if found is None:
            continue
        for code, model in (("any code, R", found.every), ("primary code, r", found.primary)):
            fits = [f"{fit.r2:.2f} ({fit.slope:+.2g})" for fit in (model.linear, model.logarithmic)]
            name = f"{found.run.summary['bundle']}, {model.steps:,}"
            cells = [name, code, *fits, f"{model.spearman:+.2f}", f"{model.auroc:.2f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def goals(studies: Sequence[Study]) -> str:
    """The table of goals of the study's page."""
    found = goals_of(studies)
    lines = [
        "| goal | bundle | rate | episodes | reached [95 %] | result | beside it |",
        "|---|---|---|---|---|---|---|",
    ]
    for goal in found:
        result = f"**{goal.result}**" if goal.result == "not met" else goal.result
        cells = (goal.what, goal.bundle, f"{goal.rate:g}", str(goal.episodes), goal.reached, result, goal.beside)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"Of {len(found)} goals: {count(found)}."])


def draw(study: dict[str, Summary], to: Path) -> None:
    """Draws success of the main methods on every pair at a rate of .4, with intervals."""
    shown = ("draft", "head_draft", "random", "adahi", "learned", "learned_action", "hybrid")
    pairs = [
        pair for pair in PAIRS if f"{pair}-rate-0.4" in study and "learned" in study[f"{pair}-rate-0.4"]["methods"]
    ]
    with style():
        figure = Figure(figsize=(8.4, 3.6), layout="constrained")
        axes = figure.subplots()
        for number, method in enumerate(shown):
            methods = [study[f"{pair}-{_chapter(method)}"]["methods"] for pair in pairs]
            places = [place for place in range(len(pairs)) if method in methods[place]]
            if not places:
                continue
            found = [methods[place][method]["success"] for place in places]
            x = [place + 0.11 * (number - (len(shown) - 1) / 2) for place in places]
            y = [success["rate"] for success in found]
            down = [success["rate"] - success["low"] for success in found]
            up = [success["high"] - success["rate"] for success in found]
            shown = style_of(method)
            axes.errorbar(x, y, (down, up), fmt=shown.marker, color=shown.light, label=method.replace("_", " "), ms=6)
        axes.set_xticks(range(len(pairs)), [f"{pair}\n{study[f'{pair}-rate-0.4']['episodes']}" for pair in pairs])
        axes.grid(visible=False, axis="x")
        axes.set_ylim(0.0, 1.02)
        axes.set_ylabel("success, 95 % interval")
        axes.set_xlabel("pair, paired episodes")
        legend_below(figure, columns=len(shown))
        figure.savefig(to, dpi=150)


def _chapter(method: str) -> str:
    """The run with a method's success at .4; methods without a rate, except hybrid, are only in the table's run."""
    return "table" if method in ("draft", "head_draft") else "rate-0.4"


if __name__ == "__main__":
    main()
