"""Cheaper variants of a bundle's networks, cached in a folder.

With a pruned history a VQ-BeT uses fewer observations without retraining: attention is cheaper, and earlier
observations are unknown.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from specact.families.chunks.flow import NETWORKS, FlowBundle
from specact.families.codes.pair import PARTS, CodeParts
from specact.lab.train.codes import export_policy
from specact.lab.train.quantise import TIERS, quantise
from specact.lab.train.rebuild import Role, rebuild
from specact.lab.train.split import count_stages, split_bundle
from specact.pair import Pair


def prune_history(bundle: CodeParts, window: int, out: Path, role: Role = "target") -> Path:
    """Writes the variant of a pair's policy with a history of ``window`` observations, as an ``.onnx`` file.

    It runs like the original, with the bundle's spec except ``window``, see :func:`~specact.lab.train.rebuild.rebuild`.
    """
    export_policy(rebuild(bundle, role, window), out, half=bundle.manifest.recipe["precision"] == "float16")
    return out


class BundleVariants:
    """Quantised, pruned and split networks of one bundle: first their paths, and the files with :meth:`make`.

    Args:
        bundle: a pair of action codes or a flow policy; other pairs have no variants.
        folder: of the variants.
    """

    #: Names of the tiers of quantisation, from the mildest to the strongest.
    tiers = tuple(TIERS)

    def __init__(self, bundle: Pair[Any] | FlowBundle, folder: Path) -> None:
        self._made_of, self._folder = bundle, folder
        # By the file that is written last: what writes it.
        self._requested: dict[Path, Callable[[], object]] = {}

    def make(self) -> None:
        """Writes all variants whose paths were requested and that do not exist."""
        for file, write in self._requested.items():
            if not file.exists():
                write()

    @property
    def _bundle(self) -> CodeParts | FlowBundle:
        made_of: Any = self._made_of.parts if isinstance(self._made_of, Pair) else self._made_of
        assert isinstance(made_of, CodeParts | FlowBundle), "levers see to it"
        return made_of

    def quantised(self, tier: str) -> Mapping[str, Path]:
        """The networks of a tier, by part: ``target`` of a pair; encoder, prefix and expert of a flow policy."""
        files = {"target": PARTS["target"]} if isinstance(self._bundle, CodeParts) else dict(NETWORKS)
        files.pop("guide", None)  # inpainting is a lever of its own
        paths = {part: self._folder / tier / file for part, file in files.items()}
        for part, file in paths.items():
            self._requested[file] = partial(quantise, self._bundle.files[part], file, TIERS[tier])
        return paths

    def windowed(self, window: int) -> Path:
        """The pair's target with a shorter observation history."""
        bundle = self._bundle
        assert isinstance(bundle, CodeParts), "only a VQ-BeT's window can be cut"
        file = self._folder / f"window-{window}" / PARTS["target"]
        self._requested[file] = partial(prune_history, bundle, window, file)
        return file

    def stages(self) -> Path:
        """The folder of the pair's target in stages."""
        folder = self._folder / "stages"
        self._requested[folder / "manifest.json"] = partial(self._split, folder)
        return folder

    @cached_property
    def stage_count(self) -> int:
        """Number of stages of the pair's target."""
        return count_stages(self._bundle.path)

    def _split(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)  # of a split that was interrupted
        split_bundle(self._bundle.path, folder)
