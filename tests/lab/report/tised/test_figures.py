"""The figures of a sweep: that each says what the analysis says, and that all of them can be written."""

from pathlib import Path

import numpy as np
import pytest
from tests.lab.tised.made_up import BASELINES, episodes, join, overlap_sweep, steps_sweep

from specact.lab.report.drawing import Drawing, style, style_of
from specact.lab.report.tised.figures import draw_figures, save_figures
from specact.lab.tised.analysis import Analysis, analyse
from specact.lab.tised.frontier import FRONTIER as METHODS_DRAWN

FRONTIER = "tised-frontier-success-chase-at-pace-0.2-idle-hold-this-machine"
RTT_MS = {"loopback": 0.0, "loopback+delay=12": 12.0, "loopback+delay=200": 200.0, "rtt:some/where.csv": 60.0}
# Log odds, how often it asks, lever and strength.
METHODS = {
    "draft": (0.5, 0.0, "verification", 0.0),
    "hybrid": (2.5, 1.0, "verification", 1.0),
    "adahi": (2.2, 0.6, "verification", 0.6),
    "target": (2.5, 1.0, "remote", 0.0),
}


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    linked = [
        episodes(
            lever, strength, pace=0.2, hardware="this-machine", kappa=1.0, chunks=30, odds=odds, link=link,
            each_s=0.01 + asked * rtt / 1000, count=20,
        )
        for odds, asked, lever, strength in METHODS.values()
        for link, rtt in RTT_MS.items()
    ]  # fmt: skip
    baselines = BASELINES | {"verification": 1.0, "remote": 0.0}
    return analyse(join([steps_sweep(count=20), overlap_sweep(count=20), *linked]), baselines)


@pytest.fixture(scope="module")
def drawings(analysis: Analysis) -> dict[str, Drawing]:
    with style():
        drawn = list(draw_figures(analysis, RTT_MS))
    assert len({drawing.name for drawing in drawn}) == len(drawn)
    return {drawing.name: drawing for drawing in drawn}


def test_the_figures_that_there_are(drawings: dict[str, Drawing]) -> None:
    """A curve per place; motion per pace; staleness, hardware and frontier once; none of them for a single setting."""
    kinds = {name: sum(drawn.startswith(f"tised-{name}-") for drawn in drawings) for name in ("jerk", "path")}
    assert kinds == {"jerk": 5, "path": 5}
    for lever, task in (("steps", "chase"), ("steps", "ball"), ("overlap", "ball"), ("verification", "chase")):
        assert f"tised-hardware-{lever}-{task}-hold" in drawings
    assert {FRONTIER, "tised-frontier-restricted-chase-at-pace-0.2-idle-hold-this-machine"} <= set(drawings)
    assert "tised-verification-chase-0.2-hold-this-machine-over-rtt-some-where.csv" in drawings
    assert not any("remote" in name for name in drawings)
    # Curves: steps at three paces and overlap at one on four machines, verification over four links.
    assert len(drawings) == 20 + 10 + 2 + 4 + 2


def test_curves_are_normalised_by_the_baseline_and_ringed_at_the_sweet_spot(
    drawings: dict[str, Drawing], analysis: Analysis
) -> None:
    drawing = drawings["tised-steps-ball-0-hold-agx-50w"]
    cells = [cell for cell in analysis.cells if cell.place.lever == "steps" and cell.place.hardware == "agx-50w"][:4]
    assert [row["strength"] for row in drawing.rows] == [10.0, 5.0, 2.0, 1.0]
    for row, cell in zip(drawing.rows, cells, strict=True):
        assert row["task_s.normalised"] == pytest.approx(cell.task_s / cells[0].task_s)
        assert row["chunks.normalised"] * row["chunk_s.normalised"] == pytest.approx(row["task_s.normalised"])
    (axes,) = drawing.figure.axes
    rings = [line for line in axes.lines if line.get_markersize() == 11]
    spots = {spot.end_point: spot for spot in analysis.spots if spot.place == cells[0].place}
    strengths = [10.0, 5.0, 2.0, 1.0]
    assert [int(np.asarray(ring.get_xdata())[0]) for ring in rings] == [
        strengths.index(spots[end_point].spot.where) for end_point in ("task_s", "restricted_s")
    ]


def test_staleness_is_pace_times_age(drawings: dict[str, Drawing]) -> None:
    rows = drawings["tised-staleness-steps-chase-hold"].rows
    assert len(rows) == 2 * 4 * 4
    assert all(row["staleness"] == pytest.approx(row["pace"] * row["age_s"]) for row in rows)


def test_the_frontier_has_a_curve_per_method_in_its_own_colour(drawings: dict[str, Drawing]) -> None:
    drawing = drawings[FRONTIER]
    assert {(row["method"], row["rtt_ms"]) for row in drawing.rows} == {
        (m, r) for m in METHODS for r in RTT_MS.values()
    }
    (axes,) = drawing.figure.axes
    curves = [line for line in axes.lines if len(np.asarray(line.get_xdata())) > 1]
    assert len({line.get_color() for line in curves}) == len(curves) == len(METHODS)
    # The recording stands beside the curves, hollow.
    assert all(60.0 not in np.asarray(line.get_xdata()) for line in curves)
    assert len(axes.lines) == 2 * len(METHODS)
    assert "Wilson" in drawing.caption


def test_methods_of_the_frontier_look_different() -> None:
    assert len({style_of(name).light for name in METHODS_DRAWN}) == len(METHODS_DRAWN)


def test_files(tmp_path: Path) -> None:
    """One place, so that it does not take long: PNG, SVG and CSV of each figure, and nothing else."""
    two = {
        name: values[:6]
        for name, values in join(
            [
                episodes("steps", s, pace=0.0, hardware="h", kappa=1.0, chunks=9, odds=3, each_s=0.1, count=3)
                for s in (10, 5)
            ]
        ).items()
    }
    paths = save_figures(analyse(two, BASELINES), tmp_path, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in paths)
    assert sorted(path.name for path in paths if path.suffix == ".png") == [
        "tised-jerk-steps-ball-0-hold.png", "tised-path-steps-ball-0-hold.png", "tised-steps-ball-0-hold-h.png",
    ]  # fmt: skip
    assert (tmp_path / "tised-steps-ball-0-hold-h.svg").read_text().startswith("<?xml")
    assert (tmp_path / "tised-steps-ball-0-hold-h.csv").read_text().startswith("strength,n,successes,chunks,")


def test_settings_that_never_succeed_and_robots_without_motion_can_be_drawn() -> None:
    """Warnings are errors here: nothing may be divided by what is not there."""
    table = steps_sweep(paces=(0.0,), count=5)
    table |= {"success": table["success"] & (table["strength"] > 2.0), "jerk": np.full(len(table["jerk"]), np.nan)}
    with style():
        drawn = {drawing.name for drawing in draw_figures(analyse(table, BASELINES), {})}
    assert "tised-steps-ball-0-hold-agx-15w" in drawn
    table |= {"success": np.zeros(len(table["success"]), dtype=bool)}
    with style():
        drawn = {drawing.name for drawing in draw_figures(analyse(table, BASELINES), {})}
    assert "tised-steps-ball-0-hold-agx-15w" not in drawn and "tised-hardware-steps-ball-hold" in drawn
