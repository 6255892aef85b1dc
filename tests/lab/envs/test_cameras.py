"""Cameras that render simplified meshes: the frames hardly change, the model not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mujoco
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.tiny import renders

from specact.lab.envs.cameras import Camera, Cameras, Renderer
from specact.lab.envs.simplified import LARGE, TEXTURE, simplified

pytestmark = renders

SIZE = (48, 64)
# A textured globe of radius 5 cm (mesh 0), a shell of 1 mm (mesh 1) and, hidden, a third of them (mesh 2).
GLOBES = """
<mujoco>
  <asset>
    <texture name="bands" type="2d" builtin="gradient" rgb1="1 0 0" rgb2="0 0 1" width="64" height="64"/>
    <material name="bands" texture="bands"/>
    <mesh name="globe" {globe}/> <mesh name="shell" {shell}/> <mesh name="spare" {globe}/>
  </asset>
  <worldbody>
    <light pos="0 -1 1" dir="0 1 -1"/>
    <geom type="plane" size="1 1 .1" pos="0 0 -.06" rgba=".3 .6 .3 1"/>
    <camera name="front" pos="0 -.3 .05" xyaxes="1 0 0 0 .15 1"/>
    <body pos="-.06 0 0"> <freejoint/> <geom name="globe" type="mesh" mesh="globe" material="bands"/> </body>
    <geom name="shell" type="mesh" mesh="shell" pos=".07 0 0"/>
    <geom name="spare" type="mesh" mesh="spare" pos="0 -.15 0" group="3"/>
  </worldbody>
</mujoco>
"""
# Small geoms on a sphere around a camera, so that some of them are cut by every edge of its view.
AROUND = """
<mujoco>
  <worldbody> <light pos="0 0 1"/> <geom type="plane" size="3 3 .1" pos="0 0 -.7"/> {geoms}
    <body name="head" mocap="true"> <camera name="front" fovy="50"/> </body>
  </worldbody>
