"""Cameras of MuJoCo's environments, for software rendering in milliseconds, with one error where nothing can draw."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from specact.errors import RenderError
from specact.lab.envs import HOW_TO_DRAW, cannot_draw
from specact.lab.envs.simplified import simplified

# Height and width of the cameras' frames, by the name of the observation.
Sizes = Mapping[str, tuple[int, int]]


@contextmanager
def drawing() -> Iterator[None]:
    """Context of rendering calls; converts their errors.

    Raises:
        RenderError: if this machine cannot render as MUJOCO_GL says.
    """
    # What MuJoCo chose: robosuite sets MUJOCO_GL later, where nobody did. Without a display GLFW may crash the process.
    glfw = getattr(getattr(mujoco, "GLContext", None), "__module__", "") == "mujoco.glfw"
    if sys.platform == "linux" and glfw and not any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY"))):
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
        mirrored: whether its frames are mirrored left to right, as those of LIBERO are by its users.
    """

    camera: str | Any
    turned: bool = False
    mirrored: bool = False


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
        hidden_groups: groups of geoms that are not rendered.
        detail: cells [m] of the grid on which large meshes are :func:`~.simplified.simplified`; with zero, none is. The
            physics keeps the meshes of the model.
    """

    def __init__(
        self, model: Any, cameras: Mapping[str, Camera], hidden_groups: Collection[int] = (), detail: float = 0.0
    ) -> None:
        # Read when a renderer is created. At the default quality, software rendering makes two frames a second.
        model.vis.quality.shadowsize = 0
        model.vis.quality.offsamples = 0
        model.mat_reflectance[:] = 0.0
        self._model, self._cameras, self._hidden_groups, self._detail = model, cameras, hidden_groups, detail
        self._option = mujoco.MjvOption()
        self._option.geomgroup[list(hidden_groups)] = 0
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
                self._renderers[render_size] = self._renderer(*render_size)
                # At exit MuJoCo terminates EGL, after which renderers cannot be freed.
                atexit.register(_close, weakref.ref(self))
            renderer = self._renderers[render_size]
            renderer.update_scene(data, camera=camera.camera, scene_option=self._option)
            if self._detail:
                _hide_unseen(renderer.scene, self._model, data, render_size[1] / render_size[0])
            frame: NDArray[np.uint8] = renderer.render()
        if double:
            sums = frame.reshape(size[0], 2, size[1], 2, 3).sum(axis=(1, 3), dtype=np.uint16)
            frame = ((sums + 2) // 4).astype(np.uint8)
        rows, columns = -1 if camera.turned else 1, -1 if camera.turned != camera.mirrored else 1
        return np.ascontiguousarray(frame[::rows, ::columns])

    def _renderer(self, height: int, width: int) -> Renderer:
        if not self._detail:
            return Renderer(self._model, height, width)
        renderer = Renderer(simplified(self._model, self._detail, self._hidden_groups), height, width)
        # The meshes are loaded. Everything else is read from the model itself in every frame.
        renderer._model = self._model
        return renderer


def _hide_unseen(scene: Any, model: Any, data: Any, aspect: float) -> None:
    """Removes the geoms whose bounding sphere is outside the view of a camera with this width over height."""
    left, right = scene.camera
    if left.orthographic or left.frustum_width:
        return
    slope = left.frustum_top / left.frustum_near
    offset = data.geom_xpos - (left.pos + right.pos) / 2
    depth, up, side = offset @ left.forward, offset @ left.up, offset @ np.cross(left.forward, left.up)
    unseen = np.zeros(model.ngeom, bool)
    for distance, edge in ((up, slope), (side, aspect * slope)):
        unseen |= np.abs(distance) > edge * depth + np.hypot(1, edge) * model.geom_rbound
    # Planes have no bounding sphere: their radius is zero.
    unseen &= model.geom_rbound > 0
    for geom in scene.geoms[: scene.ngeom]:
        if geom.objtype == mujoco.mjtObj.mjOBJ_GEOM and unseen[geom.objid]:
            geom.type = mujoco.mjtGeom.mjGEOM_NONE


def _close(cameras: weakref.ref[Cameras]) -> None:
    alive = cameras()
    if alive is not None:
        alive.close()
