"""Meshes with fewer faces and smaller textures, for software rendering, whose time hardly grows with pixels."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

# Smaller meshes cost little, and some of them are close to a camera on a hand.
LARGE = 4000
# Pixels of the larger side. A texture of 4096 takes 85 MB.
TEXTURE = 512
# Corners in one cell of space are one if their texture coordinates are so near; else there is a seam between them.
_TEXTURE_CELL = 1 / 12


def simplified(model: Any, cell: float, hidden_groups: Collection[int] = ()) -> Any:
    """A copy of a model, for rendering alone, whose large visible meshes have fewer faces, and textures fewer pixels.

    Vertex clustering (Rossignac and Borrel, 1993): vertices in one cell of a grid become the one next to their mean.
    Those whose normals point in different directions stay apart, so that thin walls keep both sides. Faces remain
    where three clusters meet. Meshes without a texture have cells of twice the size.

    Args:
        model: a MuJoCo model, which is not changed.
        cell: size of the grid's cells [m].
        hidden_groups: groups of geoms that are not rendered; their meshes stay.
    """
    coarse = copy.copy(model)
    sizes: dict[int, float] = {}
    for geom in np.flatnonzero(model.geom_type == mujoco.mjtGeom.mjGEOM_MESH):
        mesh, material = model.geom_dataid[geom], model.geom_matid[geom]
        if model.geom_group[geom] not in hidden_groups and model.mesh_facenum[mesh] >= LARGE:
            textured = material >= 0 and model.mat_texid[material].max() >= 0
            sizes[mesh] = min(sizes.get(mesh, np.inf), cell if textured else 2 * cell)
    for mesh, size in sizes.items():
        _simplify(coarse, mesh, size)
    for texture in np.flatnonzero(model.tex_type == mujoco.mjtTexture.mjTEXTURE_2D):
        _shrink(coarse, int(texture))
    return coarse


def _shrink(model: Any, texture: int) -> None:
    """Halves a large texture until it is small: means of its pixels, as the renderer makes them for small frames."""
    height, width, channels = model.tex_height[texture], model.tex_width[texture], model.tex_nchannel[texture]
    start = model.tex_adr[texture]
    pixels = model.tex_data[start : start + height * width * channels].reshape(height, width, channels)
    while max(height, width) > TEXTURE and height % 2 == 0 and width % 2 == 0:
        height, width = height // 2, width // 2
        quarters = [pixels[row::2, column::2].astype(np.uint16) for row in (0, 1) for column in (0, 1)]
        pixels = ((np.sum(quarters, axis=0, dtype=np.uint16) + 2) // 4).astype(np.uint8)
    model.tex_data[start : start + pixels.size] = pixels.ravel()
    model.tex_height[texture], model.tex_width[texture] = height, width


def _simplify(model: Any, mesh: int, cell: float) -> None:
    """Moves the remaining faces of this mesh to the front of its faces."""
    faces = slice(model.mesh_faceadr[mesh], model.mesh_faceadr[mesh] + model.mesh_facenum[mesh])
    corners = model.mesh_face[faces]
    vertices = _part(model.mesh_vert, model.mesh_vertadr[mesh], model.mesh_vertnum[mesh])
    normals = _part(model.mesh_normal, model.mesh_normaladr[mesh], model.mesh_normalnum[mesh])
    # Files repeat a vertex in every face. The clusters must not, or there are gaps between the faces.
    point = _groups(np.round(vertices / 1e-5))
    normal = _sums(normals[model.mesh_facenormal[faces]].reshape(-1, 3), point[corners].ravel(), point.max() + 1)
    axis = np.abs(normal).argmax(axis=1)
    side = 2 * axis + (normal[np.arange(len(axis)), axis] > 0)
    cluster = _groups(np.column_stack([np.floor(vertices / cell), side[point]]))
    mean = _sums(vertices, cluster) / np.bincount(cluster)[:, None]
    far = np.square(vertices - mean[cluster]).sum(axis=1)
    new = cluster[corners]
    distinct = np.flatnonzero((new != np.roll(new, 1, axis=1)).all(axis=1))
    _, first = np.unique(_groups(np.sort(new[distinct], axis=1)), return_index=True)
    kept = distinct[np.sort(first)]
    if model.mesh_texcoordadr[mesh] >= 0:
        index = model.mesh_facetexcoord[faces].ravel()
        texture = _part(model.mesh_texcoord, model.mesh_texcoordadr[mesh], model.mesh_texcoordnum[mesh])[index]
        patch = _groups(np.column_stack([new.ravel(), np.floor(texture / _TEXTURE_CELL)]))
        nearest = _nearest(patch, far[corners].ravel())
        model.mesh_facetexcoord[faces][: len(kept)] = index[nearest[patch]].reshape(-1, 3)[kept]
    model.mesh_face[faces][: len(kept)] = _nearest(cluster, far)[new[kept]]
    model.mesh_facenormal[faces][: len(kept)] = model.mesh_facenormal[faces][kept]
    model.mesh_facenum[mesh] = len(kept)


def _part(rows: NDArray[Any], start: int, number: int) -> NDArray[Any]:
    return rows[start : start + number]


def _groups(rows: NDArray[Any]) -> NDArray[np.intp]:
    """The same number ``[n]``, from zero, for equal rows ``[n, k]`` of integers."""
    key = np.zeros(len(rows), np.int64)
    for column in (rows - rows.min(axis=0)).astype(np.int64).T:
        key = key * (column.max() + 1) + column
    return np.unique(key, return_inverse=True)[1].ravel()


def _sums(rows: NDArray[Any], group: NDArray[np.intp], number: int | None = None) -> NDArray[np.float64]:
    return np.column_stack([np.bincount(group, column, number or 0) for column in rows.T])


def _nearest(group: NDArray[np.intp], distance: NDArray[Any]) -> NDArray[np.intp]:
    """The member of every group with the smallest distance."""
    member = np.empty(group.max() + 1, np.intp)
    order = np.argsort(-distance, kind="stable")
    member[group[order]] = order
    return member
