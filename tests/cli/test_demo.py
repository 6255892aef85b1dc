"""The demo of policies that are their own draft, with what a report says of them, and the film of one with cameras."""

from __future__ import annotations

import json
import os
from pathlib import Path

import av
import numpy as np
import pytest
from tests.tiny import needs_bundle

from specact.cli.eval import FLOW, Demo
from specact.cli.report import Report


def test_a_flow_policy_is_shown_in_its_ways_to_a_chunk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Demo("pusht-flow", episodes=1, out=tmp_path / "run", workers=1, json=True).run()
    told = json.loads(capsys.readouterr().out)
    assert tuple(told["methods"]) == FLOW
    assert told["methods"]["full"]["full"] == 1.0 > told["methods"]["flash"]["full"]
    Report((tmp_path / "run",), tmp_path / "page.html", films=False).run()
    assert "share of rounds that denoised" in (tmp_path / "page.html").read_text()


@pytest.mark.skipif(
    os.environ.get("MUJOCO_GL") not in ("egl", "osmesa"), reason="needs a renderer: set MUJOCO_GL to egl or osmesa"
)
def test_a_pair_with_cameras_is_filmed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needs_bundle("metaworld")
    Demo("metaworld", episodes=1, out=tmp_path / "run", workers=1).run()
    told = capsys.readouterr().out.replace("\n", "")
    assert f"film: {tmp_path / 'run' / 'film.webm'}" in told
    assert "first episode: in none" in told or "in which the draft failed and adahi succeeded" in told, "why this one"
    with av.open(str(tmp_path / "run" / "film.webm")) as film:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]).astype(np.int16)
    screens = np.split(frames[:, :, : frames.shape[2] // 3 * 3], 3, axis=2)
    moved = [float(np.abs(screen[len(screen) // 2] - screen[0]).mean()) for screen in screens]
    assert len(frames) > 20 and min(moved) > 0.5, "draft, ADAHI and hybrid move"
