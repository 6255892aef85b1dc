"""A flow policy as the target of a pair; the draft is FLASH's block, another policy, or the rest of the last chunk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from specact.bundle.manifest import joint_fingerprint
from specact.bundle.network import CPU, Compute
from specact.errors import ConfigError
from specact.families.chunks.bundle import FlowBundle
from specact.families.chunks.flow import FlowPolicy
from specact.families.chunks.sources import LoadedPolicy, load_policy
from specact.families.flash.bundle import (
    FLASH,
    Block,
    FlashBundle,
    FlashSettings,
    flow_of,
    load_flash,
    remote_target,
)
from specact.families.flash.drafting import FlashDrafter
from specact.families.flash.rounds import ROUNDS, Rounds
from specact.families.flash.verify import FlashTarget, FlashVerifier, PendingRound
from specact.families.flash.wire import FlashExchange
from specact.families.freqcache.bundle import FREQCACHE, RefreshBundle, load_refresh
from specact.families.freqcache.cached import FreqCached
from specact.families.target_pair import TargetPair, name_in
from specact.pair import Named
from specact.units import ActionUnits
from specact.verification import Target


@dataclass(frozen=True, kw_only=True)
class FlashPair(TargetPair[FlowPolicy]):
    """See :class:`~specact.pair.Pair` and :class:`~specact.families.target_pair.TargetPair`.

    Attributes:
        settings: of its rounds.
        block: drafts from the target encoder's tokens; None if there is none.
        refresh: recomputes a part of the target's prefix; None if there is none.
        rounds: how chunks are drafted and verified.
        target_name: the target's name as given when the pair was loaded; None if it is the pair's own bundle.
    """

    settings: FlashSettings
    block: Block | None = None
    refresh: RefreshBundle | None = None
    rounds: Rounds = ROUNDS["full"]
    target_name: str | None = None

    @property
    def named(self) -> Named:
        """What it was loaded with.

        Raises:
            ConfigError: for a decoding of the user's own.
        """
        return Named(self.draft_name, self.target_name, name_in(ROUNDS, self.rounds, "full"))

    @cached_property
    def units(self) -> ActionUnits:
        """The demonstrated range is [-1, 1]."""
        actions = self.policy.spec.actions
        return ActionUnits.of_range(self.policy.units.low[:actions], self.policy.units.high[:actions])

    @property
    def execute(self) -> int:
        """See :class:`~specact.pair.Pair`."""
        return self.settings.execute

    @property
    def drafter(self) -> FlashDrafter:
        """See :class:`~specact.pair.Pair`; a new one for each robot."""
        return self.drafter_of(self.rounds)

    def drafter_of(self, rounds: Rounds) -> FlashDrafter:
        """The drafter of other rounds than the pair's own.

        Raises:
            ConfigError: if they need a block, a draft or a refresh that is missing.
            BundleError: if they need the target's encoder, and the target is only on a server.
        """
        parts = None
        if rounds.reuse is not None:
            if self.refresh is None:
                raise ConfigError(
                    "these rounds compute a part of the prefix again, and this target has no network for that; make "
                    "one: specact export --refresh"
                )
            parts = FreqCached(self.policy.networks, self.refresh, rounds.reuse)
        return FlashDrafter(self.policy, self.units, rounds, self.settings, self.block, self.draft, parts)

    @property
    def target(self) -> FlashTarget:
        """See :class:`~specact.pair.Pair`."""
        return FlashTarget(self.policy, self.settings, self.block)

    def verifier(self, target: Target[PendingRound]) -> FlashVerifier:
        """See :class:`~specact.pair.Pair`; for a target in this process, see :class:`FlashExchange` for a server."""
        return FlashVerifier(target, self.units, self.execute)

    @cached_property
    def exchange(self) -> FlashExchange:
        """See :class:`~specact.pair.Pair`."""
        spec = self.policy.spec
        return FlashExchange(spec, self.units, self.execute, self.name, self.fingerprint, lambda: self.target)


def flash_pair(
    bundle: FlowBundle,
    draft: LoadedPolicy | None = None,
    draft_name: str | None = None,
    *,
    compute: Compute = CPU,
) -> FlashPair:
    """A flow policy's bundle as a pair, with the block and the refresh in its folder.

    Without a block the whole chunk is executed, and no dimension is a gripper.

    Args:
        bundle: the target.
        draft: a policy on the device.
        draft_name: its name as given by the user.
        provider, threads: of block and refresh, see :class:`~specact.families.codes.network.OnnxPolicy`.

    Raises:
        BundleError: if the block or the refresh is incompatible with the target, or damaged.
        ConfigError: if the draft is incompatible with the target.
    """
    target = LoadedPolicy(bundle.name, bundle.policy(), None, bundle.fingerprint, bundle.env)
    folder, again = bundle.path / FLASH, bundle.path / FREQCACHE
    made = load_flash(folder, target, compute=compute) if folder.exists() else None
    refresh = load_refresh(again, bundle, compute=compute) if again.exists() else None
    return replace(_pair(target, made, draft, draft_name, bundle.path), refresh=refresh)


def block_pair(
    path: Path,
    target: str | None = None,
    draft: LoadedPolicy | None = None,
    draft_name: str | None = None,
    *,
    steps: int = 10,
    compute: Compute = CPU,
) -> FlashPair:
    """FLASH's block and the flow policy that it drafts for as a pair.

    Args:
        path: the block's bundle.
        target: see :func:`~specact.families.chunks.sources.load_policy`; without it the pair is for a device whose
            server drafts and checks.
        draft, draft_name: see :func:`flash_pair`.
        steps: Euler steps of the target's own chunks, for clients without rounds.
        compute: where its networks run.

    Raises:
        BundleError: if the block was made for another target, or something is damaged.
        ConfigError: if the target is no flow policy, or the draft does not fit it.
    """
    loaded = remote_target(path) if target is None else load_policy(target, steps=steps, compute=compute)
    made = load_flash(path, loaded, compute=compute)
    return replace(_pair(loaded, made, draft, draft_name, path), name=made.name, target_name=target)


def _pair(
    target: LoadedPolicy, made: FlashBundle | None, draft: LoadedPolicy | None, draft_name: str | None, path: Path
) -> FlashPair:
    policy = flow_of(target)
    prints = [part.fingerprint for part in (target, made, draft) if part is not None]
    return FlashPair(
        name=target.name, policy=policy, settings=FlashSettings(policy.spec.chunk) if made is None else made.settings,
        block=None if made is None else made.block, draft=None if draft is None else draft.policy,
        draft_name=draft_name, env=target.env, path=path,
        # A flow policy alone keeps its own.
        fingerprint=joint_fingerprint(*prints) if len(prints) > 1 else target.fingerprint,
    )  # fmt: skip
