"""ADAHI's algorithm: draft, gate, verify, act."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.clock import Clock, RealClock
from specact.errors import ConfigError, ObservationError
from specact.execution.player import ChunkPlayer
from specact.execution.verdicts import WAIT, Verdicts
from specact.fallback import EXECUTE_DRAFT, Fallback
from specact.gates.gate import Gate
from specact.observation import Observation, ObservationHistory, Window
from specact.pair import Drafter, FollowingDrafter, Pair
from specact.rng import Role, StepAddress, StepStreams
from specact.types import (
    Cause,
    Chunk,
    Decision,
    Miss,
    OffloadTimes,
    Origin,
    Outcome,
    Proposal,
    StageTimes,
    StepRecord,
    all_from,
    value,
)
from specact.verification import LocalTarget, Pending, Verifier, is_valid

_NO_OFFLOAD = OffloadTimes()
_NOT_FINITE = "the policy's action is not finite for this observation; check its units and range"


@value
class _Asked:
    """An inference between its request and the answer.

    Attributes:
        proposal, decision: see :class:`~specact.types.StepRecord`.
        answer: the request, or a miss; None if the step does not wait for one.
        draft_s, gate_s, request_s: times of the stages so far [s].
    """

    proposal: Proposal
    decision: Decision
    answer: Pending[Outcome] | Miss | None
    draft_s: float
    gate_s: float
    request_s: float


class SpeculativePolicy:
    """A policy pair on a robot: the draft acts, the gate decides when the target is asked (ADAHI, Algorithm 1).

    Every method is a composition: draft only is the gate ``Never``, hybrid ``Always``, ADAHI ``ActionDeviation``. The
    verifier determines what a verified step executes.

    Args:
        pair: draft, target, and what they agree on: a bundle, or any other :class:`~specact.pair.Pair`.
        gate: decides which steps go to the target; not shared with other robots.
        drafter: instead of the pair's draft.
        verifier: instead of the pair's own verification with its target in this process.
        fallback: what is executed when a target request misses its deadline or fails.
        verdicts: when a verification's outcome is executed: :data:`~specact.execution.verdicts.WAIT`, as in the paper,
            or :class:`~specact.execution.verdicts.LateVerdicts`.
        max_chunk_age_s: the remaining actions of a chunk are dropped when its observation is older than this [s], and
            the next control step infers; see :attr:`expired`. Infinite for no limit.
        seed, robot: address of the random streams; two robots with the same seed get different streams.
        clock: source of the step times.

    Attributes:
        record: of the last inference; None before the first of an episode.
        counts: totals since construction: ``steps`` (inferences), steps ``transmitted`` and ``missed``, units (codes,
            tokens, actions) ``verified`` and ``accepted``; with late verdicts also steps that the gate ``wanted`` to
            transmit, verdicts that arrived ``in_time``, and actions that they ``replaced``.
        stopped: whether the fallback stopped the robot; every action is the stop action then, until :meth:`reset`.

    Raises:
        ConfigError: if pair or gate has the wrong type, seed or robot is negative, the stop action has the wrong size,
            or max_chunk_age_s is not positive.
    """

    def __init__(
        self,
        pair: Pair[Any],
        gate: Gate,
        *,
        drafter: Drafter | None = None,
        verifier: Verifier | None = None,
        fallback: Fallback = EXECUTE_DRAFT,
        verdicts: Verdicts = WAIT,
        max_chunk_age_s: float = math.inf,
        seed: int = 0,
        robot: int = 0,
        clock: Clock | None = None,
    ) -> None:
        if isinstance(pair, str | Path) or not hasattr(pair, "drafter"):
            raise ConfigError(
                f"pair must be a bundle or another Pair, got {pair!r}; load one: specact.load_bundle('ball')"
            )
        if not isinstance(gate, Gate):
            raise ConfigError(
                f"gate must be a Gate, got {gate!r}; make one: specact.calibrated_gate(pair, 'deviation', rate=0.6)"
            )
        if seed < 0 or robot < 0:
            raise ConfigError(f"seed and robot must not be negative, got {seed} and {robot}")
        if not max_chunk_age_s > 0.0:
            raise ConfigError(f"max_chunk_age_s must be above 0, got {max_chunk_age_s}")
        self.gate, self.clock = gate, RealClock() if clock is None else clock
        self.record: StepRecord | None = None
        self.counts: Counter[str] = Counter()
        self._units = pair.units
        self._drafter = pair.drafter if drafter is None else drafter
        following = isinstance(self._drafter, FollowingDrafter)
        self._follower: FollowingDrafter | None = self._drafter if following else None  # type: ignore[assignment]
        self._verifier = pair.verifier(LocalTarget(pair.target, self.clock)) if verifier is None else verifier
        self._fallback, self._verdicts = fallback, verdicts
        self._max_chunk_age_s, self._address = max_chunk_age_s, StepAddress(seed, robot, 0, 0)
        self._streams = StepStreams()
        self._history = ObservationHistory(pair.observation)
        self._player = ChunkPlayer(pair.execute, pair.overlap)
        self._stop_normalised = None if fallback.stop_action is None else self._units.normalise(fallback.stop_action)
        self.reset(episode=0)

    def reset(self, episode: int) -> None:
        """Starts an episode; its number is part of the random streams' address."""
        self._address = self._address._replace(episode=episode, step=0)
        # Consecutive missed target requests, and control steps in a row without a usable observation or action.
        self._misses = self._unusable = 0
        self._observed_s = self.clock.now()
        self._verdicts.reset()
        self._history.reset()
        self._player.reset()
        self.gate.reset()
        if self._follower is not None:
            self._follower.reset()
        # hold_last repeats this; before the first action it is the stop action.
        self._last = self._before_last = self._stop_normalised
        self.record, self.stopped = None, False
        self._asked: _Asked | None = None

    @property
    def address(self) -> StepAddress:
        """Address of the next inference."""
        return self._address

    @property
    def wants_inference(self) -> bool:
        """Whether the next control step runs an inference; otherwise it plays the next action of the last chunk."""
        return self._player.empty or self.expired

    @property
    def wants_observation(self) -> bool:
        """Whether the next inference depends on the current observation: it is due, or reads a history."""
        return self.wants_inference or self._history.length > 1

    @property
    def expired(self) -> bool:
        """Whether the observation behind the last chunk is older than ``max_chunk_age_s``."""
        return self.clock.now() - self._observed_s > self._max_chunk_age_s

    @property
    def origin(self) -> Origin | None:
        """Origin of the last action; for a mean over several chunks, that of the newest chunk."""
        if self.stopped or self._unusable:
            return Origin.FALLBACK
        return None if self.record is None else Origin(self.record.origins[self._player.played - 1])

    @property
    def stop_action(self) -> NDArray[np.float32] | None:
        """The fallback's stop action ``[A]``, or None if it has none."""
        return None if self._stop_normalised is None else self._stop_action()

    def act(self, observation: Observation) -> NDArray[np.float32]:
        """One control step: the action ``[A]`` to execute now, in the environment's units.

        Args:
            observation: a mapping with every array of the pair's ``observation``, or one array, taken as ``state``.

        Raises:
            ObservationError: if the observation cannot be used (the state is unchanged), or the resulting action is
                not finite.
        """
        return self.act_on(self.observe(observation))

    def observe(self, observation: Observation) -> Window:
        """The first half of :meth:`act`: the window that ends with this observation."""
        return self._history.push(observation)

    def act_on(self, window: Window | None) -> NDArray[np.float32]:
        """The second half of :meth:`act`; the window may be None where no inference is due."""
        self.ask(window)
        return self.finish()

    def ask(self, window: Window | None) -> None:
        """The first half of :meth:`act_on`: drafts, decides and requests the verification, where an inference is due.

        Several policies can all ask before the first of them finishes, so that their target answers in one batch.
        """
        if self.expired:
            self._player.reset()
        self._apply_late_outcome()
        if not self.stopped and self._player.empty:
            assert window is not None, "an inference is due"
            self._asked = self._propose(window)

    def finish(self) -> NDArray[np.float32]:
        """The second half of :meth:`act_on`: waits for the verification, and returns the action."""
        if self._asked is not None:
            asked, self._asked = self._asked, None
            self.record = self._conclude(asked)
            self.gate.learn(self.record)
            if self.record.outcome is not None:
                self.gate.verified(self.record.proposal)
            if self._follower is not None:
                self._follower.learn(self.record)
            self._player.put(self.record.proposal.actions, self.record.actions)
            self._apply_late_outcome()
        if self.stopped:
            return self._stop_action()
        drafted, executed = self._player.next()
        action = self._units.to_environment(executed)
        if not all(map(math.isfinite, action.tolist())):
            raise ObservationError(_NOT_FINITE)
        self._unusable = 0
        self._before_last, self._last = self._last, executed
        self.gate.update(drafted, executed)
        if self._follower is not None:
            self._follower.update(drafted, executed)
        return action

    def act_without_observation(self, error: ObservationError) -> NDArray[np.float32]:
        """One control step without a usable observation, in place of :meth:`act`; the fallback counts it as a miss.

        Without an observation there is no draft, so ``execute_draft`` holds the last action, as ``hold_last`` does. The
        chunk resumes with the next usable observation; the run of consecutive misses ends with an action of the policy.

        Args:
            error: why the observation cannot be used.

        Returns:
            The action ``[A]``, in the environment's units.

        Raises:
            ObservationError: ``error``, if no action of the episode has been chosen yet.
        """
        if self._last is None or self.record is None:
            raise error
        self._unusable += 1
        self._stop_if_due()
        return self._stop_action() if self.stopped else self._units.to_environment(self._last)

    def withdraw(self) -> None:
        """The last action was not sent, and ``hold_last`` does not repeat it."""
        self._last = self._before_last

    def wait(self, seconds: float) -> bool:
        """False: every control step of this policy has an action, see :class:`~specact.robot.loop.Acting`."""
        return False

    def _propose(self, window: Window) -> _Asked:
        """Algorithm 1 until its request: draft, decide."""
        address, clock = self._address, self.clock
        started = self._observed_s = clock.now()
        proposal = self._drafter.propose(window, self._streams(Role.DRAFT, address))
        if not is_valid(proposal.actions):
            raise ObservationError(_NOT_FINITE)
        drafted = clock.now()
        decision = self.gate.decide(proposal, self._streams(Role.GATE, address))
        decided = clock.now()
        decision, answer = self._request(proposal, decision, started)
        return _Asked(proposal, decision, answer, drafted - started, decided - drafted, clock.now() - decided)

    def _conclude(self, asked: _Asked) -> StepRecord:
        """Algorithm 1 from its request on: the record of the inference."""
        address, clock, proposal, decision = self._address, self.clock, asked.proposal, asked.decision
        resumed, answer = clock.now(), asked.answer
        found = answer if answer is None or isinstance(answer, Miss) else answer.result()
        self.counts["steps"] += 1
        self.counts["transmitted"] += decision.transmit
        self._address = address.following
        offload = _NO_OFFLOAD if found is None else found.times
        # What other policies do between the two halves is not part of the step.
        rest = asked.request_s + clock.now() - resumed - offload.total
        times = StageTimes(asked.draft_s, asked.gate_s, offload, rest)
        outcome, miss, unsent, actions, origins = self._record_fields(proposal.actions, found, proposal.origin)
        return StepRecord(address, proposal, decision, outcome, miss, actions, origins, times, unsent)

    def _request(
        self, proposal: Proposal, decision: Decision, seen_s: float
    ) -> tuple[Decision, Pending[Outcome] | Miss | None]:
        """The decision, with ``transmit`` False where no request was sent, and the request where the step waits."""
        if self._verdicts.late:
            self.counts["wanted"] += decision.transmit
        if decision.transmit and not self._verdicts.free:
            decision = replace(decision, transmit=False)
        if not decision.transmit:
            return decision, None
        return decision, self._verdicts.ask(self._verifier, proposal, self._address, seen_s)

    def _apply_late_outcome(self) -> None:
        """Applies a late verification to the remaining actions of its chunk."""
        if not self._verdicts.late:
            return
        record = None if self._player.empty else self.record
        arrived = self._verdicts.arrived(self.clock.now(), None if record is None else record.address)
        if arrived is None:
            return
        found = arrived.result
        if record is None or not arrived.in_time:
            # Its chunk was executed unverified, as after a miss, whatever the verdict would have been.
            self.counts["missed"] += 1
            self._misses += 1
            self._stop_if_due()
            return
        outcome, miss, unsent, actions, origins = self._record_fields(record.actions, found)
        played, left = self._player.played, self._player.replace(actions)
        # Actions played before the verdict are the draft's, in the record too.
        self.record = replace(
            record,
            outcome=outcome,
            miss=miss,
            unsent=unsent,
            actions=np.concatenate([record.actions[:played], actions[played:]]),
            origins=np.concatenate([record.origins[:played], origins[played:]]),
        )
        if isinstance(found, Outcome):
            self.counts.update(in_time=1, replaced=left)
            self.gate.verified(record.proposal)
            if self._follower is not None:
                self._follower.learn(self.record)

    def _record_fields(
        self, drafted: Chunk, found: Outcome | Miss | None, origin: Origin = Origin.DRAFTED
    ) -> tuple[Outcome | None, Cause | None, bool, Chunk, NDArray[np.uint8]]:
        """Outcome, miss, unsent, actions and origins of a step's record.

        Args:
            drafted: the draft's actions, ``[n, A]``.
            found: result of the verification; None if the step was skipped or the result is pending.
            origin: of the draft's actions.
        """
        if found is None:
            return None, None, False, drafted, all_from(origin, len(drafted))
        if isinstance(found, Outcome):
            self._misses = 0
            self.counts["verified"] += found.verified
            self.counts["accepted"] += found.accepted
            return found, None, False, found.actions, found.origins
        self.counts["missed"] += 1
        actions = self._fallback_actions(drafted)
        return None, found.cause, not found.sent, actions, all_from(Origin.FALLBACK, len(actions))

    def _fallback_actions(self, drafted: Chunk) -> Chunk:
        """The chunk to execute for a miss; the drafted one, unexecuted, where the robot stops."""
        self._misses += 1
        self._stop_if_due()
        if self.stopped or self._fallback.on_miss == "execute_draft" or self._last is None:
            return drafted
        return np.broadcast_to(self._last, drafted.shape)

    def _stop_if_due(self) -> None:
        self.stopped = self.stopped or self._fallback.stops(self._misses + self._unusable)

    def _stop_action(self) -> NDArray[np.float32]:
        return np.array(self._fallback.stop_action, dtype=np.float32)
