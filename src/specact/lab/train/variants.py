"""Cheaper variants of a bundle's networks, cached in a folder.

With a pruned history a VQ-BeT uses fewer observations without retraining: attention is cheaper, and earlier
observations are unknown.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from specact.families.chunks.flow import NETWORKS, FlowBundle
from specact.families.codes.pair import PARTS, CodeParts
from specact.lab.train.codes import export_policy
from specact.lab.train.quantise import Feeds, quantise, tiers, typical_inputs
from specact.lab.train.rebuild import Role, rebuild
from specact.lab.train.split import count_stages, split_bundle
from specact.observation import Window
from specact.pair import Pair


def prune_history(bundle: CodeParts, window: int, out: Path, role: Role = "target") -> Path:
    """Writes the variant of a pair's policy with a history of ``window`` observations, as an ``.onnx`` file.

    It runs like the original, with the bundle's spec except ``window``, see :func:`~specact.lab.train.rebuild.rebuild`.
    """
    export_policy(rebuild(bundle, role, window), out, half=bundle.manifest.recipe["precision"] == "float16")
    return out


_DYNAMIC, _STATIC = tiers("int8_dynamic"), tiers("int8_static")
_TIERS = {tier.name: tier for tier in (*_STATIC, *_DYNAMIC)}


class BundleVariants:
    """Quantised, pruned and split networks of one bundle: first their paths, and the files with :meth:`make`.

    Args:
        bundle: a pair of action codes or a flow policy; other pairs have no variants.
        folder: of the variants.
        windows: makes typical observations of the policy; called only if a tier needs them.
    """

    def __init__(self, bundle: Pair[Any] | FlowBundle, folder: Path, windows: Callable[[], Sequence[Window]]) -> None:
        self._made_of, self._folder, self._windows = bundle, folder, windows
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

    def tiers(self, static: bool) -> tuple[str, ...]:
        """Names of the tiers, from the mildest to the strongest; static ones calibrate the activations' scales."""
        return tuple(tier.name for tier in (_STATIC if static else _DYNAMIC))

    def quantised(self, tier: str) -> Mapping[str, Path]:
        """The networks of a tier, by part: ``target`` of a pair; encoder, prefix and expert of a flow policy."""
        files = {"target": PARTS["target"]} if isinstance(self._bundle, CodeParts) else dict(NETWORKS)
        files.pop("guide", None)  # inpainting is a lever of its own
        paths = {part: self._folder / tier / file for part, file in files.items()}
        for part, file in paths.items():
            self._requested[file] = partial(self._quantise, tier, part, file)
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

    def _quantise(self, tier: str, part: str, file: Path) -> None:
        needs_inputs = "int8_static" in _TIERS[tier].methods.values()
        quantise(self._bundle.files[part], file, _TIERS[tier], self._typical[part] if needs_inputs else ())

    def _split(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)  # of a split that was interrupted
        split_bundle(self._bundle.path, folder)

    @cached_property
    def _typical(self) -> dict[str, list[Feeds]]:
        return typical_inputs(self._bundle, self._windows())
