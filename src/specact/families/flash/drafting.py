"""FLASH on the device: the robot's state, drafting, and the request to the target."""

from __future__ import annotations

import numpy as np

from specact.errors import ConfigError
from specact.families.chunks.flow import FlowPolicy
from specact.families.chunks.policy import ChunkPolicy, resized
from specact.families.flash.bundle import Block, FlashSettings
from specact.families.flash.check import Array, Check
from specact.families.flash.rounds import Rounds
from specact.families.flash.verify import Round, RoundRequest
from specact.families.freqcache.cached import FreqCached
from specact.observation import Window
from specact.types import Chunk, Proposal, StepRecord, value
from specact.units import ActionUnits


@value
class DraftedRound:
    """Evidence of a proposal.

    Attributes:
        question: the request to the target.
    """

    question: RoundRequest


class FlashDrafter:
    """See :class:`~specact.pair.FollowingDrafter`.

    The proposed actions are the drafted chunk; if the target drafts, the remainder of the last chunk with its last
    action repeated, or zeros (the middle of the demonstrated range) before the first one.

    A round is full if nothing is drafted, at an episode's start, after a gripper's change, and after ``period`` rounds
    without a full one.

    Args:
        policy: the target; its encoder runs on the device if the block does.
        units: of the proposed actions.
        rounds: the composition.
        settings: of the target's rounds.
        block: FLASH's drafting block.
        draft: a policy whose chunks are checked.
        parts: stateful networks that hold this robot's prefix cache.

    Raises:
        ConfigError: if the rounds need a block or a draft that is missing.
        BundleError: if they need the target's encoder, and the target is only on a server.
    """

    def __init__(
        self,
        policy: FlowPolicy,
        units: ActionUnits,
        rounds: Rounds,
        settings: FlashSettings,
        block: Block | None = None,
        draft: ChunkPolicy | None = None,
        parts: FreqCached | None = None,
    ) -> None:
        if rounds.proposes == "block" and block is None:
            raise ConfigError(
                'these rounds need a block that drafts; train one: specact train with a recipe of kind = "flash"'
            )
        if rounds.proposes == "policy" and draft is None:
            raise ConfigError("these rounds need a draft policy; name one: --draft NAME")
        self._policy, self._units, self._rounds, self._settings = policy, units, rounds, settings
        self._block, self._draft, self._parts = block, draft, parts
        # Taken here, where a robot does not move yet.
        self._tokens = policy.networks.tokens if rounds.on_device else None
        levels = settings.levels if rounds.levels is None else rounds.levels
        within = settings.within if rounds.within is None else rounds.within
        self._check = Check(levels, within, rounds.guarded)
        self.reset()

    @property
    def stateless(self) -> bool:
        """Whether what it proposes depends on the window alone."""
        return self._rounds.proposes == "policy" or self._tokens is not None

    def reset(self) -> None:
        """See :class:`~specact.pair.FollowingDrafter`."""
        self._full_due, self._rounds_since_full, self._played = True, 0, 0
        self._chunk: Chunk | None = None
        self._last_executed: Array | None = None
        self._round: Round | None = None
        if self._parts is not None:
            self._parts.reset()

    def on_action(self, drafted: Array, executed: Array) -> None:
        self._last_executed = executed
        self._played += 1

    def on_inference(self, record: StepRecord) -> None:
        if record.outcome is None:
            self._chunk, self._played = record.proposal.actions, 0
            self._rounds_since_full += 1

    def on_verified(self, record: StepRecord) -> None:
        assert record.outcome is not None
        found: Round = record.outcome.evidence
        late = record.proposal.actions is self._chunk
        self._chunk = self._units.from_environment(found.chunk)
        # A late verdict concerns a chunk that is partly played.
        self._played = self._played if late else 0
        self._full_due = found.switches
        self._rounds_since_full = 0 if found.full else self._rounds_since_full + (not late)
        if found.full:
            self._round = found

    def propose(self, window: Window, rng: np.random.Generator) -> Proposal:
        """The drafted chunk, and the request to the target."""
        rounds, settings = self._rounds, self._settings
        period_reached = rounds.periodic and 0 < settings.period <= self._rounds_since_full
        full = rounds.full or rounds.proposes == "nothing" or self._full_due or period_reached
        drafted = self._drafted(window, rng)
        actions = self._remaining() if drafted is None else self._units.from_environment(drafted)
        if rounds.proposes == "last" and not full:
            drafted = self._units.to_environment(actions)
        held = None if self._last_executed is None else self._last_executed[list(settings.grippers)] > 0.0
        cache = self._round.cache if rounds.stale and self._round is not None else None
        question = RoundRequest(
            full, None if full else drafted, self._check, rounds.steps, held, rounds.stale, cache, self._parts,
            rounds.shuffled,
        )  # fmt: skip
        return Proposal(window, actions, DraftedRound(question))

    def _drafted(self, window: Window, rng: np.random.Generator) -> Chunk | None:
        """The chunk drafted on the device, in the environment's units ``[H, A]``, or None."""
        rounds, policy = self._rounds, self._policy
        if rounds.proposes == "block" and self._tokens is not None:
            assert self._block is not None, "rounds that need a block have one"
            tokens = self._tokens([policy.spec.observation.select(window)])
            return policy.to_environment(self._block.chunks(tokens)[0])
        if rounds.proposes == "policy":
            assert self._draft is not None, "rounds that need a draft have one"
            return resized(self._draft.infer(self._draft.spec.observation.select(window), rng), policy.spec.chunk)
        return None

    def _remaining(self) -> Chunk:
        spec = self._policy.spec
        if self._chunk is None:
            return np.zeros((spec.chunk, spec.actions), np.float32)
        return resized(self._chunk[min(self._played, len(self._chunk) - 1) :], spec.chunk)
