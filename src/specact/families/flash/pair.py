"""A flow policy as the target of a pair; the draft is FLASH's block, another policy, or the rest of the last chunk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specact.bundle.manifest import joint_fingerprint
from specact.bundle.network import CPU, Compute
from specact.errors import ConfigError
from specact.families.chunks.bundle import FlowBundle
from specact.families.chunks.flow import FlowPolicy
from specact.families.chunks.pair import check_one_robot
from specact.families.chunks.policy import ChunkPolicy
from specact.families.chunks.sources import LoadedPolicy
from specact.families.flash.bundle import FLASH, Block, FlashBundle, FlashSettings, flow_of, load_flash
from specact.families.flash.drafting import FlashDrafter
from specact.families.flash.rounds import ROUNDS, Rounds
from specact.families.flash.verify import FlashTarget, FlashVerifier, PendingRound
from specact.families.flash.wire import FlashExchange
from specact.families.freqcache.bundle import FREQCACHE, RefreshBundle, load_refresh
from specact.families.freqcache.cached import FreqCached
from specact.pair import UNNAMED, Pair, PairSource
from specact.units import ActionUnits
from specact.verification import Target


@dataclass(frozen=True)
class FlashParts:
    """A flow policy as the target, and what drafts for it.

    Attributes:
        policy: the target.
        settings: of its rounds.
        block: drafts from the target encoder's tokens; None if there is none.
        refresh: recomputes a part of the target's prefix; None if there is none.
        draft: a policy on the device, or None.
        rounds: how chunks are drafted and verified.
        name, env, fingerprint, path, source: see :class:`~specact.pair.Pair`.

    Raises:
        ConfigError: for a draft that is incompatible with the target.
    """

    policy: FlowPolicy
    settings: FlashSettings
    block: Block | None = None
    refresh: RefreshBundle | None = None
    draft: ChunkPolicy | None = None
    rounds: Rounds = ROUNDS["full"]
    name: str = ""
    env: str = ""
    fingerprint: str = ""
    path: Path | None = None
    source: PairSource = UNNAMED

    def __post_init__(self) -> None:
        if self.draft is not None:
            check_one_robot(self.draft.spec, self.policy.spec)

    @property
    def units(self) -> ActionUnits:
        """The demonstrated range is [-1, 1]."""
        actions = self.policy.spec.actions
        return ActionUnits.of_range(self.policy.units.low[:actions], self.policy.units.high[:actions])

    def drafter(self) -> FlashDrafter:
        """A new one, of one robot.

        Raises:
            ConfigError: if the rounds need a block, a draft or a refresh that is missing.
            BundleError: if they need the target's encoder, and the target is only on a server.
        """
        parts = None
        if self.rounds.reuse is not None:
            if self.refresh is None:
                raise ConfigError(
                    "these rounds compute a part of the prefix again, and this target has no network for that; make "
                    "one: specact export --refresh"
                )
            parts = FreqCached(self.policy.networks, self.refresh, self.rounds.reuse)
        return FlashDrafter(self.policy, self.units, self.rounds, self.settings, self.block, self.draft, parts)

    def target(self) -> FlashTarget:
        """The target with its block."""
        return FlashTarget(self.policy, self.settings, self.block)

    def verifier(self, target: Target[PendingRound]) -> FlashVerifier:
        """For a target in this process, see :class:`FlashExchange` for a server."""
        return FlashVerifier(target, self.units, self.settings.execute)

    def pair(self) -> Pair[PendingRound]:
        """As a pair."""
        spec, execute = self.policy.spec, self.settings.execute
        seen = spec.observation if self.draft is None else self.draft.spec.observation.union(spec.observation)
        return Pair(
            name=self.name, observation=seen, units=self.units, execute=execute, rate_hz=spec.rate_hz, env=self.env,
            fingerprint=self.fingerprint, path=self.path, source=self.source, parts=self,
            drafter=self.drafter, target=self.target, verifier=self.verifier,
            exchange=FlashExchange(spec, self.units, execute, self.name, self.fingerprint, self.target),
        )  # fmt: skip


def load_flow_pair(
    bundle: FlowBundle,
    draft: LoadedPolicy | None = None,
    source: PairSource | None = None,
    *,
    rounds: Rounds = ROUNDS["full"],
    compute: Compute = CPU,
) -> Pair[PendingRound]:
    """A flow policy's bundle as a pair, with the block and the refresh in its folder.

    Without a block the whole chunk is executed, and no dimension is a gripper.

    Args:
        bundle: the target.
        draft: a policy on the device.
        source: how it was named.
        rounds: how chunks are drafted and verified.
        compute: of block and refresh.

    Raises:
        BundleError: if the block or the refresh is incompatible with the target, or damaged.
        ConfigError: if the draft is incompatible with the target.
    """
    target = LoadedPolicy(bundle.name, bundle.policy(), None, bundle.fingerprint, bundle.env)
    folder, again = bundle.path / FLASH, bundle.path / FREQCACHE
    made = load_flash(folder, target, compute=compute) if folder.exists() else None
    refresh = load_refresh(again, bundle, compute=compute) if again.exists() else None
    return flash_pair(target, made, refresh, draft, bundle.path, source, rounds)


def flash_pair(
    target: LoadedPolicy,
    made: FlashBundle | None,
    refresh: RefreshBundle | None = None,
    draft: LoadedPolicy | None = None,
    path: Path | None = None,
    source: PairSource | None = None,
    rounds: Rounds = ROUNDS["full"],
) -> Pair[PendingRound]:
    """A pair of these parts; see :class:`FlashParts` and :class:`~specact.pair.Pair`."""
    policy = flow_of(target)
    settings = FlashSettings(policy.spec.chunk) if made is None else made.settings
    prints = [part.fingerprint for part in (target, made, draft) if part is not None]
    # A flow policy alone keeps its own.
    fingerprint = joint_fingerprint(*prints) if len(prints) > 1 else target.fingerprint
    return FlashParts(
        policy, settings, None if made is None else made.block, refresh, None if draft is None else draft.policy,
        rounds, target.name, target.env, fingerprint, path, PairSource(str(path)) if source is None else source,
    ).pair()  # fmt: skip
