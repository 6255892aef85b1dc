"""FLASH's drafting block of one flow policy: a network from the encoder's tokens to a chunk, and fitted settings."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specact.bundle.bundle import Bundle, open_bundle
from specact.bundle.manifest import MANIFEST
from specact.bundle.network import CPU, Compute, Network
from specact.errors import BundleError, ConfigError
from specact.families.chunks.flow import Array, FlowPolicy, FlowUnits
from specact.families.chunks.policy import ChunkSpec
from specact.families.chunks.sources import LoadedPolicy
from specact.families.flash.check import Check
from specact.records import Record, check_fields, read_record

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
        compute: where it runs.

    Attributes:
        tokens: N and W of the encoder's tokens.

    Raises:
        BundleError: if the file is no ONNX model, or has other inputs or outputs.
    """

    def __init__(self, path: Path, chunk: tuple[int, int], *, compute: Compute = CPU) -> None:
        inputs, outputs = {"tokens": ("batch", "N", "W")}, {"chunks": ("batch", *chunk)}
        self._network = Network(path, inputs, outputs, compute, repair="train it again with specact train")
        self.tokens = [self._network.sizes["N"], self._network.sizes["W"]]

    def chunks(self, tokens: Array) -> Array:
        """Drafted chunks ``[B, H, A]`` in the flow's units, from tokens ``[B, N, W]``."""
        return self._network.run({"tokens": tokens})[0]


@dataclass(frozen=True)
class FlashBundle(Bundle[MadeFor]):
    """A loaded bundle of a block.

    Attributes:
        block: the network.
    """

    block: Block

    @property
    def settings(self) -> FlashSettings:
        """Of the target's rounds."""
        return self.spec.settings


def load_flash(name_or_path: str | Path, target: LoadedPolicy, *, compute: Compute = CPU) -> FlashBundle:
    """Loads FLASH's block for a target.

    Args:
        name_or_path: a folder, or the name of a bundle that comes with the package.
        target: the flow policy that it drafts for, see :func:`flow_of`.
        compute: where the block runs.

    Raises:
        BundleError: if a part is missing, damaged, or does not match its fingerprint in the manifest, or if it was made
            for another target.
        ConfigError: if there is no bundle of that name, or the target is no flow policy.
    """
    policy, bundle = flow_of(target), open_bundle(name_or_path, "flash", MadeFor, FLASH_PARTS)
    path, made_for = bundle.path, bundle.spec
    if made_for.target != target.fingerprint:
        raise BundleError(
            f"the block in {path} was made for the target {made_for.target}, but {target.name} is "
            f"{target.fingerprint}; take that target, or train a block for this one with specact train and a recipe "
            'of kind = "flash"'
        )
    settings, spec = made_for.settings, policy.spec
    if settings.execute > spec.chunk or any(dimension >= spec.actions for dimension in settings.grippers):
        raise BundleError(f"the settings in {path} do not fit chunks of {spec.chunk} x {spec.actions}: {settings}")
    block = Block(bundle.files["block"], (spec.chunk, spec.actions), compute=compute)
    here = not isinstance(policy.networks, RemoteParts)
    wanted = list(policy.networks.tokens([spec.observation.zeros()]).shape[1:]) if here else block.tokens
    if block.tokens != wanted:
        raise BundleError(f"the block in {path} reads tokens {block.tokens}, the target's encoder gives {wanted}")
    return FlashBundle(path, bundle.manifest, made_for, bundle.files, block)


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


class DescribedTarget(Record, frozen=True):
    """A target for devices whose server drafts and checks.

    Attributes:
        spec: of its observations and chunks.
        low, high: range of its actions, ``[A]``.
    """

    spec: ChunkSpec
    low: tuple[float, ...]
    high: tuple[float, ...]

    def __post_init__(self) -> None:
        check_fields(self)
        both = list(zip(self.low, self.high, strict=False))
        if not len(self.low) == len(self.high) == self.spec.actions or any(low > high for low, high in both):
            raise ConfigError(
                f"low and high must be a range of {self.spec.actions} actions, got {self.low}, {self.high}"
            )


def describe_target(policy: FlowPolicy) -> dict[str, Any]:
    """A :class:`DescribedTarget` as plain values, for a manifest."""
    units, actions = policy.units, policy.spec.actions
    return {
        "spec": policy.spec.describe(), "low": units.low[:actions].tolist(), "high": units.high[:actions].tolist()
    }  # fmt: skip


def remote_target(path: Path) -> LoadedPolicy:
    """The target of a block on a server, as the block's manifest describes it; it cannot infer.

    Raises:
        BundleError: if the manifest does not describe it, or cannot be read.
    """
    bundle = open_bundle(path, "flash", MadeFor, FLASH_PARTS)
    told = read_record(bundle.manifest.target, DescribedTarget, f"{path / MANIFEST}: target", BundleError)
    low, high = np.array(told.low, np.float32), np.array(told.high, np.float32)
    units = FlowUnits((low + high) / np.float32(2.0), np.ones_like(low), low, high)
    policy = FlowPolicy(RemoteParts(bundle.name), units, told.spec)
    return LoadedPolicy(bundle.name, policy, None, bundle.spec.target, bundle.env)
