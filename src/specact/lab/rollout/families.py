"""The family-specific parts of a rollout: batched inference, the parts of a policy, and the step table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from specact.errors import ConfigError
from specact.families.chunks.pair import ChunkDrafter, ChunkParts, ChunkVerifier, chunk_distance, replaced_after_prefix
from specact.families.chunks.policy import Chunk, ChunkPolicy
from specact.families.codes.pair import CodeDrafter, CodeParts, CodeVerifier, Offset, Rule, take_target
from specact.families.codes.policy import InfersCodes
from specact.families.codes.sampling import verify
from specact.families.distance import head_observation
from specact.families.tokens.pair import Decoding, TokenParts
from specact.families.tokens.policy import Tokens, to_actions
from specact.families.tokens.speculative import TAIL, Decoded
from specact.lab.rollout.methods import Method
from specact.lab.rollout.steps import Audit, CodeAudit, Lessons, Table, code_lessons, distance, observation_columns
from specact.lab.rollout.timed import Prepared
from specact.lab.rollout.token_batch import SharedClock, TokenBatch
from specact.observation import Window
from specact.pair import Drafter, Pair
from specact.rng import Role, StepAddress, streams
from specact.systems.flash import ROUNDS, FlashParts, Round, Rounds
from specact.systems.tokens import DECODINGS
from specact.types import Miss, Proposal, StepRecord
from specact.verification import LocalTarget, Target, Verifier

RULES: dict[str, Rule] = {"speculative": verify, "target": take_target}


class FamilyRollout(Protocol):
    """One method of one pair."""

    def infer(self, windows: Sequence[Window], addresses: Sequence[StepAddress]) -> tuple[Sequence[Any], Sequence[Any]]:
        """The outputs of draft and target for each window, each in one batch."""
        ...

    def drafter(self, prepared: Prepared[Any] | None) -> Drafter:
        """The method's drafter; it proposes prepared outputs, or infers if ``prepared`` is None."""
        ...

    def verifier(self, target: Target[Any]) -> Verifier:
        """The method's verifier."""
        ...

    def audit(self, *, learning: bool = False) -> Audit:
        """An empty step table; with ``learning`` it has the columns of :meth:`lessons`."""
        ...

    def lessons(self, proposals: Sequence[Proposal], drafts: Sequence[Any], targets: Sequence[Any]) -> Table:
        """The training columns, from proposals and the outputs of draft and target for the same windows."""
        ...


@runtime_checkable
class MeasuredRollout(FamilyRollout, Protocol):
    """One whose target's time depends on the draft, so that times have to be measured and not accounted."""

    def measured_verifier(self, clock: SharedClock) -> Verifier:
        """The method's verifier with the pair's target in this process, for one of several robots in lock step.

        Args:
            clock: the robot's.
        """
        ...


def decoded_by(method: Method, pair: Pair[Any]) -> Pair[Any]:
    """The pair as a method decodes it, or as it was loaded where the method does not say.

    Raises:
        ConfigError: for a decoding that the family does not have.
    """
    if isinstance(method.composition, Decoding):
        if not isinstance(pair.parts, TokenParts):
            raise ConfigError(
                f"{pair.name} is no token policy, and only one can be decoded otherwise: {method.about}; choose a "
                "bundle of kind tokens, such as metaworld-tokens, or another method"
            )
        return _composed(pair, method, decoding=method.composition)
    if isinstance(method.composition, Rounds):
        if not isinstance(pair.parts, FlashParts):
            raise ConfigError(
                f"{pair.name} is no flow policy, and only one comes to a chunk otherwise: {method.about}; choose a "
                "bundle of kind flow, such as pusht-flow, or another method"
            )
        return _composed(pair, method, rounds=method.composition)
    return pair


def _composed(pair: Pair[Any], method: Method, **composition: Any) -> Pair[Any]:
    """The pair in a method's composition; its name finds calibrations, that of a family's default is empty."""
    default = method.composition in (DECODINGS["ar"], ROUNDS["full"])
    return pair.composed(source=replace(pair.source, decoding="" if default else method.name), **composition)


