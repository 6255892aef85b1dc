"""The bundle that recomputes a part of a flow policy's prefix: a network, and the positions of the cameras' tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specact.bundle.bundle import Bundle, open_bundle
from specact.bundle.network import CPU, Compute, Network
from specact.errors import BundleError
from specact.families.chunks.bundle import FlowBundle
from specact.families.chunks.flow import Array

REFRESH_PARTS = {"refresh": "refresh.onnx"}
# Its folder in that of the flow policy it was made for.
FREQCACHE = "freqcache"


@dataclass(frozen=True)
class Patches:
    """The tokens of one camera's frame: one for each patch, row by row.

    Attributes:
        first: index of the frame's first token in the prefix.
        rows, columns: number of rows and columns of patches.
    """

    first: int
    rows: int
    columns: int

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.rows, self.columns


@dataclass(frozen=True)
class RefreshSpec:
    """The target that a refresh was made for, and its cameras.

    Attributes:
        target: fingerprint of its bundle.
        cameras: their tokens, by name.
    """

    target: str
    cameras: Mapping[str, Patches]

    def describe(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


class Refresh:
    """Recomputes the prefix for some tokens, on ONNX Runtime; the others keep keys and values of an earlier cache.

    Args:
        path: the ``.onnx`` file.
        cache: shape of a cache ``[L, 2, heads, N, W / heads]``.
        compute: where it runs.

    Raises:
        BundleError: if the file is no ONNX model, or was made for other caches.
    """

    def __init__(self, path: Path, cache: tuple[int, ...], *, compute: Compute = CPU) -> None:
        whole = (1, *cache)
        inputs = {"tokens": (1, "tokens", cache[2] * cache[4]), "sources": (cache[3],), "held": whole}
        repair = "make it again with specact export --refresh"
        self._network = Network(path, inputs, {"cache": whole}, compute, repair=repair)

    def cache(self, tokens: Array, sources: Any, cache: Array) -> Array:
        """The new cache ``[1, L, 2, heads, N, W / heads]``.

        In every layer the recomputed tokens attend to the whole new cache.

        Args:
            tokens: ``[1, n, W]``, the tokens to recompute, at least one.
            sources: int64 ``[N]``: for each position of the new cache the source of its keys and values: a position of
                the old cache, or N + k for the k-th of the tokens.
            cache: the old cache.
        """
        return self._network.run({"tokens": tokens, "sources": sources, "held": cache})[0]


@dataclass(frozen=True)
class RefreshBundle(Bundle[RefreshSpec]):
    """A loaded bundle of a refresh.

    Attributes:
        refresh: the network.
    """

    refresh: Refresh

    @property
    def cameras(self) -> Mapping[str, Patches]:
        """Their tokens, by name."""
        return self.spec.cameras


def load_refresh(path: Path, target: FlowBundle, *, compute: Compute = CPU) -> RefreshBundle:
    """Loads the refresh of a target's prefix.

    Args:
        path: the folder.
        target: the flow policy it was made for.
        compute: where it runs.

    Raises:
        BundleError: if a part is missing, damaged, or does not match its fingerprint in the manifest, or if it was made
            for another target.
    """
    bundle = open_bundle(path, "freqcache", RefreshSpec, REFRESH_PARTS)
    if bundle.spec.target != target.fingerprint:
        raise BundleError(
            f"{path} was made for the target {bundle.spec.target}, but {target.name} is {target.fingerprint}; make it "
            "again with specact export --refresh"
        )
    cache = target.networks.cache([target.spec.observation.zeros()]).shape[1:]
    check_cameras(path, target, bundle.spec.cameras, cache[3])
    refresh = Refresh(bundle.files["refresh"], cache, compute=compute)
    return RefreshBundle(path, bundle.manifest, bundle.spec, bundle.files, refresh)


def check_cameras(path: Path, target: FlowBundle, cameras: Mapping[str, Patches], tokens: int) -> None:
    """Refuses cameras that the target does not have, and patches that do not fit their frames.

    Raises:
        BundleError: if one does not fit.
    """
    fields = target.spec.observation.fields
    for name, patches in cameras.items():
        fits = name in fields and fields[name].is_image and fields[name].history <= 1
        grid = min(patches.grid) >= 1 and 0 <= patches.first <= tokens - patches.rows * patches.columns
        if not fits or not grid or fields[name].shape[0] % patches.rows or fields[name].shape[1] % patches.columns:
            raise BundleError(
                f"{path} says that {name} gives {patches} of {tokens} tokens, which {target.name} does not have; make "
                "it again with specact export --refresh"
            )
