"""Spec-VLA, KERV and HeiSD on our token policies: the tables and pictures of docs/tokens.md.

Run: MUJOCO_GL=egl specact reproduce tokens --out STUDY, then python benchmarks/tokens.py STUDY

Keeps the summaries in benchmarks/results/tokens.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pages import fill

from specact.lab.report.drawing import style
from specact.lab.report.tokens import draw_tokens, legend, told

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tokens.md"
KEPT = Path(__file__).parent / "results" / "tokens.json"


def main(study: Path) -> None:
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for folder in sorted(study.iterdir()):
        if (folder / "gain.json").exists() and (folder / "summary.json").exists():
            summary, gain = (json.loads((folder / name).read_text()) for name in ("summary.json", "gain.json"))
            parts = ("env", "bundle", "episodes", "seed", "methods", "contrasts")
            kept[folder.name] = {"summary": {part: summary[part] for part in parts}, "gain": gain}
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    fill(PAGE, "decodings", legend())
    for name, found in kept.items():
        fill(PAGE, name, "\n".join(told(found["summary"], found["gain"])))
        with style():
            draw_tokens(found["summary"]).savefig(PAGE.parent / f"tokens-{found['summary']['env']}.png", dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
