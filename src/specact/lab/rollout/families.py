"""What differs between families in a rollout: batched inference, the parts of a policy, and the step table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from specact.errors import ConfigError
from specact.families.chunks.pair import ChunkDrafter, ChunkPair, ChunkVerifier, chunk_distance, replaced_after_prefix
from specact.families.chunks.policy import Chunk, ChunkPolicy
from specact.families.codes.bundle import Bundle
from specact.families.codes.spec import InfersCodes
from specact.families.codes.verify import CodeDrafter, Offset, SpeculativeVerifier, TargetSampler
from specact.families.flash.pair import FlashPair
from specact.families.flash.rounds import ROUNDS, Rounds, load_rounds
from specact.families.flash.verify import Round
from specact.families.load import AnyPair
from specact.families.tokens.bins import to_actions
from specact.families.tokens.decoding import DECODINGS, Decoding, load_decoding
from specact.families.tokens.network import Tokens
from specact.families.tokens.pair import TokenPair
from specact.families.tokens.speculative import TAIL, Decoded
from specact.lab.rollout.methods import Method
from specact.lab.rollout.steps import Audit, CodeAudit, Lessons, Table, code_lessons, distance, seen_by
from specact.lab.rollout.timed import Prepared
from specact.observation import Window
from specact.pair import Drafter
from specact.rng import Role, StepAddress, streams
from specact.types import Miss, StepRecord
from specact.verification import LocalTarget, Target, Verifier

VERIFIERS: dict[str, type[SpeculativeVerifier | TargetSampler]] = {
    "speculative": SpeculativeVerifier,
    "target": TargetSampler,
}


class FamilyRollout(Protocol):
    """One method of one pair."""

    def infer(self, windows: Sequence[Window], addresses: Sequence[StepAddress]) -> tuple[Sequence[Any], Sequence[Any]]:
        """What draft and target say of each window, each in one batch."""
        ...

    def drafter(self, prepared: Prepared[Any] | None) -> Drafter:
        """Proposes what is prepared, or, without that, infers."""
        ...

    def verifier(self, target: Target[Any]) -> Verifier:
        """The method's."""
        ...

    def audit(self, *, learning: bool = False) -> Audit:
        """An empty step table; for learning with the columns of :meth:`lessons`."""
        ...

    def lessons(self, windows: Sequence[Window], drafts: Sequence[Any], targets: Sequence[Any]) -> Table:
        """Of what draft and target say of these windows, the columns that one learns from."""
        ...


def rollout_of(pair: AnyPair, method: Method, offset: Offset = "target", decoding: str = "") -> FamilyRollout:
    """The half of a rollout that a pair's family decides; a family of the user's own does it with a pair's members.

    Raises:
        ConfigError: for a method or an offset that the family does not have.
    """
    if method.decoding in DECODINGS and not isinstance(pair, TokenPair):
        raise ConfigError(
            f"{pair.name} is no token policy, and only one can be decoded otherwise: {method.about}; choose a bundle "
            "of kind tokens, such as metaworld-tokens, or another method"
        )
    if method.decoding in ROUNDS and not isinstance(pair, FlashPair):
        raise ConfigError(
            f"{pair.name} is no flow policy, and only one comes to a chunk otherwise: {method.about}; choose a bundle "
            "of kind flow, such as pusht-flow, or another method"
        )
    if isinstance(pair, Bundle):
        return _CodesRollout(pair, method, offset)
    if method.proposes == "head" or method.needs_codes or method.gate == "learned_action" or offset != "target":
        raise ConfigError(
            f"{pair.name} is no pair of action codes: it has no head that proposes, no codes and no offsets; choose "
            "among draft, target, target_on_device, hybrid, random, plain_random, random_learned, adahi, gated_target "
            "and learned"
        )
    if isinstance(pair, TokenPair) and method.gate != "learned" and method.verifier == "speculative":
        return _TokensRollout(pair, load_decoding(method.decoding or decoding or "ar"))
    if isinstance(pair, FlashPair) and method.gate != "learned" and method.verifier == "speculative":
        return _FlashRollout(pair, load_rounds(method.decoding or decoding or "full"))
    if isinstance(pair, ChunkPair):
        return _ChunksRollout(pair, method)
    if method.verifier == "target" or method.needs_head:
        raise ConfigError(
            f"{pair.name} has one way to verify and no learned gate; choose among draft, hybrid, random, plain_random, "
            "adahi and gates of your own"
        )
    return _OwnRollout(pair)


def depends_on_content(pair: AnyPair) -> bool:
    """Whether what the target takes depends on what was drafted, so that times are measured and not accounted."""
    return isinstance(pair, TokenPair | FlashPair)