def rollout_of(pair: Pair[Any], method: Method, offset: Offset = "target") -> FamilyRollout:
    """The family-specific part of a rollout; families of the user's own use the members of :class:`~specact.pair.Pair`.

    Args:
        pair: decoded as :func:`decoded_by` says.
        method: see :data:`~specact.lab.rollout.methods.METHODS`.
        offset: see :class:`~specact.families.codes.pair.CodeVerifier`.

    Raises:
        ConfigError: for a method or an offset that the family does not have.
    """
    pair = decoded_by(method, pair)
    if isinstance(pair.parts, CodeParts):
        return _CodesRollout(pair, method, offset)
    if method.proposes == "head" or method.needs_codes or method.gate == "learned_action" or offset != "target":
        raise ConfigError(
            f"{pair.name} is no pair of action codes: it has no head that proposes, no codes and no offsets; choose "
            f"among {_choices(pair)}"
        )
    if isinstance(pair.parts, TokenParts) and method.verifier == "speculative":
        return _TokensRollout(pair)
    if isinstance(pair.parts, FlashParts) and method.verifier == "speculative":
        return _FlashRollout(pair)
    if isinstance(pair.parts, ChunkParts):
        return _ChunksRollout(pair, method)
    if method.verifier == "target" or method.needs_head:
        without = "" if isinstance(pair.parts, TokenParts | FlashParts) else " and no learned gate"
        raise ConfigError(f"{pair.name} has one way to verify{without}; choose among {_choices(pair)}")
    return _OwnRollout(pair)


def _choices(pair: Pair[Any]) -> str:
    """The methods that a pair other than one of action codes has."""
    target = "target, target_on_device, " if isinstance(pair.parts, ChunkParts) else ""
    learned = "random_learned, learned, " if isinstance(pair.parts, ChunkParts | TokenParts | FlashParts) else ""
    return f"draft, {target}hybrid, random, {learned}adahi and gates of your own"


def depends_on_content(pair: Pair[Any]) -> bool:
    """Whether the target's time depends on the draft, so that times have to be measured and not accounted."""
    return isinstance(pair.parts, TokenParts | FlashParts)


class _CodesRollout:
    def __init__(self, pair: Pair[Any], method: Method, offset: Offset) -> None:
        self._method, self._offset = method, offset
        self._pair: CodeParts = pair.parts
        self._proposer = method.proposer(pair)

    def infer(self, windows: Sequence[Window], addresses: Sequence[StepAddress]) -> tuple[Sequence[Any], Sequence[Any]]:
        return self._proposer.infer_batch(windows), self._pair.target.infer_batch(windows)

    def drafter(self, prepared: Prepared[Any] | None) -> Drafter:
        policy: InfersCodes = self._proposer if prepared is None else prepared
        return CodeDrafter(policy, self._pair.tokenizer)

    def verifier(self, target: Target[Any]) -> Verifier:
        return CodeVerifier(target, self._pair.tokenizer, RULES[self._method.verifier], offset=self._offset)

    def audit(self, *, learning: bool = False) -> Audit:
        return CodeAudit(self._pair.tokenizer, self.lessons if learning else None)

    def lessons(self, proposals: Sequence[Proposal], drafts: Sequence[Any], targets: Sequence[Any]) -> Table:
        return code_lessons(self._pair.draft.inputs, proposals, drafts, targets)


class _ChunksRollout:
    def __init__(self, pair: Pair[Any], method: Method) -> None:
        self._pair = pair
        self._parts: ChunkParts = pair.parts
        self._tolerance = self._parts.accept_within if method.verifier == "speculative" else 0.0

    def infer(self, windows: Sequence[Window], addresses: Sequence[StepAddress]) -> tuple[Sequence[Any], Sequence[Any]]:
        draft, target = self._parts.draft, self._parts.target
        return self._batch(draft, Role.DRAFT, windows, addresses), self._batch(target, Role.VERIFY, windows, addresses)

    def _batch(
        self, policy: ChunkPolicy, role: Role, windows: Sequence[Window], addresses: Sequence[StepAddress]
    ) -> Sequence[Chunk]:
        seen = [policy.spec.observation.select(window) for window in windows]
        return policy.infer_batch(seen, streams(role, addresses))

    def drafter(self, prepared: Prepared[Any] | None) -> Drafter:
        return (
            self._pair.drafter()
            if prepared is None
            else ChunkDrafter(prepared, self._parts.draft.spec.observation, self._pair.units)
        )

    def verifier(self, target: Target[Any]) -> Verifier:
        return ChunkVerifier(target, self._pair.units, self._pair.execute, self._tolerance)

    def audit(self, *, learning: bool = False) -> Audit:
        return _ChunkAudit(self._pair, self.lessons if learning else None)

    def lessons(self, proposals: Sequence[Proposal], drafts: Sequence[Any], targets: Sequence[Any]) -> Table:
        return distance_lessons(self._pair, proposals, [self._pair.units.from_environment(chunk) for chunk in targets])


