"""Latency of draft, remote target, hybrid and ADAHI on the same steps over a link; or, with a deadline, its misses.

Run: python benchmarks/latency.py [--steps 300] [--draft-ms 6.6] [--out FOLDER]
     python benchmarks/latency.py --bundle pusht-camera --deadline-ms 50 --steps 200
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import tyro

from specact import load_bundle
from specact.cli.output import progress_bars, say, table_of
from specact.files import write_json
from specact.lab.evaluation.latency import measure_deadline, measure_latency
from specact.lab.report.latency import draw_latency
from specact.lab.train.heavy import make_heavy_target


def main(
    bundle: str = "ball",
    link: str = "wifi-paper",
    steps: int = 400,
    rate: float = 0.6,
    stand_in: bool = True,
    draft_ms: float | None = None,
    deadline_ms: float | None = None,
    rate_hz: float = 20.0,
    jpeg_quality: int = 90,
    seed: int = 0,
    out: Path | None = None,
) -> None:
    """Measures on loopback.

    Args:
        bundle: pair.
        link: see specact proxy --help.
        steps: inferences per way.
        rate: ADAHI's transmission rate; its threshold is found on the steps that are timed.
        stand_in: add a 12-layer transformer of width 768 to the target, to model a large policy.
        draft_ms: time of a draft inference, to model a slower device [ms]; measured on this machine if not given.
        deadline_ms: instead, count the verified steps that miss this deadline [ms], with frames raw and as JPEG.
        rate_hz: with a deadline: inferences per second.
        jpeg_quality: with a deadline: of camera frames, 1 to 95.
        seed: random seed.
        out: folder for latency.json and latency.png, or deadline.json.
    """
    pair = load_bundle(bundle)
    with tempfile.TemporaryDirectory() as folder, progress_bars() as update:
        advance = lambda done, total: update("steps", done, total)  # noqa: E731
        if deadline_ms is not None:
            found = measure_deadline(pair, link, steps, deadline_ms, rate_hz, jpeg_quality, seed, advance)
        else:
            served = str(pair.path)
            if stand_in:
                served = f"{folder}/stand-in"
                make_heavy_target(pair, Path(served))
            found = measure_latency(pair, served, link, steps, rate, draft_ms, seed, advance) | {"stand_in": stand_in}
    found |= {"bundle": pair.name, "command": shlex.join(["python", *sys.argv])}
    rows = latency_rows(found) if deadline_ms is None else deadline_rows(found)
    say(table_of(f"{pair.name}, {steps} steps, link {link}", rows))
    if out is not None:
        write_json(out / ("latency.json" if deadline_ms is None else "deadline.json"), found)
        if deadline_ms is None:
            draw_latency(found, out / "latency.png")


def latency_rows(found: dict[str, Any]) -> list[dict[str, str]]:
    """Bound: draft + sent x (link + target), one after the other; over: the median of blocks relative to it."""
    return [
        {
            "way": name, "sent": f"{way['transmission_rate']:.2f}", "mean ms": f"{way['mean_ms']['mean']:.2f}",
            "95 %": f"{way['mean_ms']['low']:.2f}-{way['mean_ms']['high']:.2f}",
            **{q: f"{way['quantiles_ms'][q]:.2f}" for q in ("p50", "p99")},
            "actions/s": f"{1e3 / way['mean_ms']['mean']:.1f}", "bound": f"{way['bound_ms']:.2f}",
            "over": f"{way['over_bound']:+.1%}",
        }
        for name, way in found["ways"].items()
    ]  # fmt: skip


def deadline_rows(found: dict[str, Any]) -> list[dict[str, str]]:
    return [
        {
            "frames": way["frames"], "pace": "hot" if way["rate_hz"] is None else f"{way['rate_hz']:g} Hz",
            f"missed {found['deadline_ms']:g} ms": str(sum(way["missed"].values())),
            **{f"{q} ms": f"{way['quantiles_ms'][q]:.1f}" for q in ("p50", "p95", "p99")},
            "encode ms": f"{way['encode_ms']:.2f}",
        }
        for way in found["ways"]
    ]  # fmt: skip


if __name__ == "__main__":
    tyro.cli(main)
