"""The bundle that recomputes a part of a flow policy's prefix: a network, and the positions of the cameras' tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specact.errors import BundleError, ConfigError
from specact.families.chunks.bundle import FlowBundle
from specact.families.chunks.flow import Array
from specact.families.codes.network import open_session
from specact.runtime.manifest import BundleFolder, read_manifest
from specact.toml import build

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
        provider, threads: see :class:`~specact.families.codes.network.OnnxPolicy`.

    Raises:
        BundleError: if the file is no ONNX model, or was made for other caches.
        ConfigError: if this installation of ONNX Runtime has no such provider.
    """

    def __init__(
        self, path: Path, cache: tuple[int, ...], *, provider: str = "CPUExecutionProvider", threads: int = 1
    ) -> None:
        self._session = open_session(path, provider, threads)
        found = {entry.name: entry.shape for entry in self._session.get_inputs()}
        wanted = {"sources": [cache[3]], "held": [1, *cache]}
        width = [1, cache[2] * cache[4]]
        tokens = found.pop("tokens", [])
        if found != wanted or tokens[::2] != width:
            raise BundleError(
                f"{path} takes {found} and tokens {tokens}, but the target's caches need {wanted} and tokens of width "
                f"{width[1]}; make it again with specact export --refresh"
            )

    def cache(self, tokens: Array, sources: Any, cache: Array) -> Array:
        """The new cache ``[1, L, 2, heads, N, W / heads]``.

        In every layer the recomputed tokens attend to the whole new cache.

        Args:
            tokens: ``[1, n, W]``, the tokens to recompute, at least one.
            sources: int64 ``[N]``: for each position of the new cache the source of its keys and values: a position of
                the old cache, or N + k for the k-th of the tokens.
            cache: the old cache.
        """
        found: Array = self._session.run(None, {"tokens": tokens, "sources": sources, "held": cache})[0]
        return found


@dataclass(frozen=True)
class RefreshBundle(BundleFolder):
    """A loaded bundle of a refresh.

    Attributes:
        refresh: the network.
        cameras: see :class:`RefreshSpec`.
    """

    refresh: Refresh
    cameras: Mapping[str, Patches]


def load_refresh(
    path: Path, target: FlowBundle, *, provider: str = "CPUExecutionProvider", threads: int = 1
) -> RefreshBundle:
    """Loads the refresh of a target's prefix.

    Args:
        path: the folder.
        target: the flow policy it was made for.
        provider, threads: see :class:`~specact.families.codes.network.OnnxPolicy`.

    Raises:
        BundleError: if a part is missing, damaged, or does not match its fingerprint in the manifest, or if it was made
            for another target.
        ConfigError: if there is no such execution provider.
    """
    manifest = read_manifest(path, "freqcache", REFRESH_PARTS)
    try:
        raw = dict(manifest["spec"])
        cameras = {name: build(Patches, entry, "spec", name) for name, entry in raw["cameras"].items()}
        made_for = RefreshSpec(raw["target"], cameras)
    except (ConfigError, KeyError, TypeError, AttributeError) as error:
        raise BundleError(
            f"the manifest of {path} has no usable spec ({error}); make it again with specact export --refresh"
        ) from None
    if made_for.target != target.fingerprint:
        raise BundleError(
            f"{path} was made for the target {made_for.target}, but {target.name} is {target.fingerprint}; make it "
            "again with specact export --refresh"
        )
    cache = target.networks.cache([target.spec.observation.zeros()]).shape[1:]
    check_cameras(path, target, cameras, cache[3])
    refresh = Refresh(path / REFRESH_PARTS["refresh"], cache, provider=provider, threads=threads)
    return RefreshBundle(path, manifest, refresh, cameras)


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