class _CodesRollout:
    def __init__(self, pair: Bundle, method: Method, offset: Offset) -> None:
        self._pair, self._method, self._offset = pair, method, offset
        self._proposer = method.proposer(pair)

    def infer(self, windows: Sequence[Window], addresses: Sequence[StepAddress]) -> tuple[Sequence[Any], Sequence[Any]]:
        return self._proposer.infer_batch(windows), self._pair.target.infer_batch(windows)

    def drafter(self, prepared: Prepared[Any] | None) -> Drafter:
        policy: InfersCodes = self._proposer if prepared is None else prepared
        return CodeDrafter(policy, self._pair.tokenizer)

    def verifier(self, target: Target[Any]) -> Verifier:
        return VERIFIERS[self._method.verifier](target, self._pair.tokenizer, offset=self._offset)

    def audit(self, *, learning: bool = False) -> Audit:
        return CodeAudit(self._pair.tokenizer, self.lessons if learning else None)

    def lessons(self, windows: Sequence[Window], drafts: Sequence[Any], targets: Sequence[Any]) -> Table:
        return code_lessons(self._pair.draft.inputs, windows, drafts, targets)


class _ChunksRollout:
    def __init__(self, pair: ChunkPair, method: Method) -> None:
        self._pair = pair
        self._within = pair.accept_within if method.verifier == "speculative" else 0.0

    def infer(self, windows: Sequence[Window], addresses: Sequence[StepAddress]) -> tuple[Sequence[Any], Sequence[Any]]:
        draft, target = self._pair.draft, self._pair.target_policy
        return self._batch(draft, Role.DRAFT, windows, addresses), self._batch(target, Role.VERIFY, windows, addresses)

    def _batch(
        self, policy: ChunkPolicy, role: Role, windows: Sequence[Window], addresses: Sequence[StepAddress]
    ) -> Sequence[Chunk]:
        seen = [policy.spec.observation.select(window) for window in windows]
        return policy.infer_batch(seen, streams(role, addresses))

    def drafter(self, prepared: Prepared[Any] | None) -> Drafter:
        return (
            self._pair.drafter
            if prepared is None
            else ChunkDrafter(prepared, self._pair.draft.spec.observation, self._pair.units)
        )

    def verifier(self, target: Target[Any]) -> Verifier:
        return ChunkVerifier(target, self._pair.units, self._pair.execute, self._within)

    def audit(self, *, learning: bool = False) -> Audit:
        return _ChunkAudit(self._pair, self.lessons if learning else None)

    def lessons(self, windows: Sequence[Window], drafts: Sequence[Any], targets: Sequence[Any]) -> Table:
        return chunk_lessons(self._pair, windows, drafts, targets)


class _TokensRollout:
    """The target reads and decodes when it is asked, so that what that takes is measured."""

    def __init__(self, pair: TokenPair, decoding: Decoding) -> None:
        self._pair, self._decoding = pair, decoding

    def infer(self, windows: Sequence[Window], addresses: Sequence[StepAddress]) -> tuple[Sequence[Any], Sequence[Any]]:
        """For the audit: the tokens of greedy decoding ``[B, T]``."""
        seen = [self._pair.policy.spec.observation.select(window) for window in windows]
        return [None] * len(windows), list(self._pair.policy.decode(seen, streams(Role.VERIFY, addresses))[0])

    def drafter(self, prepared: Prepared[Any] | None) -> Drafter:
        return self._pair.drafter_of(self._decoding)

    def verifier(self, target: Target[Any]) -> Verifier:
        return self._pair.verifier(target)

    def audit(self, *, learning: bool = False) -> Audit:
        return _TokenAudit(self._pair, self.lessons if learning else None)

    def lessons(self, windows: Sequence[Window], drafts: Sequence[Any], targets: Sequence[Any]) -> Table:
        raise ConfigError(
            f"no gate learns from {self._pair.name} yet; make a pair of chunk policies of it: specact pair"
        )


class _FlashRollout:
    """The target checks or denoises when it is asked, so that what that takes is measured."""

    def __init__(self, pair: FlashPair, rounds: Rounds) -> None:
        self._pair, self._rounds = pair, rounds

    def infer(self, windows: Sequence[Window], addresses: Sequence[StepAddress]) -> tuple[Sequence[Any], Sequence[Any]]:
        """For the audit: the chunks of full rounds, ``[B, H, A]``."""
        policy = self._pair.policy
        seen = [policy.spec.observation.select(window) for window in windows]
        return [None] * len(windows), policy.infer_batch(seen, streams(Role.VERIFY, addresses))

    def drafter(self, prepared: Prepared[Any] | None) -> Drafter:
        return self._pair.drafter_of(self._rounds)

    def verifier(self, target: Target[Any]) -> Verifier:
        return self._pair.verifier(target)

    def audit(self, *, learning: bool = False) -> Audit:
        return _FlashAudit(self._pair, self.lessons if learning else None)

    def lessons(self, windows: Sequence[Window], drafts: Sequence[Any], targets: Sequence[Any]) -> Table:
        raise ConfigError(
            f"no gate learns from {self._pair.name} yet; make a pair of chunk policies of it: specact pair"
        )


