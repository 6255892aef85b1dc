"""Cheaper networks of a bundle, made when they are first wanted and kept in a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from specact.families.chunks.bundle import NETWORKS, FlowBundle
from specact.families.codes.bundle import PARTS, Bundle
from specact.lab.train.prune import prune_history
from specact.lab.train.quantise import Feeds, quantise, tiers
from specact.lab.train.quantise_inputs import typical_inputs
from specact.observation import Window

_DYNAMIC, _STATIC = tiers("int8_dynamic"), tiers("int8_static")
_TIERS = {tier.name: tier for tier in (*_STATIC, *_DYNAMIC)}


class BundleVariants:
    """Quantised and pruned networks of one bundle.

    Args:
        bundle: a pair or a flow policy.
        folder: where they are kept.
        windows: gives observations as the policy meets them; asked for only where a tier needs them.
    """

    def __init__(self, bundle: Bundle | FlowBundle, folder: Path, windows: Callable[[], Sequence[Window]]) -> None:
        self._bundle, self._folder, self._windows = bundle, folder, windows

    def tiers(self, static: bool) -> tuple[str, ...]:
        """Names of the tiers, from the mildest to the strongest; static ones fix the activations' scales beforehand."""
        return tuple(tier.name for tier in (_STATIC if static else _DYNAMIC))

    def quantised(self, tier: str) -> Mapping[str, Path]:
        """The networks of a tier, by part: ``target`` of a pair; encoder, prefix and expert of a flow policy."""
        files = {"target": PARTS["target"]} if isinstance(self._bundle, Bundle) else dict(NETWORKS)
        files.pop("guide", None)  # inpainting is a lever of its own
        made = {part: self._folder / tier / file for part, file in files.items()}
        for part, file in made.items():
            if not file.exists():
                needed = "int8_static" in _TIERS[tier].methods.values()
                quantise(self._bundle.path / file.name, file, _TIERS[tier], self._typical[part] if needed else ())
        return made

    def windowed(self, window: int) -> Path:
        """The pair's target as a network that looks at so many observations."""
        assert isinstance(self._bundle, Bundle), "only a VQ-BeT's window can be cut"
        file = self._folder / f"window-{window}" / PARTS["target"]
        return file if file.exists() else prune_history(self._bundle, window, file)

    @cached_property
    def _typical(self) -> dict[str, list[Feeds]]:
        return typical_inputs(self._bundle, self._windows())