class _TokensRollout:
    """The target reads and decodes when it is queried, so that its time is measured."""

    def __init__(self, pair: Pair[Any]) -> None:
        self._pair = pair
        self._parts: TokenParts = pair.parts
        self._batch = TokenBatch(self._parts.target(), pair.units)

    def infer(self, windows: Sequence[Window], addresses: Sequence[StepAddress]) -> tuple[Sequence[Any], Sequence[Any]]:
        """For the audit: the tokens of greedy decoding ``[B, T]``; those that the method decoded greedily are kept."""
        known, policy = self._batch.greedy, self._parts.policy
        missing = [row for row, address in enumerate(addresses) if address not in known]
        if missing:
            seen = [policy.spec.observation.select(windows[row]) for row in missing]
            rngs = streams(Role.VERIFY, [addresses[row] for row in missing])
            decoded = policy.decode(seen, rngs)[0]
            known = known | {addresses[row]: tokens for row, tokens in zip(missing, decoded, strict=True)}
        return [None] * len(windows), [known[address] for address in addresses]

    def drafter(self, prepared: Prepared[Any] | None) -> Drafter:
        return self._pair.drafter()

    def verifier(self, target: Target[Any]) -> Verifier:
        return self._pair.verifier(target)

    def measured_verifier(self, clock: SharedClock) -> Verifier:
        return self._batch.verifier(clock)

    def audit(self, *, learning: bool = False) -> Audit:
        return _TokenAudit(self._pair, self.lessons if learning else None)

    def lessons(self, proposals: Sequence[Proposal], drafts: Sequence[Any], targets: Sequence[Any]) -> Table:
        spec = self._parts.policy.spec
        wanted = [to_actions(tokens).reshape(spec.chunk, spec.actions) for tokens in targets]
        return distance_lessons(self._pair, proposals, wanted)


class _FlashRollout:
    """The target checks or denoises when it is queried, so that its time is measured."""

    def __init__(self, pair: Pair[Any]) -> None:
        self._pair = pair
        self._parts: FlashParts = pair.parts

    def infer(self, windows: Sequence[Window], addresses: Sequence[StepAddress]) -> tuple[Sequence[Any], Sequence[Any]]:
        """For the audit: the chunks of full rounds, ``[B, H, A]``."""
        policy = self._parts.policy
        seen = [policy.spec.observation.select(window) for window in windows]
        return [None] * len(windows), policy.infer_batch(seen, streams(Role.VERIFY, addresses))

    def drafter(self, prepared: Prepared[Any] | None) -> Drafter:
        return self._pair.drafter()

    def verifier(self, target: Target[Any]) -> Verifier:
        return self._pair.verifier(target)

    def measured_verifier(self, clock: SharedClock) -> Verifier:
        return self._pair.verifier(LocalTarget(self._pair.target(), clock))

    def audit(self, *, learning: bool = False) -> Audit:
        return _FlashAudit(self._pair, self.lessons if learning else None)

    def lessons(self, proposals: Sequence[Proposal], drafts: Sequence[Any], targets: Sequence[Any]) -> Table:
        return distance_lessons(self._pair, proposals, [self._pair.units.from_environment(chunk) for chunk in targets])


class _OwnRollout:
    """Uses only the members of :class:`~specact.pair.Pair`, one robot after the other."""

    def __init__(self, pair: Pair[Any]) -> None:
        self._pair, self._target = pair, pair.target()

    def infer(self, windows: Sequence[Window], addresses: Sequence[StepAddress]) -> tuple[Sequence[Any], Sequence[Any]]:
        # The drafter infers when it proposes.
        return [None] * len(windows), [self._target.answer(*step) for step in zip(windows, addresses, strict=True)]

    def drafter(self, prepared: Prepared[Any] | None) -> Drafter:
        return self._pair.drafter()

    def verifier(self, target: Target[Any]) -> Verifier:
        return self._pair.verifier(target)

    def audit(self, *, learning: bool = False) -> Audit:
        return _OwnAudit(self._pair, self.lessons if learning else None)

    def lessons(self, proposals: Sequence[Proposal], drafts: Sequence[Any], targets: Sequence[Any]) -> Table:
        raise ConfigError(
            f"{self._pair.name} is of a family of your own, of which nobody knows what a gate could learn; give it a "
            "gate of your own, MODULE:GATE"
        )


def distance_lessons(pair: Pair[Any], proposals: Sequence[Proposal], targets: Sequence[Chunk]) -> Table:
    """The training columns where actions are compared.

    They are what a head sees, ``drafted``, the executed part of the drafted chunk, ``drafted_distance``, root mean
    square between this part and the target's, mean over its actions, and ``wanted``, the target's chunk, cut to the
    length of the draft's.

    Args:
        pair: the pair.
        proposals: of the draft.
        targets: the target's chunks for the same windows, normalised.
    """
    count = pair.execute
    drafted = np.stack([proposal.actions[:count] for proposal in proposals])
    wanted = np.stack([chunk[: len(proposal.actions)] for chunk, proposal in zip(targets, proposals, strict=True)])
    distances = np.array([chunk_distance(*both) for both in zip(drafted, wanted[:, :count], strict=True)])
    seen = observation_columns(head_observation(pair), [proposal.window for proposal in proposals])
    return seen | {"drafted": drafted, "drafted_distance": distances, "wanted": wanted}


class _OwnAudit(Audit):
    """The step table of a family of the user's own.

    Columns: ``distance``, root mean square between the drafted actions and the verified ones, mean over the executed
    actions of a chunk (normalised units); ``action_change``, mean distance over these actions between the executed and
    the verified ones, 0 where the step was verified. Both are 0 where the target's answer is a miss.
    """

    def __init__(self, pair: Pair[Any], lessons: Lessons | None) -> None:
        super().__init__(lessons)
        self._execute, self._target = pair.execute, Prepared[Any]()
        self._verifier = pair.verifier(LocalTarget(self._target))

    def judge(self, record: StepRecord, draft: Any, target: Any) -> tuple[float, float]:
        """See :class:`~specact.lab.rollout.steps.Audit`."""
        self._target.prepared = target
        outcome = self._verifier.submit(record.proposal, record.address).result()
        if isinstance(outcome, Miss):
            return 0.0, 0.0
        verified = outcome.actions[: self._execute]
        return chunk_distance(record.proposal.actions[: self._execute], verified), _change(record, verified)

    def columns(self, *values: Sequence[Any]) -> Table:
        """See :class:`~specact.lab.rollout.steps.Audit`."""
        return dict(zip(("distance", "action_change"), map(np.array, values), strict=True))


class _ChunkAudit(Audit):
    """The step table of chunk policies.

    Columns: ``distance``, root mean square between the drafted and the target's actions, mean over the executed actions
    of a chunk (normalised units); ``prefix``, number of drafted actions that verification would have accepted;
    ``action_change``, mean distance over these actions between the executed and the verified ones, 0 where the step
    was verified.
    """

    def __init__(self, pair: Pair[Any], lessons: Lessons | None) -> None:
        super().__init__(lessons)
        self._pair = pair

    def judge(self, record: StepRecord, draft: Chunk, target: Chunk) -> tuple[float, int, float]:
        """See :class:`~specact.lab.rollout.steps.Audit`."""
        count = self._pair.execute
        wanted = self._pair.units.from_environment(target)[:count]
        drafted = record.proposal.actions[:count]
        verified, accepted = replaced_after_prefix(drafted, wanted, self._pair.parts.accept_within)
        return chunk_distance(drafted, wanted), accepted, _change(record, verified)

    def columns(self, *values: Sequence[Any]) -> Table:
        """See :class:`~specact.lab.rollout.steps.Audit`."""
        return dict(zip(("distance", "prefix", "action_change"), map(np.array, values), strict=True))


class _TokenAudit(Audit):
    """The step table of token policies.

    Columns: ``distance``, root mean square between executed actions and those of greedy decoding, mean over the chunk
    (normalised units), ``drafted_distance``, the same of the drafted ones, and ``action_change``, the same as mean
    distance where the step was not verified; ``greedy``, whether all tokens are those of greedy decoding; ``passes`` of
    the target's decoder, that over the prefix included, and ``read``, tokens they read after it; ``accepted``, number
    of accepted drafted tokens; ``rejected``, index of the first rejected one, T if none was; ``compensated``, tokens
    from a tail; ``tolerance`` [bins]; ``tail_i``, the tail's error in dimension i, mean over its tokens (normalised
    units), NaN without a tail. For steps that were not verified, all but the first four are 0.
    """

    def __init__(self, pair: Pair[Any], lessons: Lessons | None) -> None:
        super().__init__(lessons)
        self._pair = pair

    def judge(self, record: StepRecord, draft: None, target: Tokens) -> tuple[Any, ...]:
        """See :class:`~specact.lab.rollout.steps.Audit`."""
        spec = self._pair.parts.policy.spec
        wanted = to_actions(target).reshape(spec.chunk, spec.actions)
        errors_rms = [chunk_distance(actions, wanted) for actions in (record.actions, record.proposal.actions)]
        count = spec.actions
        if record.outcome is None:
            no_tail = np.full(count, np.nan, np.float32)
            return *errors_rms, distance(wanted, record.actions), False, 0, 0, 0, 0, 0, 0, no_tail
        outcome: Decoded = record.outcome.evidence
        tail = (outcome.sources == TAIL).reshape(spec.chunk, count)
        error = np.abs(to_actions(outcome.tokens).reshape(tail.shape) - wanted)
        with np.errstate(invalid="ignore"):
            errors = np.where(tail, error, 0.0).sum(0) / np.where(tail.any(0), tail.sum(0), np.nan)
        return (
            *errors_rms, 0.0, bool((outcome.tokens == target).all()), 1 + len(outcome.accepted), sum(outcome.read),
            sum(outcome.accepted), outcome.rejected, int(tail.sum()), record.proposal.evidence.request.rule.each.max(),
            errors.astype(np.float32),
        )  # fmt: skip

    def columns(self, *values: Sequence[Any]) -> Table:
        """See :class:`~specact.lab.rollout.steps.Audit`."""
        names = (
            "distance", "drafted_distance", "action_change", "greedy", "passes", "read", "accepted", "rejected",
            "compensated", "tolerance",
        )  # fmt: skip
        tail = np.stack(values[-1])
        return dict(zip(names, map(np.array, values[:-1]), strict=True)) | {
            f"tail_{dimension}": tail[:, dimension] for dimension in range(tail.shape[1])
        }


class _FlashAudit(Audit):
    """The step table of flow policies.

    Columns: ``distance``, root mean square between executed actions and those of a full round from the same noise, mean
    over the executed actions of the chunk (normalised units), ``drafted_distance``, the same of the drafted ones, and
    ``action_change``, the same as mean distance where the step was not verified; ``full``, whether the round ended as a
    full one; ``checked``, whether a drafted chunk was checked; ``accepted``, number of accepted drafted actions;
    ``actions``, number of executed ones; ``deviation``, the check's largest one of the first action, NaN without a
    check; ``reused``, the reused share of the cameras' tokens.
    """

    def __init__(self, pair: Pair[Any], lessons: Lessons | None) -> None:
        super().__init__(lessons)
        self._pair = pair

    def judge(self, record: StepRecord, draft: None, target: Chunk) -> tuple[Any, ...]:
        """See :class:`~specact.lab.rollout.steps.Audit`."""
        executed, drafted = (chunk[: self._pair.execute] for chunk in (record.actions, record.proposal.actions))
        # Fewer are executed where a prefix was accepted.
        wanted, count = self._pair.units.from_environment(target)[: len(drafted)], len(executed)
        errors_rms = chunk_distance(executed, wanted[:count]), chunk_distance(drafted, wanted)
        if record.outcome is None:
            return *errors_rms, distance(wanted, executed), False, False, 0, count, np.nan, 0.0
        outcome: Round = record.outcome.evidence
        deviation = float(outcome.deviation[:, 0].max()) if outcome.deviation.size else np.nan
        parts = record.proposal.evidence.parts
        share = 0.0 if parts is None else parts.share
        return *errors_rms, 0.0, outcome.full, outcome.checked, outcome.accepted, count, deviation, share

    def columns(self, *values: Sequence[Any]) -> Table:
        """See :class:`~specact.lab.rollout.steps.Audit`."""
        names = (
            "distance", "drafted_distance", "action_change", "full", "checked", "accepted", "actions", "deviation",
            "reused",
        )  # fmt: skip
        return dict(zip(names, map(np.array, values), strict=True))


def _change(record: StepRecord, verified: Chunk) -> float:
    """Distance of the executed to the verified actions ``[n, A]``; 0 where the step was verified."""
    return 0.0 if record.outcome is not None else distance(verified, record.actions[: len(verified)])