class _OwnRollout:
    """By what every :class:`~specact.pair.Pair` has, one robot after the other."""

    def __init__(self, pair: AnyPair) -> None:
        self._pair, self._target = pair, pair.target

    def infer(self, windows: Sequence[Window], addresses: Sequence[StepAddress]) -> tuple[Sequence[Any], Sequence[Any]]:
        # The drafter proposes when it is asked.
        return [None] * len(windows), [self._target.answer(*step) for step in zip(windows, addresses, strict=True)]

    def drafter(self, prepared: Prepared[Any] | None) -> Drafter:
        return self._pair.drafter

    def verifier(self, target: Target[Any]) -> Verifier:
        return self._pair.verifier(target)

    def audit(self, *, learning: bool = False) -> Audit:
        return _OwnAudit(self._pair, self.lessons if learning else None)

    def lessons(self, windows: Sequence[Window], drafts: Sequence[Any], targets: Sequence[Any]) -> Table:
        raise ConfigError(
            f"{self._pair.name} is of a family of your own, of which nobody knows what a gate could learn; give it a "
            "gate of your own, MODULE:GATE"
        )


def chunk_lessons(
    pair: ChunkPair, windows: Sequence[Window], drafts: Sequence[Chunk], targets: Sequence[Chunk]
) -> Table:
    """The columns that one learns from.

    They are what the draft saw but camera frames, ``drafted``, the drafted actions that are executed of a chunk,
    ``distance``, see :class:`_ChunkAudit`, and ``wanted``, the target's chunk, as long as the draft's at most.
    """
    count, units, most = pair.execute, pair.units, pair.draft.spec.chunk
    drafted = np.stack([units.from_environment(chunk)[:count] for chunk in drafts])
    wanted = np.stack([units.from_environment(chunk)[:most] for chunk in targets])
    distance = np.array([chunk_distance(*both) for both in zip(drafted, wanted[:, :count], strict=True)])
    seen = seen_by(pair.draft.spec.observation.vectors, windows)
    return seen | {"drafted": drafted, "distance": distance, "wanted": wanted}


class _OwnAudit(Audit):
    """Of a family of the user's own.

    Columns: ``distance``, root mean square between the drafted actions and those that verification gives, mean over the
    actions that are executed of a chunk (normalised units); ``action_change``, mean distance over these actions between
    what was executed and what verification would have given, 0 where it was verified. Both are 0 where the target's
    answer is none to act on.
    """

    def __init__(self, pair: AnyPair, lessons: Lessons | None) -> None:
        super().__init__(lessons)
        self._execute, self._target = pair.execute, Prepared[Any]()
        self._verifier = pair.verifier(LocalTarget(self._target))

    def judge(self, record: StepRecord, draft: Any, target: Any) -> tuple[float, float]:
        """See :class:`~specact.lab.rollout.steps.Audit`."""
        self._target.prepared = target
        found = self._verifier.submit(record.proposal, record.address).result()
        if isinstance(found, Miss):
            return 0.0, 0.0
        verified = found.actions[: self._execute]
        return chunk_distance(record.proposal.actions[: self._execute], verified), _change(record, verified)

    def columns(self, *kept: Sequence[Any]) -> Table:
        """See :class:`~specact.lab.rollout.steps.Audit`."""
        return dict(zip(("distance", "action_change"), map(np.array, kept), strict=True))


class _ChunkAudit(Audit):
    """Of chunk policies.

    Columns: ``distance``, root mean square between the drafted and the target's actions, mean over the actions that are
    executed of a chunk (normalised units); ``prefix``, how many drafted actions verification would have accepted;
    ``action_change``, mean distance over these actions between what was executed and what verification would have
    given, 0 where it was verified.
    """

    def __init__(self, pair: ChunkPair, lessons: Lessons | None) -> None:
        super().__init__(lessons)
        self._pair = pair

    def judge(self, record: StepRecord, draft: Chunk, target: Chunk) -> tuple[float, int, float]:
        """See :class:`~specact.lab.rollout.steps.Audit`."""
        count = self._pair.execute
        wanted = self._pair.units.from_environment(target)[:count]
        drafted = record.proposal.actions[:count]
        verified, accepted = replaced_after_prefix(drafted, wanted, self._pair.accept_within)
        return chunk_distance(drafted, wanted), accepted, _change(record, verified)

    def columns(self, *kept: Sequence[Any]) -> Table:
        """See :class:`~specact.lab.rollout.steps.Audit`."""
        return dict(zip(("distance", "prefix", "action_change"), map(np.array, kept), strict=True))


