"""From which share of a core on a target fits: times of the pairs that come with the package.

Run: OMP_NUM_THREADS=1 python benchmarks/targets.py

Writes benchmarks/results/targets.json and its table in docs/budget.md. Run it with nothing else on the machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from budget import machine
from pages import fill

from specact.families.codes.bundle import Bundle
from specact.families.load import load_pair
from specact.files import write_json
from specact.lab.evaluation.budget import measure_parts

RESULTS = Path(__file__).parent / "results" / "targets.json"
PAGE = Path(__file__).parents[1] / "docs" / "budget.md"
ROUNDS = 100

# The pairs that come with the package whose targets differ, with the drafts of those that have none of their own.
TARGETS = {
    "ball": None, "swarm": None, "pusht": None, "pusht-camera": None, "peg": None, "kitchen": None, "relocate": None,
    "metaworld": None, "ball-chase-flow": None, "pusht-flow": None, "kitchen-tokens": None, "relocate-tokens": None,
    "metaworld-flow": None, "metaworld-tokens": "metaworld-draft",
}  # fmt: skip


def measured(rounds: int) -> dict[str, Any]:
    """Milliseconds of draft and target, how long the actions of a chunk last, and the machine."""
    pairs = {name: load_pair(name, draft=draft) for name, draft in TARGETS.items()}
    # One after the other: between larger networks the smaller ones find their weights gone from the cache.
    parts = {name: measure_parts(pair, rounds) for name, pair in pairs.items()}
    found = {
        name: {
            "target_ms": parts[name]["target"],
            "draft_ms": parts[name]["draft"] if isinstance(pair, Bundle) or TARGETS[name] else None,
            "chunk_ms": 1e3 * pair.execute / pair.rate_hz,
        }
        for name, pair in pairs.items()
    }
    return {
        "command": "python benchmarks/targets.py",
        "machine": machine(),
        "rounds": rounds,
        "pairs": found,
    }


def table(targets: Mapping[str, Any]) -> str:
    """Times of target and draft, and the share of this core below which the target cannot keep up."""
    lines = [
        "| pair | target, ms | draft, ms | of the target's | a chunk lasts, ms | the target does not fit below |",
        "|---|---|---|---|---|---|",
    ]
    for name, of in sorted(targets["pairs"].items(), key=lambda item: item[1]["target_ms"] / item[1]["chunk_ms"]):
        draft = "- | -" if of["draft_ms"] is None else f"{of['draft_ms']:.2f} | {of['draft_ms'] / of['target_ms']:.3f}"
        lines.append(
            f"| `{name}` | {of['target_ms']:.2f} | {draft} | {of['chunk_ms']:g} | "
            f"{of['target_ms'] / of['chunk_ms']:.2%} of this core |"
        )
    return "\n".join(lines)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    results = measured(ROUNDS)
    write_json(RESULTS, results)
    fill(PAGE, "targets", table(results))


if __name__ == "__main__":
    main()
