"""Without a renderer an environment says what to install and which variable to set; where nothing is drawn, it runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

DRAW = """
import sys
from specact.lab.envs import load_task
from specact.errors import RenderError
try:
    env = load_task(sys.argv[1]).make(render_mode="rgb_array")
    env.reset(seed=0)
    env.render()
except RenderError as error:
    print(error)
"""
ADVICE = (
    "set MUJOCO_GL=egl (Debian packages libegl1, libegl-mesa0 and libgl1-mesa-dri) or MUJOCO_GL=osmesa (libosmesa6) "
    "to draw without a display"
)


def without_display(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    # Without XDG_RUNTIME_DIR no Wayland display is found under its usual name either.
    hidden = ("MUJOCO_GL", "PYOPENGL_PLATFORM", "DISPLAY", "WAYLAND_DISPLAY", "WAYLAND_SOCKET", "XDG_RUNTIME_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in hidden} | variables
    words = [sys.executable, "-c", script, *arguments]
    return subprocess.run(words, capture_output=True, text=True, env=environment, timeout=600, check=False)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere MuJoCo draws without a display")
@pytest.mark.parametrize("task", ["ball", "kitchen", "relocate", "peg", "metaworld"])
def test_no_display(task: str) -> None:
    done = without_display(DRAW, task)
    assert done.stdout.strip() == f"no display is available for rendering; {ADVICE}", done.stderr


def test_a_renderer_that_mujoco_cannot_load() -> None:
    done = without_display(DRAW, "ball", MUJOCO_GL="nonsense")
    assert done.stdout.startswith("MuJoCo cannot draw with MUJOCO_GL='nonsense' (RuntimeError: invalid value"), done
    assert f"; {ADVICE}, or unset it if nothing is rendered" in done.stdout


@pytest.mark.parametrize("task", ["ball", "metaworld"])
def test_a_renderer_that_fails_says_so_once(task: str) -> None:
    """Its destructor, which frees what the constructor did not make, prints nothing."""
    done = without_display(DRAW, task, MUJOCO_GL="disabled")
    assert done.stdout.startswith("MuJoCo cannot draw with MUJOCO_GL='disabled'"), done
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere MuJoCo draws without a display")
def test_frames_are_not_recorded_without_a_display(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    words = ["data", "record", "--env", "metaworld/reach-v3", "--out", out, "--episodes", "1"]
    done = without_display("from specact.cli.main import main; main()", *words)
    assert done.returncode == 2
    assert f"no display is available for rendering; {ADVICE}" in " ".join(done.stderr.split())
    assert not Path(out).exists()
    done = without_display("from specact.cli.main import main; main()", *words, "--pixels", "0")
    assert done.returncode == 0 and "1 episodes" in done.stdout, done.stderr


@pytest.mark.parametrize("task", ["ball", "kitchen", "metaworld"])
def test_what_draws_nothing_needs_no_display(task: str) -> None:
    done = without_display(
        f"from specact.lab.envs import load_task; print(load_task('{task}').make().reset(seed=0)[1])"
    )
    assert "success" in done.stdout, done.stderr
