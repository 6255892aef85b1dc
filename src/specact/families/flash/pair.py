"""A flow policy as the target of a pair; the draft is FLASH's block, another policy, or what is left of a chunk."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from specact.errors import ConfigError
from specact.families.chunks.bundle import FlowBundle
from specact.families.chunks.flow import FlowPolicy
from specact.families.chunks.policy import ChunkPolicy
from specact.families.chunks.sources import LoadedPolicy
from specact.families.flash.bundle import FLASH, Block, FlashSettings, load_flash
from specact.families.flash.drafting import FlashDrafter
from specact.families.flash.rounds import ROUNDS, Rounds
from specact.families.flash.verify import Asked, FlashTarget, FlashVerifier
from specact.families.flash.wire import FlashCodec, FlashResponder
from specact.families.freqcache.bundle import FREQCACHE, RefreshBundle, load_refresh
from specact.families.freqcache.cached import FreqCached
from specact.observation import ObservationSpec
from specact.units import ActionUnits
from specact.verification import Target


@dataclass(frozen=True)
class FlashPair:
    """See :class:`~specact.pair.Pair`.

    Attributes:
        name: what it is called.
        policy: the target.
        settings: of its rounds.
        block: that drafts from what the target's encoder sees; None where there is none.
        draft: a policy on the device, where there is one.
        refresh: with which a part of the target's prefix is computed again; None where there is none.
        draft_name: as it was named when the pair was loaded.
        rounds: how one comes to a chunk.
        env, fingerprint, path: see :class:`~specact.pair.LoadedPair`.

    Raises:
        ConfigError: for a draft that does not fit the target.
    """

    name: str
    policy: FlowPolicy
    settings: FlashSettings
    block: Block | None = None
    draft: ChunkPolicy | None = None
    refresh: RefreshBundle | None = None
    draft_name: str | None = None
    rounds: Rounds = ROUNDS["full"]
    env: str = ""
    fingerprint: str = ""
    path: Path | None = None

    def __post_init__(self) -> None:
        target, draft = self.policy.spec, None if self.draft is None else self.draft.spec
        if draft is not None and (draft.actions, draft.rate_hz) != (target.actions, target.rate_hz):
            raise ConfigError(
                f"the draft has {draft.actions} actions at {draft.rate_hz:g} Hz and the target {target.actions} at "
                f"{target.rate_hz:g} Hz; they must be those of one robot"
            )

    @property
    def recommended_gates(self) -> dict[str, Any]:
        """None: nobody has chosen any."""
        return {}

    @cached_property
    def observation(self) -> ObservationSpec:
        """See :class:`~specact.pair.Pair`."""
        target = self.policy.spec.observation
        return target if self.draft is None else self.draft.spec.observation.union(target)

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
    def overlap(self) -> Literal["drop", "average"]:
        """See :class:`~specact.pair.Pair`."""
        return "drop"

    @property
    def rate_hz(self) -> float:
        """See :class:`~specact.pair.Pair`."""
        return self.policy.spec.rate_hz

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

    @property
    def source(self) -> str:
        """See :class:`~specact.pair.LoadedPair`."""
        return str(self.path)


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
    prints = [part.fingerprint for part in (bundle, made, draft) if part is not None]
    whole = prints[0] if len(prints) == 1 else hashlib.sha256("".join(prints).encode()).hexdigest()[:16]
    settings = FlashSettings(bundle.spec.chunk) if made is None else made.settings
    return FlashPair(
        bundle.name, bundle.policy(), settings, None if made is None else made.block,
        None if draft is None else draft.policy, refresh, draft_name, env=bundle.env, fingerprint=whole,
        path=bundle.path,
    )  # fmt: skip
