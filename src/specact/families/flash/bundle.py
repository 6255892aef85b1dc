"""FLASH's drafting block of one flow policy: a network from the encoder's tokens to a chunk, and fitted settings."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specact.errors import BundleError, ConfigError
from specact.families.chunks.bundle import read_chunk_spec
from specact.families.chunks.flow import Array, FlowPolicy, FlowUnits
from specact.families.chunks.sources import LoadedPolicy
from specact.families.codes.bundle import find_bundle
from specact.families.codes.network import open_session
from specact.families.flash.check import Check
from specact.families.head import check_head
from specact.runtime.manifest import BundleFolder, read_manifest
from specact.toml import build

FLASH_PARTS = {"block": "block.onnx"}
# Its folder in that of the flow policy it was made for.
FLASH = "flash"


@dataclass(frozen=True)
class FlashSettings:
    """Settings of a target's rounds.

    Attributes:
        execute: maximum number of executed actions of a chunk before the next round.
        grippers: dimensions of an action that are grippers: excluded from distances, and guarded.
        period: maximum number of checked rounds between two full ones; 0 for no limit.
        levels, within: of a :class:`~specact.families.flash.check.Check` fitted to held-out observations, see
            docs/flash.md.

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


def flow_of(target: LoadedPolicy) -> FlowPolicy:
    """The flow policy of a target, whose networks FLASH uses one by one.

    Raises:
        ConfigError: if it is no flow policy, or has no range of actions or no fingerprint.
    """
    policy = target.policy
    if not isinstance(policy, FlowPolicy):
        raise ConfigError(
            f"{target.name} answers with whole chunks and has no parts that a chunk could be checked with; FLASH needs "
            "a flow policy: a bundle of one, or SmolVLA, pi0 or pi05 of LeRobot's whose actions are not relative to "
            "what is observed"
        )
    ends = (end[: policy.spec.actions] for end in (policy.units.low, policy.units.high))
    if not target.fingerprint or not all(np.isfinite(end).all() for end in ends):
        raise ConfigError(
            f"{target.name} must say the range of its actions, and have a fingerprint of its weights; save it with the "
            "statistics of its dataset"
        )
    return policy


@dataclass(frozen=True)
class MadeFor:
    """The target that a block was made for.

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
    """The drafting network on ONNX Runtime: from the target encoder's tokens to a chunk.

    Args:
        path: the ``.onnx`` file.
        chunk: H and A of the target's chunks.
        provider, threads: see :class:`~specact.families.codes.network.OnnxPolicy`.

    Attributes:
        tokens: N and W of the encoder's tokens.

    Raises:
        BundleError: if the file is no ONNX model, or has other inputs or outputs.
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
        """Drafted chunks ``[B, H, A]`` in the flow's units, from tokens ``[B, N, W]``."""
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
    name_or_path: str | Path, target: LoadedPolicy, *, provider: str = "CPUExecutionProvider", threads: int = 1
) -> FlashBundle:
    """Loads FLASH's block for a target.

    Args:
        name_or_path: a folder, or the name of a bundle that comes with the package.
        target: the flow policy that it drafts for, see :func:`flow_of`.
        provider, threads: see :class:`~specact.families.codes.network.OnnxPolicy`.

    Raises:
        BundleError: if a part is missing, damaged, or does not match its fingerprint in the manifest, or if it was made
            for another target.
        ConfigError: if there is no bundle of that name, or no such execution provider, or the target is no flow policy.
    """
    policy, path = flow_of(target), find_bundle(name_or_path)
    manifest = read_manifest(path, "flash", FLASH_PARTS)
    check_head(path, manifest)
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
    settings, spec = made_for.settings, policy.spec
    if settings.execute > spec.chunk or any(dimension >= spec.actions for dimension in settings.grippers):
        raise BundleError(f"the settings in {path} do not fit chunks of {spec.chunk} x {spec.actions}: {settings}")
    shape = (spec.chunk, spec.actions)
    block = Block(path / FLASH_PARTS["block"], shape, provider=provider, threads=threads)
    here = not isinstance(policy.networks, RemoteParts)
    wanted = list(policy.networks.tokens([spec.observation.zeros()]).shape[1:]) if here else block.tokens
    if block.tokens != wanted:
        raise BundleError(f"the block in {path} reads tokens {block.tokens}, the target's encoder gives {wanted}")
    return FlashBundle(path, manifest, block, settings)


class RemoteParts:
    """Placeholder for the networks of a flow policy on a server; see :class:`~specact.families.chunks.flow.FlowParts`.

    Args:
        name: of the pair.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, part: str) -> Any:
        """Refuses any use, before anything is drafted or checked."""
        raise BundleError(
            f"the flow policy that {self._name} drafts for is not here; name it with --target, such as "
            "lerobot:PATH@HZ, or leave drafting and checks to a server that has it"
        )


def describe_target(policy: FlowPolicy) -> dict[str, Any]:
    """Spec and range of a target for devices whose server drafts and checks, as plain values for a manifest."""
    units, actions = policy.units, policy.spec.actions
    return {
        "spec": policy.spec.describe(), "low": units.low[:actions].tolist(), "high": units.high[:actions].tolist()
    }  # fmt: skip


def remote_target(path: Path) -> LoadedPolicy:
    """The target of a block on a server, as the block's manifest describes it; it cannot infer.

    Raises:
        BundleError: if the manifest does not describe it, or cannot be read.
    """
    manifest = read_manifest(path, "flash", FLASH_PARTS)
    try:
        told, fingerprint, name = manifest["target"], str(manifest["spec"]["target"]), str(manifest["name"])
        low, high = (np.array(told[end], np.float32) for end in ("low", "high"))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BundleError(
            f"the manifest of {path} does not describe its target ({error}); name the target, or train the block again"
        ) from None
    spec = read_chunk_spec(path, told)
    if low.shape != (spec.actions,) or high.shape != low.shape or not (low <= high).all():
        raise BundleError(f"the manifest of {path} has no range for {spec.actions} actions; train the block again")
    units = FlowUnits((low + high) / np.float32(2.0), np.ones_like(low), low, high)
    return LoadedPolicy(name, FlowPolicy(RemoteParts(name), units, spec), None, fingerprint, str(manifest["env"]))
