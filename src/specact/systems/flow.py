"""Flow policies with what is made for them: FLASH's block, FreqCache's refresh, named compositions, and the pair."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from specact.bundle.bundle import Bundle, open_bundle
from specact.bundle.manifest import MANIFEST, joint_fingerprint
from specact.bundle.network import CPU, Compute
from specact.errors import BundleError, ConfigError, SpecactError
from specact.families.chunks.flow import FlowBundle, FlowPolicy, FlowUnits
from specact.families.chunks.pair import joint_observation
from specact.families.chunks.policy import ChunkPolicy, ChunkSpec, units_of
from specact.families.chunks.sources import LoadedPolicy, check_made_for
from specact.pair import Pair, PairIdentity, PairSource
from specact.records import Record, read_record
from specact.systems.flash import Block, FlashDrafter, FlashExchange, FlashSettings, FlashTarget, RoundAnswer, Rounds
from specact.systems.freqcache import FREQCACHE, RefreshBundle, ReusingRounds, load_refresh
from specact.types import ActionUnits

# The block's folder in that of the flow policy it was made for, and its files.
FLASH = "flash"
FLASH_PARTS = {"block": "block.onnx"}
FULL = Rounds("every chunk in 10 steps")
_FLASH = Rounds("FLASH: a block drafts, the flow checks at 5 and 10 % of noise within .15", "block")
ROUNDS: dict[str, Rounds] = {
    "full": FULL,
    "full_5": Rounds("every chunk in 5 steps", steps=5),
    "full_3": Rounds("every chunk in 3 steps", steps=3),
    "full_2": Rounds("every chunk in 2 steps: the control at FLASH's cost", steps=2),
    "full_1": Rounds("every chunk in 1 step", steps=1),
    "flash": _FLASH,
    "flash_fitted": replace(_FLASH, about="FLASH with fitted noise levels and delta", levels=None, within=None),
    "flash_device": replace(_FLASH, about="FLASH, the block on the device", on_device=True),
    "flash_last": Rounds("FLASH's check of what is left of the last chunk", "last"),
    "flash_policy": Rounds("FLASH's check of a draft policy's chunk", "policy"),
    "block": replace(_FLASH, about="FLASH's block alone, never checked: the control", on_device=True, gate="never"),
    "unchecked": replace(
        _FLASH, about="drafts unchecked, as many full rounds as FLASH, at random: the control",
        on_device=True, full=True, gate="random", rate_of="flash",
    ),
    "freqcache": ReusingRounds("FreqCache: the tokens of smooth patches reused, moved with the picture"),
}  # fmt: skip


@dataclass(frozen=True)
class FlowParts(PairIdentity):
    """A flow policy as the target, and what drafts for it, if anything: the parts of every flow pair.

    Attributes:
        policy: the target.
        settings: of its rounds.
        rounds: how chunks are drafted and verified.
        block: drafts from the target encoder's tokens, or None.
        refresh: recomputes a part of the target's prefix, or None.
        draft: a policy on the device, or None.
        target_fingerprint: of the target alone.
    """

    policy: FlowPolicy
    settings: FlashSettings
    rounds: Rounds = FULL
    block: Block | None = None
    refresh: RefreshBundle | None = None
    draft: ChunkPolicy | None = None
    target_fingerprint: str = ""

    @cached_property
    def units(self) -> ActionUnits:
        """The demonstrated range is [-1, 1]."""
        actions = self.policy.spec.actions
        return ActionUnits.of_range(self.policy.units.low[:actions], self.policy.units.high[:actions])

    def target(self) -> FlashTarget:
        """The target with its block."""
        return FlashTarget(self.policy, self.settings, self.block)

    def pair(self) -> Pair[RoundAnswer]:
        """As a pair; ConfigError for a draft that is incompatible with the target."""
        spec = self.policy.spec
        return Pair(
            **self.identity, observation=joint_observation(self.draft, spec), units=self.units,
            execute=self.settings.execute, rate_hz=spec.rate_hz, parts=self,
            drafter=lambda: FlashDrafter(self), target=self.target,
            verifier=lambda target: self.rounds.verifier(self, target), exchange=FlashExchange(self),
        )  # fmt: skip


def load_flow_pair(
    bundle: FlowBundle, draft: LoadedPolicy | None = None, source: PairSource | None = None, *,
    rounds: Rounds = FULL, compute: Compute = CPU,
) -> Pair[RoundAnswer]:  # fmt: skip
    """A flow policy's bundle as a pair, with the block and the refresh in its folder; ``source`` says how it was named.

    Without a block the whole chunk is executed, and no dimension is a gripper. A block or refresh that is damaged or of
    another target is a BundleError, a draft of another robot a ConfigError.
    """
    target = LoadedPolicy(bundle.name, bundle.policy(), None, bundle.fingerprint, bundle.env)
    flash_folder, refresh_folder = bundle.path / FLASH, bundle.path / FREQCACHE
    flash = load_flash(flash_folder, target, compute=compute) if flash_folder.exists() else None
    refresh = load_refresh(refresh_folder, bundle, compute=compute) if refresh_folder.exists() else None
    return _flow_pair(target, flash, refresh, draft, bundle.path, source, rounds)


def load_block_pair(
    path: Path, target: LoadedPolicy | None, draft: LoadedPolicy | None = None, source: PairSource | None = None, *,
    rounds: Rounds = FULL, compute: Compute = CPU,
) -> Pair[RoundAnswer]:  # fmt: skip
    """FLASH's block and the flow policy that it drafts for; without one the pair is for a device. Errors as above."""
    target = _remote_target(path) if target is None else target
    flash = load_flash(path, target, compute=compute)
    return _flow_pair(replace(target, name=flash.name), flash, None, draft, path, source, rounds)


