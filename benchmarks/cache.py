"""FreqCache on our flow policy with two cameras: the tables and the picture of docs/freqcache.md.

Run: MUJOCO_GL=egl specact reproduce cache --out STUDY, then python benchmarks/cache.py STUDY

Keeps the summaries in benchmarks/results/cache.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pages import fill

from specact.lab.report.cache import draw_cache, legend, told
from specact.lab.report.drawing import style

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "freqcache.md"
KEPT = Path(__file__).parent / "results" / "cache.json"


def main(study: Path) -> None:
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for folder in sorted(study.iterdir()):
        if (folder / "reuse.json").exists() and (folder / "summary.json").exists():
            summary, reuse = (json.loads((folder / name).read_text()) for name in ("summary.json", "reuse.json"))
            parts = ("env", "bundle", "episodes", "seed", "methods", "contrasts")
            kept[folder.name] = {"summary": {part: summary[part] for part in parts}, "reuse": reuse}
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    fill(PAGE, "methods", legend())
    for name, found in kept.items():
        fill(PAGE, name, "\n".join(told(found["summary"], found["reuse"])))
        with style():
            figure = draw_cache(found["summary"], found["reuse"])
            figure.savefig(PAGE.parent / f"freqcache-{found['summary']['env']}.png", dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
