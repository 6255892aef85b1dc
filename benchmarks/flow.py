"""FLASH on our flow policies: the tables and pictures of docs/flash.md.

Run: MUJOCO_GL=egl specact reproduce flow --out STUDY, then python benchmarks/flow.py STUDY

Keeps the summaries in benchmarks/results/flow.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pages import fill

from specact.lab.report.drawing import style
from specact.lab.report.flow import draw_flow, legend, told

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "flash.md"
KEPT = Path(__file__).parent / "results" / "flow.json"


def main(study: Path) -> None:
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for folder in sorted(study.iterdir()):
        if (folder / "rounds.json").exists() and (folder / "summary.json").exists():
            summary, rounds = (json.loads((folder / name).read_text()) for name in ("summary.json", "rounds.json"))
            parts = ("env", "bundle", "episodes", "seed", "methods", "contrasts")
            kept[folder.name] = {"summary": {part: summary[part] for part in parts}, "rounds": rounds}
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    fill(PAGE, "rounds", legend())
    for name, found in kept.items():
        fill(PAGE, name, "\n".join(told(found["summary"], found["rounds"])))
        with style():
            figure = draw_flow(found["summary"], found["rounds"])
            figure.savefig(PAGE.parent / f"flash-{found['summary']['env']}.png", dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