def _flow_pair(
    target: LoadedPolicy, flash: FlashBundle | None, refresh: RefreshBundle | None, draft: LoadedPolicy | None,
    path: Path, source: PairSource | None, rounds: Rounds,
) -> Pair[RoundAnswer]:  # fmt: skip
    policy = flow_of(target)
    settings = FlashSettings(policy.spec.chunk) if flash is None else flash.spec.settings
    prints = [part.fingerprint for part in (target, flash, draft) if part is not None]
    # A flow policy alone keeps its own.
    fingerprint = joint_fingerprint(*prints) if len(prints) > 1 else target.fingerprint
    return FlowParts(
        target.name, policy, settings, rounds, None if flash is None else flash.block, refresh,
        None if draft is None else draft.policy, target.fingerprint, env=target.env, fingerprint=fingerprint,
        path=path, source=source or PairSource(str(path)),
    ).pair()  # fmt: skip


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
    """The target that a block was made for: the fingerprint of its bundle, and the settings of its rounds."""

    target: str
    settings: FlashSettings


@dataclass(frozen=True)
class FlashBundle(Bundle[MadeFor]):
    """A loaded bundle of a block."""

    block: Block


def load_flash(name_or_path: str | Path, target: LoadedPolicy, *, compute: Compute = CPU) -> FlashBundle:
    """FLASH's block for a target, which must be a flow policy, see :func:`flow_of`.

    A part that is missing, damaged, or of another target is a BundleError.
    """
    policy, bundle = flow_of(target), open_bundle(name_or_path, "flash", MadeFor, FLASH_PARTS)
    path, settings, spec = bundle.path, bundle.spec.settings, policy.spec
    repair = 'take that target, or train a block for this one with specact train and a recipe of kind = "flash"'
    check_made_for(bundle, target, bundle.spec.target, repair)
    if settings.execute > spec.chunk or any(dimension >= spec.actions for dimension in settings.grippers):
        raise BundleError(f"the settings in {path} do not fit chunks of {spec.chunk} x {spec.actions}: {settings}")
    block = Block(bundle.files["block"], (spec.chunk, spec.actions), compute=compute)
    if not isinstance(policy.networks, RemoteNetworks):
        encoded = list(policy.networks.tokens([spec.observation.zeros()]).shape[1:])
        if block.tokens != encoded:
            raise BundleError(f"the block in {path} reads tokens {block.tokens}, the target's encoder gives {encoded}")
    return FlashBundle(**vars(bundle), block=block)


class RemoteNetworks:
    """Placeholder for the networks of a flow policy on a server; refuses any use, before anything is drafted."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, part: str) -> Any:
        raise BundleError(
            f"the flow policy that {self._name} drafts for is not here; name it with --target, such as "
            "lerobot:PATH@HZ, or leave drafting and checks to a server that has it"
        )


class DescribedTarget(Record, frozen=True):
    """A target for devices whose server drafts and checks: its spec, and the range of its actions, ``[A]``."""

    spec: ChunkSpec
    low: tuple[float, ...]
    high: tuple[float, ...]


def _remote_target(path: Path) -> LoadedPolicy:
    """The target of a block on a server, as the block's manifest describes it; it cannot infer."""
    bundle, where = open_bundle(path, "flash", MadeFor, FLASH_PARTS), f"{path / MANIFEST}: target"
    described = read_record(bundle.manifest.target, DescribedTarget, where, BundleError)
    try:
        units = units_of(described.low, described.high, described.spec.actions)
    except SpecactError as error:
        raise BundleError(f"{where}: {error}") from None
    low, high = np.array(described.low, np.float32), np.array(described.high, np.float32)
    flow = FlowUnits((low + high) / np.float32(2.0), np.ones_like(low), low, high)
    policy = FlowPolicy(RemoteNetworks(bundle.name), flow, described.spec)
    return LoadedPolicy(bundle.name, policy, units, bundle.spec.target, bundle.env)