</mujoco>
"""


def sphere(*radii: float) -> str:
    """Concentric spheres of 7,200 faces each, the second one seen from inside, as attributes of a mesh."""
    rows, columns = 60, 61
    latitude, longitude = np.meshgrid(
        np.linspace(0, np.pi, rows + 1), np.linspace(0, 2 * np.pi, columns), indexing="ij"
    )
    unit = np.stack([np.sin(latitude) * np.cos(longitude), np.sin(latitude) * np.sin(longitude), np.cos(latitude)], -1)
    corner = (np.arange(rows)[:, None] * columns + np.arange(columns - 1)).ravel()
    triangles = np.concatenate([corner[:, None] + [0, columns, 1], corner[:, None] + [1, columns, columns + 1]])
    points = [radius * unit.reshape(-1, 3) for radius in radii]
    faces = [(triangles if k == 0 else triangles[:, ::-1]) + k * unit.size // 3 for k in range(len(radii))]
    place = np.stack([longitude / (2 * np.pi), latitude / np.pi], -1).reshape(-1, 2)
    arrays = {
        "vertex": np.concatenate(points),
        "face": np.concatenate(faces),
        "texcoord": np.tile(place, (len(radii), 1)),
    }
    return " ".join(f'{name}="{" ".join(map(repr, array.ravel().tolist()))}"' for name, array in arrays.items())


@pytest.fixture(scope="module")
def globes() -> Callable[[], Any]:
    text = GLOBES.format(globe=sphere(0.05), shell=sphere(0.05, 0.049))
    return lambda: mujoco.MjModel.from_xml_string(text)


def state(model: Any) -> Any:
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    return data


def look(model: Any, data: Any = None, size: tuple[int, int] = SIZE, **options: Any) -> NDArray[np.int64]:
    cameras = Cameras(model, {"front": Camera("front")}, **options)
    try:
        return cameras.look(data or state(model), {"front": size})["front"].astype(int)
    finally:
        cameras.close()


def test_without_detail_the_frames_are_those_of_mujoco(globes: Callable[[], Any]) -> None:
    model = globes()
    frame = look(model)
    with Renderer(model, 2 * SIZE[0], 2 * SIZE[1]) as renderer:
        renderer.update_scene(state(model), "front")
        double = renderer.render().astype(int)
    assert np.array_equal(frame, (double.reshape(SIZE[0], 2, SIZE[1], 2, 3).sum(axis=(1, 3)) + 2) // 4)


def test_frames_may_be_turned_and_mirrored(globes: Callable[[], Any]) -> None:
    model = globes()
    views = {
        name: Camera("front", **dict.fromkeys(name.split(), True))
        for name in ("", "turned", "mirrored", "turned mirrored")
    }
    cameras = Cameras(model, views)
    frames = cameras.look(state(model), dict.fromkeys(views, SIZE))
    cameras.close()
    upright = frames[""]
    assert np.array_equal(frames["turned"], upright[::-1, ::-1])
    assert np.array_equal(frames["mirrored"], upright[:, ::-1])
    assert np.array_equal(frames["turned mirrored"], upright[::-1])
    assert all(frame.flags.c_contiguous for frame in frames.values())


def test_simplified_meshes_hardly_change_the_frame_and_coarser_ones_do(globes: Callable[[], Any]) -> None:
    exact = look(globes())
    fine, coarse = (np.abs(look(globes(), detail=cell) - exact).mean() for cell in (0.004, 0.03))
    assert 0.0 < fine < 2.0 < coarse


def test_the_model_keeps_its_meshes(globes: Callable[[], Any]) -> None:
    model, untouched = globes(), globes()
    look(model, detail=0.004)
    arrays = [name for name in dir(model) if name.startswith(("mesh_", "geom_", "body_"))]
    assert len(arrays) > 50 and all(np.array_equal(getattr(model, name), getattr(untouched, name)) for name in arrays)
    small = simplified(model, 0.004, hidden_groups=(3,))
    assert model.mesh_facenum[0] > LARGE
    assert small.mesh_facenum[0] < 0.6 * model.mesh_facenum[0]
    assert small.mesh_facenum[2] == model.mesh_facenum[2], "it is not rendered"


def test_large_textures_shrink_and_the_frame_hardly_changes() -> None:
    floor = """<mujoco><asset><texture name="checks" type="2d" builtin="checker" rgb1="1 0 0" rgb2="0 0 1" {size}/>
    <material name="checks" texture="checks" texrepeat="3 3"/></asset><worldbody><camera name="front" pos="0 0 1"/>
    <light pos="0 0 2"/><geom type="plane" size="1 1 1" material="checks"/></worldbody></mujoco>"""
    large, coarse = (mujoco.MjModel.from_xml_string(floor.format(size=f'width="{n}" height="{n}"')) for n in (2048, 2))
    small = simplified(large, 0.004)
    assert (small.tex_width[0], small.tex_height[0], large.tex_width[0]) == (TEXTURE, TEXTURE, 2048)
    exact = look(large)
    assert np.abs(look(large, detail=0.004) - exact).mean() < 1.0 < np.abs(look(coarse) - exact).mean()


def test_a_thin_wall_keeps_both_sides(globes: Callable[[], Any]) -> None:
    """Cells that are larger than the wall would otherwise join them, and leave the first side alone."""
    small = simplified(globes(), 0.004)
    rows = slice(small.mesh_vertadr[1], small.mesh_vertadr[1] + small.mesh_vertnum[1])
    faces = small.mesh_face[small.mesh_faceadr[1] :][: small.mesh_facenum[1]]
    radius = np.linalg.norm(small.mesh_vert[rows][faces], axis=2)
    outer, inner = (radius > 0.0497).all(axis=1).sum(), (radius < 0.0493).all(axis=1).sum()
    assert outer + inner == len(faces) and abs(outer - inner) < 0.1 * len(faces)


def test_hidden_groups_are_not_rendered_and_changes_of_the_model_are(globes: Callable[[], Any]) -> None:
    """MuJoCo itself hides group 3. The shell's colour and place are those of the model at the time of the frame."""
    model = globes()
    model.geom_group[model.geom("shell").id] = 2
    with_shell, without = look(model, detail=0.004), look(model, detail=0.004, hidden_groups=(2,))
    assert np.abs(with_shell - without)[:, SIZE[1] // 2 :].max() > 50
    cameras = Cameras(model, {"front": Camera("front")}, detail=0.004)
    before = cameras.look(state(model), {"front": SIZE})["front"].astype(int)
    model.geom_rgba[model.geom("shell").id] = [1, 0, 0, 1]
    model.geom_pos[model.geom("shell").id] += [0, 0, 0.02]
    after = cameras.look(state(model), {"front": SIZE})["front"].astype(int)
    cameras.close()
    assert np.array_equal(before, with_shell) and np.array_equal(after, look(model, detail=0.004))
    assert not np.array_equal(before, after)


@pytest.mark.parametrize("size", [(48, 48), (24, 72), (72, 24)])
def test_what_is_outside_the_view_is_left_out_and_nothing_else(size: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    kinds, places, colours = ["sphere", "capsule", "box"], _directions(rng, 150), rng.uniform(size=150)
    geoms = "".join(
        f'<geom type="{kinds[k % 3]}" size=".04 .03 .06" pos="{x} {y} {z}" euler="{30 * k} {50 * k} 0" '
        f'rgba="{colours[k]} 1 {colours[k]} 1"/>'
        for k, (x, y, z) in enumerate(places)
    )
    model = mujoco.MjModel.from_xml_string(AROUND.format(geoms=geoms))
    data = state(model)
    for turn in _directions(rng, 4):
        data.mocap_quat[0] = [0.3, *turn]
        mujoco.mj_forward(model, data)
        assert np.array_equal(look(model, data, size), look(model, data, size, detail=0.004))


def _directions(rng: np.random.Generator, number: int) -> NDArray[np.float64]:
    vectors = rng.normal(size=(number, 3))
    unit: NDArray[np.float64] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit
