"""Rollouts of each family: batched inference, drafter and verifier, times, and the step table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError
from specact.families.chunks.pair import ChunkDrafter, ChunkParts, ChunkVerifier, chunk_distance, replaced_after_prefix
from specact.families.chunks.policy import Chunk, ChunkPolicy
from specact.families.codes.pair import CodeParts
from specact.families.codes.policy import CodeDrafter, CodeVerifier, executed_codes, take_target
from specact.families.codes.sampling import CodeDistribution, rejection_probability, total_variation, verify
from specact.families.tokens.pair import Decoding, TokenParts
from specact.families.tokens.policy import to_actions
from specact.families.tokens.speculative import TAIL, Decoded, Tokens
from specact.gates.gate import Gate
from specact.gates.learned import DistanceHead, TargetHead, head_observation
from specact.lab.rollout.methods import Method
from specact.lab.rollout.steps import Row, Table, distance, observation_columns, stacked
from specact.lab.rollout.timed import BatchVerifier, Prepared, SharedClock, TokenBatch
from specact.observation import Window
from specact.pair import Drafter, LocalTarget, Pair, Target, TargetPolicy, Verifier
from specact.policy import SpeculativePolicy
from specact.rng import Role, StepAddress, StepStreams, streams
from specact.systems.flash import Round
from specact.systems.flow import FULL, FlowParts
from specact.systems.tokens import DECODINGS
from specact.types import Miss, Proposal, StepRecord


class FamilyRollout:
    """The rollout of one method of one pair; this base class serves families of the user's own, by the pair alone.

    The step table has ``distance``, root mean square between drafted and verified actions, mean over a chunk's executed
    actions (normalised units), and ``action_change``, mean distance over these between executed and verified ones, 0
    where the step was verified. Both are 0 where the target's answer is a miss.
    ``measured`` is whether the target's time depends on the draft, so that times are measured and not accounted;
    ``can_take_target`` whether its own answers can replace the verdict; ``has_lessons`` whether a gate can be trained.
    """

    measured: ClassVar[bool] = False
    can_take_target: ClassVar[bool] = False
    has_lessons: ClassVar[bool] = False

    def __init__(self, pair: Pair[Any], method: Method) -> None:
        self.pair, self.method = pair, method

    def infer(self, windows: Sequence[Window], addresses: Sequence[StepAddress]) -> tuple[Sequence[Any], Sequence[Any]]:
        """The outputs of draft and target for each window, each in one batch; None of a draft that infers later."""
        answers = [self._target.answer(*step) for step in zip(windows, addresses, strict=True)]
        return [None] * len(windows), answers

    @cached_property
    def _target(self) -> TargetPolicy[Any]:
        return self.pair.target()

    @cached_property
    def _judging(self) -> tuple[Prepared[Any], Verifier]:
        """A slot for an answer of the target, and a verifier that reads it."""
        answer = Prepared[Any]()
        return answer, self.pair.verifier(LocalTarget(answer))

    def drafter(self, prepared: Prepared[Any] | None = None) -> Drafter:
        """The method's drafter; it proposes prepared outputs, or infers if ``prepared`` is None."""
        return self.pair.drafter()

    def verifier(self, target: Target[Any]) -> Verifier:
        """The method's verifier."""
        return self.pair.verifier(target)

    def policy(self, gate: Gate, seed: int) -> SpeculativePolicy:
        """The method of one robot, with the pair's target in this process."""
        verifier = self.verifier(LocalTarget(self.pair.target()))
        return SpeculativePolicy(self.pair, gate, drafter=self.drafter(), verifier=verifier, seed=seed)

    def measured_verifier(self, clock: SharedClock) -> Verifier:
        """The verifier of one of several robots in lock step, with the pair's target in this process and its clock."""
        return self.pair.verifier(LocalTarget(self.pair.target(), clock))

    def judge(self, record: StepRecord, draft: Any, target: Any) -> Row:
        """The family's figures of one inference, given the outputs of draft and target."""
        answer, verifier = self._judging
        answer.prepared = target
        outcome = verifier.submit(record.proposal, record.address).result()
        if isinstance(outcome, Miss):
            return {"distance": 0.0, "action_change": 0.0}
        verified = outcome.actions[: self.pair.execute]
        drafted = record.proposal.actions[: self.pair.execute]
        return {"distance": chunk_distance(drafted, verified), "action_change": _change(record, verified)}

    def columns(self, rows: Sequence[Row]) -> Table:
        """The family's columns of the step table, from the results of :meth:`judge`."""
        return stacked(rows)

    def wanted(self, targets: Sequence[Any]) -> Sequence[Chunk]:
        """The target's chunks from its outputs, here chunks in the environment's units, normalised."""
        return [self.pair.units.from_environment(chunk) for chunk in targets]

    def lessons(self, proposals: Sequence[Proposal], drafts: Sequence[Any], targets: Sequence[Any]) -> Table:
        """The training columns, from proposals and the outputs of draft and target for the same windows.

        They are what a head sees, ``drafted``, the executed part of the drafted chunk, ``drafted_distance``, that of
        the target's part from it, and ``wanted``, the target's chunk, cut to the length of the draft's. A family of the
        user's own has none: :exc:`ConfigError`.
        """
        if not self.has_lessons:
            raise ConfigError(
                f"{self.pair.name} is of a family of your own, of which nobody knows what a gate could learn; give it "
                "a gate of your own, MODULE:GATE"
            )
        count, chunks = self.pair.execute, self.wanted(targets)
        drafted = np.stack([proposal.actions[:count] for proposal in proposals])
        wanted = np.stack([chunk[: len(proposal.actions)] for chunk, proposal in zip(chunks, proposals, strict=True)])
        distances = np.array([chunk_distance(*both) for both in zip(drafted, wanted[:, :count], strict=True)])
        seen = observation_columns(head_observation(self.pair), [proposal.window for proposal in proposals])
        return seen | {"drafted": drafted, "drafted_distance": distances, "wanted": wanted}

    def call(self, part: Literal["draft", "target", "head"]) -> Callable[[], object]:
        """A part of an inference on an observation of zeros, to be timed; of the target all that a proposal takes.

        A target that is only on a server is a :exc:`BundleError`, a head that is not there a :exc:`ConfigError`.
        """
        window, rng = self.pair.observation.zeros(), np.random.default_rng(0)
        if part == "head":
            drafted = np.zeros((self.pair.execute, len(self.pair.units.centre)), np.float32)
            head = DistanceHead.of(self.pair)
            return lambda: head.estimate(window, drafted)
        drafter = self.pair.drafter()
        if part == "draft":
            return lambda: drafter.propose(window, rng)
        proposal, verifier = drafter.propose(window, rng), self.pair.verifier(LocalTarget(self.pair.target()))
        return lambda: verifier.submit(proposal, StepAddress(0, 0, 0, 0)).result()


class CodesRollout(FamilyRollout):
    """The rollout of a pair of action codes.

    Columns: ``drafted_k`` and ``executed_k``, codes; ``rejection_k``, ``r_k(z_k)``, ``rejection``, ``R(z)``;
    ``accepted_k`` (as executed; true on unverified steps); ``tv_k``, total variation of the two distributions;
    ``draft_entropy`` and ``target_entropy``, summed over codebooks [nats]; ``action_change``, mean distance over the
    chunk between the executed action and the verified one, with the step's own random stream, 0 where it was verified
    (normalised units). Training columns: the learner's observations, ``draft_probs`` and ``target_probs`` ``[G, K]``,
    and ``target_offsets`` ``[G, K, n, A]`` as float16.
    """

    can_take_target = has_lessons = True

    def __init__(self, pair: Pair[Any], method: Method) -> None:
        super().__init__(pair, method)
        self._parts: CodeParts = pair.parts
        self._proposer, self._streams = method.proposer(pair), StepStreams()

    def infer(self, windows: Sequence[Window], addresses: Sequence[StepAddress]) -> tuple[Sequence[Any], Sequence[Any]]:
        return self._proposer.infer_batch(windows), self._parts.target.infer_batch(windows)

    def drafter(self, prepared: Prepared[Any] | None = None) -> Drafter:
        return CodeDrafter(self._proposer if prepared is None else prepared, self._parts.tokenizer)

    def verifier(self, target: Target[Any]) -> Verifier:
        rule = verify if self.method.verifier == "speculative" else take_target
        return CodeVerifier(target, self._parts.tokenizer, rule)

    def judge(self, record: StepRecord, draft: CodeDistribution, target: CodeDistribution) -> Row:
        codes, outcome, change = record.proposal.evidence.codes, record.outcome, 0.0
        accepted = np.ones(len(codes), bool) if outcome is None else outcome.evidence.accepted
        if outcome is None:
            verdict = verify(target, draft, codes, self._streams(Role.VERIFY, record.address))
            change = distance(self._parts.tokenizer.decode(verdict.codes, target.offsets), record.actions)
        q, p = draft.rows_given(codes), target.rows_given(codes)
        return {
            "drafted": codes, "executed": executed_codes(record), "q": q, "p": p, "accepted": accepted,
            "action_change": change,
        }  # fmt: skip

    def columns(self, rows: Sequence[Row]) -> Table:
        values = stacked(rows)
        rejection = rejection_probability(values["p"], values["q"], values["drafted"])
        columns: Table = {
            "rejection": 1.0 - np.prod(1.0 - rejection, axis=-1),
            "draft_entropy": _entropy(values["q"]),
            "target_entropy": _entropy(values["p"]),
            "action_change": values["action_change"],
        }
        by_codebook: Table = {
            "drafted": values["drafted"].astype(np.int16), "executed": values["executed"].astype(np.int16),
            "rejection": rejection, "accepted": values["accepted"], "tv": total_variation(values["p"], values["q"]),
        }  # fmt: skip
        for k in range(rejection.shape[1]):
            columns |= {f"{name}_{k}": column[:, k] for name, column in by_codebook.items()}
        return columns

    def lessons(
        self, proposals: Sequence[Proposal], drafts: Sequence[CodeDistribution], targets: Sequence[CodeDistribution]
    ) -> Table:
        return {
            **observation_columns(self._parts.draft.inputs, [proposal.window for proposal in proposals]),
            "draft_probs": np.stack([draft.probs for draft in drafts]).astype(np.float32),
            "target_probs": np.stack([target.probs for target in targets]).astype(np.float32),
            "target_offsets": np.stack([target.offsets for target in targets]).astype(np.float16),
        }

    def call(self, part: Literal["draft", "target", "head"]) -> Callable[[], object]:
        window, draft = self.pair.observation.zeros(), self._parts.draft
        if part == "head":
            head, drafted = TargetHead.of(self.pair), draft.infer(window)
            return lambda: head.estimate(window, drafted)
        policy = draft if part == "draft" else self._parts.target
        return lambda: policy.infer(window)


class ChunksRollout(FamilyRollout):
    """The rollout of a pair of chunk policies.

    Columns: ``distance`` and ``action_change`` as of :class:`FamilyRollout`, the first to the target's actions;
    ``prefix``, number of drafted actions that verification would have accepted.
    """

    can_take_target = has_lessons = True

    def infer(self, windows: Sequence[Window], addresses: Sequence[StepAddress]) -> tuple[Sequence[Any], Sequence[Any]]:
        draft, target = self.pair.parts.draft, self.pair.parts.target
        return _batch(draft, Role.DRAFT, windows, addresses), _batch(target, Role.VERIFY, windows, addresses)

    def drafter(self, prepared: Prepared[Any] | None = None) -> Drafter:
        if prepared is None:
            return self.pair.drafter()
        return ChunkDrafter(prepared.infer, self.pair.parts.draft.spec.observation, self.pair.units)

    def verifier(self, target: Target[Any]) -> Verifier:
        tolerance = self.pair.parts.spec.accept_within if self.method.verifier == "speculative" else 0.0
        return ChunkVerifier(target, self.pair.units, self.pair.execute, tolerance)

    def judge(self, record: StepRecord, draft: Chunk, target: Chunk) -> Row:
        count = self.pair.execute
        wanted, drafted = self.pair.units.from_environment(target)[:count], record.proposal.actions[:count]
        verified, accepted = replaced_after_prefix(drafted, wanted, self.pair.parts.spec.accept_within)
        change = _change(record, verified)
        return {"distance": chunk_distance(drafted, wanted), "prefix": accepted, "action_change": change}


class TokensRollout(FamilyRollout):
    """The rollout of a token policy, whose target reads and decodes when it is queried.

    Columns: ``distance`` of the executed actions and ``drafted_distance`` of the drafted ones to greedy decoding's;
    ``action_change``; ``greedy``, whether all tokens are those of greedy decoding; ``passes`` of the target's decoder,
    that over the prefix included, and ``read``, tokens they read after it; ``accepted`` drafted tokens; ``rejected``,
    index of the first rejected one, T if none was; ``compensated``, tokens from a tail; ``tolerance`` [bins];
    ``tail_i``, the tail's error in dimension i, mean over its tokens (normalised units), NaN without a tail. For steps
    that were not verified, all but the first four are 0.
    """

    measured = has_lessons = True

    def __init__(self, pair: Pair[Any], method: Method) -> None:
        super().__init__(pair, method)
        self._parts: TokenParts = pair.parts
        self._batch = TokenBatch(self._parts)

    def infer(self, windows: Sequence[Window], addresses: Sequence[StepAddress]) -> tuple[Sequence[Any], Sequence[Any]]:
        # The tokens of greedy decoding [B, T]; those that the method decoded greedily are kept.
        known, policy = self._batch.greedy, self._parts.policy
        missing = [row for row, address in enumerate(addresses) if address not in known]
        if missing:
            decoded = zip(missing, policy.decode([windows[row] for row in missing]), strict=True)
            known = known | {addresses[row]: greedy.tokens for row, greedy in decoded}
        return [None] * len(windows), [known[address] for address in addresses]

    def measured_verifier(self, clock: SharedClock) -> Verifier:
        return BatchVerifier(self._batch, clock)

    def judge(self, record: StepRecord, draft: None, target: Tokens) -> Row:
        (wanted,) = self.wanted([target])
        row: Row = {
            "distance": chunk_distance(record.actions, wanted[: len(record.actions)]),
            "drafted_distance": chunk_distance(record.proposal.actions, wanted),
            "action_change": 0.0 if record.outcome is not None else distance(wanted, record.actions),
        }
        tails = np.full(wanted.shape[1], np.nan, np.float32)
        counts = ("passes", "read", "accepted", "rejected", "compensated", "tolerance")
        row |= {"greedy": False} | dict.fromkeys(counts, 0)
        if record.outcome is not None:
            outcome: Decoded = record.outcome.evidence
            tail = (outcome.sources == TAIL).reshape(wanted.shape)
            error = np.abs(to_actions(outcome.tokens).reshape(wanted.shape) - wanted)
            with np.errstate(invalid="ignore"):
                mean = np.where(tail, error, 0.0).sum(0) / np.where(tail.any(0), tail.sum(0), np.nan)
            tails = mean.astype(np.float32)
            row |= {
                "greedy": bool((outcome.tokens == target).all()), "passes": 1 + len(outcome.accepted),
                "read": sum(outcome.read), "accepted": sum(outcome.accepted), "rejected": outcome.rejected,
                "compensated": int(tail.sum()), "tolerance": record.proposal.evidence.rule.each.max(),
            }  # fmt: skip
        return row | {f"tail_{dimension}": value for dimension, value in enumerate(tails)}

    def wanted(self, targets: Sequence[Tokens]) -> Sequence[Chunk]:
        spec = self._parts.policy.spec
        return [to_actions(tokens).reshape(spec.chunk, spec.actions) for tokens in targets]


class FlowRollout(FamilyRollout):
    """The rollout of a flow policy, whose target checks or denoises when it is queried.

    Columns: ``distance`` of the executed actions and ``drafted_distance`` of the drafted ones to those of a full round
    from the same noise; ``action_change``; ``full``, whether the round ended as a full one; ``checked``, whether a
    drafted chunk was checked; ``accepted`` drafted and executed ``actions``; ``deviation``, the check's largest one of
    the first action, NaN without a check; ``reused``, the reused share of the cameras' tokens.
    """

    measured = has_lessons = True

    def infer(self, windows: Sequence[Window], addresses: Sequence[StepAddress]) -> tuple[Sequence[Any], Sequence[Any]]:
        # The chunks of full rounds, [B, H, A].
        return [None] * len(windows), _batch(self.pair.parts.policy, Role.VERIFY, windows, addresses)

    def judge(self, record: StepRecord, draft: None, target: Chunk) -> Row:
        executed, drafted = (chunk[: self.pair.execute] for chunk in (record.actions, record.proposal.actions))
        # Fewer are executed where a prefix was accepted.
        wanted, count = self.pair.units.from_environment(target)[: len(drafted)], len(executed)
        row: Row = {
            "distance": chunk_distance(executed, wanted[:count]), "drafted_distance": chunk_distance(drafted, wanted),
            "action_change": distance(wanted, executed) if record.outcome is None else 0.0, "actions": count,
            "full": False, "checked": False, "accepted": 0, "deviation": np.nan, "reused": 0.0,
        }  # fmt: skip
        if record.outcome is not None:
            done: Round = record.outcome.evidence
            row |= {"full": done.full, "checked": done.checked, "accepted": done.accepted, "reused": done.reused_share}
            row["deviation"] = float(done.deviation[:, 0].max()) if done.deviation.size else np.nan
        return row


FAMILIES: dict[type, type[FamilyRollout]] = {
    CodeParts: CodesRollout, ChunkParts: ChunksRollout, TokenParts: TokensRollout, FlowParts: FlowRollout,
}  # fmt: skip


def family_of(pair: Pair[Any]) -> type[FamilyRollout]:
    """The class that rolls out pairs of this family."""
    return FAMILIES.get(type(pair.parts), FamilyRollout)


def decoded_by(method: Method, pair: Pair[Any]) -> Pair[Any]:
    """The pair as a method decodes it, or as it was loaded where the method does not say.

    Raises:
        ConfigError: for a decoding that the family does not have.
    """
    if method.composition is None:
        return pair
    kind: type = FlowParts
    field, needed = "rounds", "a flow policy: a bundle of kind flow, such as pusht-flow"
    if isinstance(method.composition, Decoding):
        kind, field = TokenParts, "decoding"
        needed = "a token policy: a bundle of kind tokens, such as metaworld-tokens"
    if not isinstance(pair.parts, kind):
        raise ConfigError(f"{method.name} ({method.about}) needs {needed}; {pair.name} is none")
    # The name finds calibrations, that of a family's default is empty.
    default = method.composition in (DECODINGS["ar"], FULL)
    source = replace(pair.source, decoding="" if default else method.name)
    return pair.composed(source=source, **{field: method.composition})


def rollout_of(pair: Pair[Any], method: Method) -> FamilyRollout:
    """The family-specific part of a rollout, of a pair as it was loaded.

    Raises:
        ConfigError: for a method that the family does not have.
    """
    pair = decoded_by(method, pair)
    family = family_of(pair)
    if (
        (method.needs_codes and family is not CodesRollout)
        or (method.verifier == "target" and not family.can_take_target)
        or (method.needs_head and not family.has_lessons)
    ):
        more = "target, target_on_device, " * family.can_take_target + "random_learned, learned, " * family.has_lessons
        raise ConfigError(
            f"{pair.name} is no pair that {method.name} needs: of action codes, whose head proposes and whose target "
            f"can be taken; choose among draft, hybrid, random, {more}adahi and gates of your own"
        )
    return family(pair, method)


def _batch(
    policy: ChunkPolicy, role: Role, windows: Sequence[Window], addresses: Sequence[StepAddress]
) -> Sequence[Chunk]:
    seen = [policy.spec.observation.select(window) for window in windows]
    return policy.infer_batch(seen, streams(role, addresses))


def _change(record: StepRecord, verified: Chunk) -> float:
    """Distance of the executed to the verified actions ``[n, A]``; 0 where the step was verified."""
    return 0.0 if record.outcome is not None else distance(verified, record.actions[: len(verified)])


def _entropy(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    logs = np.log(np.maximum(rows, 1e-300))
    return np.asarray(-(rows * logs).sum(axis=(-2, -1)))
