"""A flow policy as the target of a pair; the draft is FLASH's block, another policy, or what is left of a chunk."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from specact.errors import ConfigError
from specact.families.chunks.bundle import FlowBundle
from specact.families.chunks.flow import FlowPolicy
from specact.families.chunks.sources import LoadedPolicy
from specact.families.flash.bundle import FLASH, Block, FlashSettings, load_flash
from specact.families.flash.drafting import FlashDrafter
from specact.families.flash.rounds import ROUNDS, Rounds
from specact.families.flash.verify import Asked, FlashTarget, FlashVerifier
from specact.families.flash.wire import FlashCodec, FlashResponder
from specact.families.freqcache.bundle import FREQCACHE, RefreshBundle, load_refresh
from specact.families.freqcache.cached import FreqCached
from specact.families.target_pair import TargetPair, joint_fingerprint
from specact.units import ActionUnits
from specact.verification import Target


@dataclass(frozen=True, kw_only=True)
class FlashPair(TargetPair[FlowPolicy]):
    """See :class:`~specact.pair.Pair` and :class:`~specact.families.target_pair.TargetPair`.

    Attributes:
        settings: of its rounds.
        block: that drafts from what the target's encoder sees; None where there is none.
        refresh: with which a part of the target's prefix is computed again; None where there is none.
        rounds: how one comes to a chunk.
    """

    settings: FlashSettings
    block: Block | None = None
    refresh: RefreshBundle | None = None
    rounds: Rounds = ROUNDS["full"]

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
        """See :class:`~specact.pair.Pair`; of one robot."""
        return self.drafter_of(self.rounds)

    def drafter_of(self, rounds: Rounds) -> FlashDrafter:
        """The drafter of other rounds.

        Raises:
            ConfigError: if they need a block, a draft or a refresh that is not there.
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

    def verifier(self, target: Target[Asked]) -> FlashVerifier:
        """See :class:`~specact.pair.Pair`; for a target in this process, see :class:`FlashCodec` for a server."""
        return FlashVerifier(target, self.units, self.execute)

    @property
    def codec(self) -> FlashCodec:
        """See :class:`~specact.pair.Pair`."""
        return FlashCodec(self.policy.spec, self.units, self.execute)

    @property
    def responder(self) -> FlashResponder:
        """See :class:`~specact.pair.Pair`."""
        return FlashResponder(self.target, self.name, self.fingerprint)


def flash_pair(bundle: FlowBundle, draft: LoadedPolicy | None = None, draft_name: str | None = None) -> FlashPair:
    """A flow policy's bundle as a pair, with the block and the refresh that lie beside it.

    Without one, all of a chunk is executed, and nothing is a gripper.

    Args:
        bundle: the target.
        draft: a policy on the device.
        draft_name: how it was named.

    Raises:
        BundleError: if the block or the refresh does not fit the target, or is damaged.
        ConfigError: if the draft does not fit the target.
    """
    folder = bundle.path / FLASH
    made = load_flash(folder, bundle) if folder.exists() else None
    again = bundle.path / FREQCACHE
    refresh = load_refresh(again, bundle) if again.exists() else None
    settings = FlashSettings(bundle.spec.chunk) if made is None else made.settings
    prints = [part.fingerprint for part in (bundle, made, draft) if part is not None]
    return FlashPair(
        name=bundle.name, policy=bundle.policy(), settings=settings, block=None if made is None else made.block,
        draft=None if draft is None else draft.policy, refresh=refresh, draft_name=draft_name, env=bundle.env,
        # A flow alone has its own.
        fingerprint=joint_fingerprint(*prints) if len(prints) > 1 else bundle.fingerprint, path=bundle.path,
    )  # fmt: skip
