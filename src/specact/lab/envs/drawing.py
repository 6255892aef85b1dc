"""Rendering of MuJoCo's environments, with one error type for missing renderers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import RenderError

_NEEDED = (
    "set MUJOCO_GL=egl (Debian packages libegl1, libegl-mesa0 and libgl1-mesa-dri) or MUJOCO_GL=osmesa (libosmesa6) to "
    "draw without a display"
)


@contextmanager
def drawing() -> Iterator[None]:
    """Context of rendering calls; converts their errors.

    Raises:
        RenderError: if this machine cannot render as MUJOCO_GL says.
    """
    if sys.platform == "linux" and not any(map(os.environ.get, ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"))):
        # MuJoCo would try GLFW, which may crash the process.
        raise RenderError(f"no display is available for rendering; {_NEEDED}")
    try:
        yield
    except Exception as error:
        raise RenderError(cannot_draw(error)) from error


def rendered(sim: Any) -> NDArray[np.uint8]:
    """The scene of a simulator, uint8 ``[H, W, 3]``.

    Raises:
        RenderError: as for :func:`drawing`.
    """
    with drawing():
        frame: NDArray[np.uint8] = sim.render()
    return frame


def cannot_draw(error: Exception) -> str:
    """The message for an error of MuJoCo or OpenGL; every renderer has its own errors."""
    try:
        why = str(error)
    except Exception:  # noqa: BLE001 - some of PyOpenGL's errors cannot be printed
        why = "no message"
    chosen = os.environ.get("MUJOCO_GL", "")
    return f"MuJoCo cannot draw with MUJOCO_GL={chosen!r} ({type(error).__name__}: {why}); {_NEEDED}"
