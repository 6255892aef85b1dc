"""Without a renderer an environment says what to install and which variable to set; where nothing is drawn, it runs."""

import os
import subprocess
import sys

import pytest

DRAW = """
import sys
from specact.lab.envs import load_task
from specact.errors import RenderError
try:
    env = load_task(sys.argv[1]).make(render_mode="rgb_array")
    print(env.reset(seed=0)[1])
    env.render()
except RenderError as error:
    print(error)
"""
ADVICE = ("MUJOCO_GL=egl", "libegl1", "MUJOCO_GL=osmesa", "libosmesa6")


def without_display(task: str, **variables: str) -> subprocess.CompletedProcess[str]:
    # Without XDG_RUNTIME_DIR no Wayland display is found under its usual name either.
    hidden = ("MUJOCO_GL", "PYOPENGL_PLATFORM", "DISPLAY", "WAYLAND_DISPLAY", "WAYLAND_SOCKET", "XDG_RUNTIME_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in hidden} | variables
    words = [sys.executable, "-c", DRAW, task]
    return subprocess.run(words, capture_output=True, text=True, env=environment, timeout=600, check=False)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere MuJoCo draws without a display")
@pytest.mark.parametrize("task", ["ball", "relocate", "metaworld", "libero-spatial"])
def test_no_display_is_needed_until_something_is_drawn(task: str) -> None:
    if task.startswith("libero"):
        pytest.importorskip("libero", reason="needs LIBERO: pip install 'specact[libero]'")
    done = without_display(task)
    *_, started, refused = done.stdout.splitlines()
    assert "success" in started and "display" in refused and all(part in refused for part in ADVICE), done.stderr
    assert "MUJOCO_GL='" not in refused, "nobody set it"


@pytest.mark.parametrize(("task", "renderer"), [("ball", "nonsense"), ("metaworld", "disabled")])
def test_a_renderer_that_cannot_be_loaded_says_so_once(task: str, renderer: str) -> None:
    """Its destructor, which frees what the constructor did not make, prints nothing."""
    done = without_display(task, MUJOCO_GL=renderer)
    assert f"MUJOCO_GL='{renderer}'" in done.stdout and all(part in done.stdout for part in ADVICE), done
    assert "Traceback" not in done.stderr