class _TokenAudit(Audit):
    """Of token policies.

    Columns: ``distance``, root mean square between executed actions and those of greedy decoding, mean over the chunk
    (normalised units), and ``action_change``, the same as mean distance where the step was not verified; ``greedy``,
    whether all tokens are those of greedy decoding; ``passes`` of the target's decoder, that over the prefix included,
    and ``read``, tokens they read after it; ``accepted``, drafted tokens that were accepted; ``rejected``, place of the
    first that was not, T where none was; ``compensated``, tokens from a tail; ``tolerance`` [bins]; ``tail_i``, the
    tail's error in dimension i, mean over its tokens (normalised units), NaN where there is none. Of steps that were
    not verified, all but the first three are 0.
    """

    def __init__(self, pair: TokenPair, lessons: Lessons | None) -> None:
        super().__init__(lessons)
        self._pair = pair

    def judge(self, record: StepRecord, draft: None, target: Tokens) -> tuple[Any, ...]:
        """See :class:`~specact.lab.rollout.steps.Audit`."""
        spec = self._pair.policy.spec
        wanted = to_actions(target).reshape(spec.chunk, spec.actions)
        away, count = chunk_distance(record.actions, wanted), spec.actions
        if record.outcome is None:
            nothing = np.full(count, np.nan, np.float32)
            return away, distance(wanted, record.actions), False, 0, 0, 0, 0, 0, 0, nothing
        found: Decoded = record.outcome.evidence
        tail = (found.sources == TAIL).reshape(spec.chunk, count)
        error = np.abs(to_actions(found.tokens).reshape(tail.shape) - wanted)
        with np.errstate(invalid="ignore"):
            errors = np.where(tail, error, 0.0).sum(0) / np.where(tail.any(0), tail.sum(0), np.nan)
        return (
            away, 0.0, bool((found.tokens == target).all()), 1 + len(found.accepted), sum(found.read),
            sum(found.accepted), found.rejected, int(tail.sum()), record.proposal.evidence.question.rule.each.max(),
            errors.astype(np.float32),
        )  # fmt: skip

    def columns(self, *kept: Sequence[Any]) -> Table:
        """See :class:`~specact.lab.rollout.steps.Audit`."""
        names = (
            "distance", "action_change", "greedy", "passes", "read", "accepted", "rejected", "compensated", "tolerance",
        )  # fmt: skip
        tail = np.stack(kept[-1])
        return dict(zip(names, map(np.array, kept[:-1]), strict=True)) | {
            f"tail_{dimension}": tail[:, dimension] for dimension in range(tail.shape[1])
        }


class _FlashAudit(Audit):
    """Of flow policies.

    Columns: ``distance``, root mean square between executed actions and those of a full round from the same noise, mean
    over the executed actions of the chunk (normalised units), and ``action_change``, the same as mean distance where
    the step was not verified; ``full``, whether the round ended as a full one; ``checked``, whether a drafted chunk was
    checked; ``accepted``, drafted actions that were; ``actions`` that the round gave the robot; ``deviation``, the
    largest of the check over the first action, NaN without one; ``reused``, the share of the cameras' tokens that were.
    """

    def __init__(self, pair: FlashPair, lessons: Lessons | None) -> None:
        super().__init__(lessons)
        self._pair = pair

    def judge(self, record: StepRecord, draft: None, target: Chunk) -> tuple[Any, ...]:
        """See :class:`~specact.lab.rollout.steps.Audit`."""
        executed = record.actions[: self._pair.execute]
        wanted = self._pair.units.from_environment(target)[: len(executed)]
        away, count = chunk_distance(executed, wanted), len(executed)
        if record.outcome is None:
            return away, distance(wanted, executed), False, False, 0, count, np.nan, 0.0
        found: Round = record.outcome.evidence
        worst = float(found.deviation[:, 0].max()) if found.deviation.size else np.nan
        parts = record.proposal.evidence.question.parts
        share = 0.0 if parts is None else parts.share
        return away, 0.0, found.full, found.checked, found.accepted, count, worst, share

    def columns(self, *kept: Sequence[Any]) -> Table:
        """See :class:`~specact.lab.rollout.steps.Audit`."""
        names = ("distance", "action_change", "full", "checked", "accepted", "actions", "deviation", "reused")
        return dict(zip(names, map(np.array, kept), strict=True))


def _change(record: StepRecord, verified: Chunk) -> float:
    """What leaving out verification changed of the actions ``[n, A]``; 0 where it was not left out."""
    return 0.0 if record.outcome is not None else distance(verified, record.actions[: len(verified)])
