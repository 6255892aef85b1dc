"""The README's table of methods: every method on every environment, paired episodes, in virtual time.

Run: python benchmarks/methods.py [BUNDLE ...]

Run folders go to runs/methods/BUNDLE and resume; the summaries are kept in benchmarks/results/BUNDLE.json, and
benchmarks/results/methods.md and the README's overview are written from those.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from specact.cli.output import progress_bars
from specact.evaluation.evaluation import Evaluation
from specact.evaluation.methods import METHODS
from specact.evaluation.run import evaluate

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
# Readings were chosen on seed 0, see readings.py: this table is on other episodes.
SEED = 1
EPISODES = {"ball": 500, "swarm": 500, "pusht": 200, "kitchen": 100}
# Kitchen episodes are long; its oracle on the action change is left out.
LEFT_OUT = {"kitchen": {"oracle_action"}}


def main() -> None:
    RESULTS.mkdir(exist_ok=True)
    for name in sys.argv[1:] or EPISODES:
        env = name.partition("-")[0]
        methods = tuple(method for method in METHODS if method not in LEFT_OUT.get(env, ()))
        what = Evaluation(bundle=name, env=None, methods=methods, episodes=EPISODES[env], seed=SEED)
        with progress_bars() as update:
            summary = evaluate(
                what, ROOT / "runs" / "methods" / name, update, command=f"python benchmarks/methods.py {name}"
            )
        (RESULTS / f"{name}.json").write_text(json.dumps(summary, indent=2) + "\n")
    stored = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    text = "\n\n".join(markdown(summary) for summary in stored) + "\n"
    (RESULTS / "methods.md").write_text(text)
    readme = ROOT / "README.md"
    before, rest = readme.read_text().split("<!-- overview -->\n")
    after = rest.partition("<!-- end of overview -->\n")[2]
    middle = f"<!-- overview -->\n{overview(stored)}\n<!-- end of overview -->\n"
    readme.write_text(before + middle + after)
    print(text)


def overview(summaries: list[dict[str, Any]]) -> str:
    """One line per environment for the README, on the end point that says most: the score, or the success itself."""
    shown = ("draft", "target", "hybrid", "random", "adahi")
    lines = [
        "| pair, episodes | " + " | ".join(shown) + " | hybrid - target | adahi - random | sent "
        "| true skip, adahi / random | latency, adahi / hybrid |",
        "|---|" + "---|" * (len(shown) + 5),
    ]
    for summary in summaries:
        methods = summary["methods"]
        cells = [f"{summary['bundle']}, {summary['episodes']}"]
        for name in shown:
            score = methods[name]["score"]
            cells.append(f"{score['mean']:.2f} [{score['low']:.2f}, {score['high']:.2f}]")
        for pair in (("hybrid", "target"), ("adahi", "random")):
            row = next(row for row in summary["contrasts"] if (row["first"], row["second"]) == pair)["score"]
            cells.append(f"{row['difference']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}], p = {row['p']:.2g}")
        skips = [methods[name]["true_skip_ratio"] for name in ("adahi", "random")]
        times = [methods[name]["latency"]["per_action_ms"] for name in ("adahi", "hybrid")]
        cells.append(f"{methods['adahi']['transmission_rate']:.2f}")
        cells.append(f"{skips[0]:.2f} / {skips[1]:.2f}")
        cells.append(f"{times[0]:.2f} / {times[1]:.2f} ms ({times[0] / times[1] - 1:+.0%})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def markdown(summary: dict[str, Any]) -> str:
    """One environment's table and contrasts."""
    binary = summary["methods"]["target"]["score"]["mean"] == summary["methods"]["target"]["success"]["rate"]
    lines = [
        f"### {summary['bundle']}",
        "",
        f"{summary['episodes']} paired episodes, seed {summary['seed']}, gates calibrated for a rate of "
        f"{summary['rate']}, link {summary['link']} in virtual time.",
        "",
        "| method | success [95 %] |" + ("" if binary else " score [95 %] |") + " sent | true skip | accepted "
        "| gated loss | action change | gate efficiency | ms per action |",
        "|---|---|" + ("" if binary else "---|") + "---|---|---|---|---|---|---|",
    ]
    for name, m in summary["methods"].items():
        success, score = m["success"], m["score"]
        cells = [name, f"{success['rate']:.3f} [{success['low']:.3f}, {success['high']:.3f}]"]
        if not binary:
            cells.append(f"{score['mean']:.3f} [{score['low']:.3f}, {score['high']:.3f}]")
        cells += [
            f"{m['transmission_rate']:.3f}",
            _number(m["true_skip_ratio"]),
            _number(m["acceptance"]["all"]),
            _number(m["gated_loss"]),
            _number(m["action_change_loss"]),
            _number(m["gate_efficiency"], 2),
            f"{m['latency']['per_action_ms']:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| contrast | success: difference [95 %], p | score: difference [95 %], p |", "|---|---|---|"]
    for row in summary["contrasts"]:
        cells = [f"{row['first']} - {row['second']}"]
        for end_point in ("success", "score"):
            c = row[end_point]
            cells.append(f"{c['difference']:+.3f} [{c['low']:+.3f}, {c['high']:+.3f}], p = {c['p']:.2g}, {c['test']}")
        lines.append("| " + " | ".join(cells) + " |")
    rates = ", ".join(f"{gate} {entry['held_out_rate']:.3f}" for gate, entry in summary["calibration"].items())
    lines += ["", f"Held-out transmission rates of the calibrated gates, wanted {summary['rate']}: {rates}."]
    return "\n".join(lines)


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    main()
