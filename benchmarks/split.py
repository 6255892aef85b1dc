"""RoboECC: the tables of docs/split.md.

Run: MUJOCO_GL=egl specact reproduce split --out STUDY --data NETWORK, then python benchmarks/split.py STUDY

NETWORK is a folder with mahimahi/ and telerobot_rtt/. Keeps what was measured in benchmarks/results/split.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pages import fill

from specact.lab.report.split import forecast_table, latency_table, precision_table

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "split.md"
KEPT = Path(__file__).parent / "results" / "split.json"


def main(study: Path) -> None:
    found = json.loads((study / "split.json").read_text())
    del found["command"]  # it names folders of the machine
    KEPT.write_text(json.dumps(found, indent=1) + "\n")
    for factor, cells in found["sockets"].items():
        fill(PAGE, f"sockets-{factor}", latency_table(cells))
    for number, cells in enumerate(found["simulated"].values()):
        fill(PAGE, f"simulated-{number}", latency_table(cells))
    fill(PAGE, "forecasts", forecast_table(found["forecasts"]))
    fill(PAGE, "precision", precision_table(found["precision"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
