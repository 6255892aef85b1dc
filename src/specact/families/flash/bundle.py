"""FLASH's block for one flow policy: a network from the encoder's tokens to a chunk, and what was fitted with it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specact.errors import BundleError, ConfigError
from specact.families.chunks.bundle import FlowBundle
from specact.families.chunks.flow import Array
from specact.families.codes.bundle import find_bundle
from specact.families.codes.network import open_session
from specact.families.flash.check import Check
from specact.runtime.manifest import BundleFolder, read_manifest
from specact.toml import build

FLASH_PARTS = {"block": "block.onnx"}
# Where it lies beside the flow policy it was made for.
FLASH = "flash"


@dataclass(frozen=True)
class FlashSettings:
    """What the rounds of a target need to know besides networks.

    Attributes:
        execute: actions of a chunk that are executed at most before the next round.
        grippers: dimensions of an action that are grippers: left out of distances, and guarded.
        period: checked rounds between two full ones at most; 0 for no limit.
        levels, within: of a check that was fitted to held-out observations, see docs/flash.md.

    Raises:
        ConfigError: for a number out of range.
    """

    execute: int
    grippers: tuple[int, ...] = ()
    period: int = 0
    levels: tuple[float, ...] = (0.1, 0.05)
    within: float = 0.15

    def __post_init__(self) -> None:
        Check(self.levels, self.within)
        if self.execute < 1 or self.period < 0 or any(dimension < 0 for dimension in self.grippers):
            raise ConfigError(
                f"execute must be at least 1, period and grippers at least 0, got {self.execute}, {self.period} and "
                f"{self.grippers}"
            )


@dataclass(frozen=True)
class MadeFor:
    """Which target a block was made for.

    Attributes:
        target: fingerprint of its bundle.
        settings: see :class:`FlashSettings`.
    """

    target: str
    settings: FlashSettings

    def describe(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


class Block:
    """The drafting network on ONNX Runtime: from what the target's encoder makes of a window to a chunk.

    Args:
        path: the ``.onnx`` file.
        chunk: H and A of the target's chunks.
        provider, threads: see :class:`~specact.families.codes.network.OnnxPolicy`.

    Raises:
        BundleError: if the file is no ONNX model, or takes or gives something else.
        ConfigError: if this installation of ONNX Runtime has no such provider.
    """

    def __init__(
        self, path: Path, chunk: tuple[int, int], *, provider: str = "CPUExecutionProvider", threads: int = 1
    ) -> None:
        self._session = open_session(path, provider, threads)
        found = {entry.name: entry.shape[1:] for entry in self._session.get_inputs()}
        given = [entry.shape[1:] for entry in self._session.get_outputs()]
        if set(found) != {"tokens"} or len(found["tokens"]) != 2 or given != [list(chunk)]:
            raise BundleError(
                f"{path} takes {found} and gives {given}, which drafts no chunks of shape {chunk}; train it again "
                "with specact train"
            )
        self.tokens: list[int] = found["tokens"]

    def chunks(self, tokens: Array) -> Array:
        """Drafted chunks ``[B, H, A]`` in the flow's units, of tokens ``[B, N, W]``."""
        chunks: Array = self._session.run(None, {"tokens": tokens})[0]
        return chunks


@dataclass(frozen=True)
class FlashBundle(BundleFolder):
    """A loaded bundle of a block.

    Attributes:
        block, settings: the parts.
    """

    block: Block
    settings: FlashSettings


def load_flash(
    name_or_path: str | Path, target: FlowBundle, *, provider: str = "CPUExecutionProvider", threads: int = 1
) -> FlashBundle:
    """Loads FLASH's block for a target.

    Args:
        name_or_path: a folder, or the name of a bundle that comes with the package.
        target: the flow policy that it drafts for.
        provider, threads: see :class:`~specact.families.codes.network.OnnxPolicy`.

    Raises:
        BundleError: if a part is missing, damaged, or not the one the manifest was written for, or if it was made for
            another target.
        ConfigError: if there is no bundle of that name, or no such execution provider.
    """
    path = find_bundle(name_or_path)
    manifest = read_manifest(path, "flash", FLASH_PARTS)
    try:
        made_for = build(MadeFor, manifest["spec"], "spec")
    except ConfigError as error:
        raise BundleError(f"the manifest of {path} has no usable spec ({error}); train the block again") from None
    if made_for.target != target.fingerprint:
        raise BundleError(
            f"the block in {path} was made for the target {made_for.target}, but {target.name} is "
            f"{target.fingerprint}; take that target, or train a block for this one with specact train and a recipe "
            'of kind = "flash"'
        )
    settings, spec = made_for.settings, target.spec
    if settings.execute > spec.chunk or any(dimension >= spec.actions for dimension in settings.grippers):
        raise BundleError(f"the settings in {path} do not fit chunks of {spec.chunk} x {spec.actions}: {settings}")
    shape = (spec.chunk, spec.actions)
    block = Block(path / FLASH_PARTS["block"], shape, provider=provider, threads=threads)
    wanted = list(target.networks.tokens([spec.observation.zeros()]).shape[1:])
    if block.tokens != wanted:
        raise BundleError(f"the block in {path} reads tokens {block.tokens}, the target's encoder gives {wanted}")
    return FlashBundle(path, manifest, block, settings)
