"""Cameras of MuJoCo's environments, for software rendering in milliseconds, with one error where nothing can draw."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from specact.errors import RenderError
from specact.lab.envs import HOW_TO_DRAW, cannot_draw

# Height and width of the cameras' frames, by the name of the observation.
Sizes = Mapping[str, tuple[int, int]]


@contextmanager
def drawing() -> Iterator[None]:
    """Context of rendering calls; converts their errors.

    Raises:
        RenderError: if this machine cannot render as MUJOCO_GL says.
    """
    if sys.platform == "linux" and not any(map(os.environ.get, ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"))):
        # MuJoCo would try GLFW, which may crash the process.
        raise RenderError(f"no display is available for rendering; {HOW_TO_DRAW}")
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


class Renderer(mujoco.Renderer):  # type: ignore[misc, unused-ignore]
    """MuJoCo's renderer, whose destructor raises no second error where the constructor failed."""

    _gl_context = _mjr_context = None


@dataclass(frozen=True)
class Camera:
    """A camera of a model.

    Attributes:
        camera: its name in the model, or a free one.
        turned: whether it is mounted upside down, so that its frames are rotated by 180 degrees.
    """

    camera: str | Any
    turned: bool = False


def free_camera(lookat: Sequence[float], distance: float, azimuth: float, elevation: float) -> Camera:
    """A free camera: it looks at a point ``[3]`` [m] from this distance [m] under these angles [degrees]."""
    camera = mujoco.MjvCamera()
    camera.type = mujoco.mjtCamera.mjCAMERA_FREE
    camera.lookat[:] = lookat
    camera.distance, camera.azimuth, camera.elevation = distance, azimuth, elevation
    return Camera(camera)


class Cameras:
    """Renders the cameras of one model.

    Frames are rendered at twice their size and averaged (supersampling), where MuJoCo's buffer is large enough. In
    small frames this gives subpixel positions, and takes less time than multisampling. The renderer is created at the
    first frame.

    Args:
        model: a MuJoCo model. Its shadows, reflections and multisampling are permanently disabled.
        cameras: by the name of the observation.
    """

    def __init__(self, model: Any, cameras: Mapping[str, Camera]) -> None:
        # Read when a renderer is created. At the default quality, software rendering makes two frames a second.
        model.vis.quality.shadowsize = 0
        model.vis.quality.offsamples = 0
        model.mat_reflectance[:] = 0.0
        self._model, self._cameras = model, cameras
        self._renderers: dict[tuple[int, int], Any] = {}

    def look(self, data: Any, sizes: Sizes) -> dict[str, NDArray[np.uint8]]:
        """Frames uint8 ``[H, W, 3]`` of this state by name.

        Raises:
            RenderError: if this machine cannot draw.
        """
        return {name: self._frame(data, self._cameras[name], size) for name, size in sizes.items()}

    def close(self) -> None:
        """Frees the renderers; a later :meth:`look` creates new ones."""
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()

    def _frame(self, data: Any, camera: Camera, size: tuple[int, int]) -> NDArray[np.uint8]:
        buffer = self._model.vis.global_
        double = 2 * size[0] <= buffer.offheight and 2 * size[1] <= buffer.offwidth
        render_size = (2 * size[0], 2 * size[1]) if double else size
        with drawing():
            if render_size not in self._renderers:
                self._renderers[render_size] = Renderer(self._model, *render_size)
                # At exit MuJoCo terminates EGL, after which renderers cannot be freed.
                atexit.register(_close, weakref.ref(self))
            renderer = self._renderers[render_size]
            renderer.update_scene(data, camera=camera.camera)
            frame: NDArray[np.uint8] = renderer.render()
        if double:
            sums = frame.reshape(size[0], 2, size[1], 2, 3).sum(axis=(1, 3), dtype=np.uint16)
            frame = ((sums + 2) // 4).astype(np.uint8)
        return np.ascontiguousarray(frame[::-1, ::-1]) if camera.turned else frame


def _close(cameras: weakref.ref[Cameras]) -> None:
    alive = cameras()
    if alive is not None:
        alive.close()
