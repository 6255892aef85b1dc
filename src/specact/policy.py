"""ADAHI's algorithm: draft, gate, verify, act."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError, ObservationError
from specact.execution.player import NO_OUTCOME, WAIT, ChunkPlayer, Verdicts
from specact.gates.gate import Gate
from specact.observation import Observation, ObservationHistory, Window
from specact.pair import Drafter, Follower, LocalTarget, Pair, Verifier, is_valid
from specact.rng import Role, StepAddress, StepStreams
from specact.safety import EXECUTE_DRAFT, NOT_FINITE, Fallback, Safety
from specact.types import CLOCK, NO_OFFLOAD, Chunk, Clock, Miss, Origin, Outcome, StageTimes, StepRecord, all_from

_INFERENCE_S = 2.0  # more than an inference takes, for the usual age of a chunk


class SpeculativePolicy:
    """A policy pair on a robot: the draft acts, the gate decides when the target is asked (ADAHI, Algorithm 1).

    Every method is a composition: draft only is the gate ``Never``, hybrid ``Always``, ADAHI ``ActionDeviation``, one
    per robot. Drafter and verifier take the place of the pair's draft and of its target in this process. The outcome of
    a verification is waited for, as in the paper, or executed late (``verdicts``). Where draft, target or observations
    fail, ``safety`` applies the fallback; an action is too old if its chunk should have ended two seconds ago.
    ``counts`` since construction are ``steps`` (inferences), ``transmitted``, ``missed``, units (codes, tokens,
    actions) ``verified`` and ``accepted``; of late verdicts ``wanted``, ``in_time`` and actions ``replaced``.
    A pair or gate of the wrong type, a negative seed or robot, or an unfit stop action is a ConfigError.
    """

    starved_by = ""  # it always has an action

    def __init__(
        self,
        pair: Pair[Any],
        gate: Gate,
        *,
        drafter: Drafter | None = None,
        verifier: Verifier | None = None,
        fallback: Fallback = EXECUTE_DRAFT,
        verdicts: Verdicts = WAIT,
        seed: int = 0,
        robot: int = 0,
        clock: Clock = CLOCK,
    ) -> None:
        if not hasattr(pair, "drafter"):
            raise ConfigError(
                f"pair must be a bundle or another Pair, got {pair!r}; load one: specact.load_pair('ball')"
            )
        if not isinstance(gate, Gate):
            raise ConfigError(
                f"gate must be a Gate, got {gate!r}; make one: specact.calibrated_gate(pair, 'adahi', rate=0.6)"
            )
        if seed < 0 or robot < 0:
            raise ConfigError(f"seed and robot must not be negative, got {seed} and {robot}")
        self.gate, self.clock = gate, clock
        self.counts: Counter[str] = Counter()
        usual_age_s = pair.execute / pair.rate_hz + _INFERENCE_S
        self.safety = Safety(fallback, pair.units, self.clock, usual_age_s)
        self._drafter = pair.drafter() if drafter is None else drafter
        self._followers: list[Follower] = [gate, *([self._drafter] if isinstance(self._drafter, Follower) else [])]
        self._verifier = pair.verifier(LocalTarget(pair.target(), self.clock)) if verifier is None else verifier
        # The address is that of the next inference.
        self._verdicts, self.address, self._streams = verdicts, StepAddress(seed, robot, 0, 0), StepStreams()
        self._history, self._player = ObservationHistory(pair.observation), ChunkPlayer(pair.execute, pair.overlap)
        self._corrects = pair.corrects > 0
        self.reset(episode=0)

    def reset(self, episode: int) -> None:
        """Starts an episode; its number is part of the random streams' address."""
        self.address = self.address._replace(episode=episode, step=0)
        self.safety.reset()
        self._verdicts.reset()
        self._history.reset()
        self._player.reset()
        for follower in self._followers:
            follower.reset()
        # Of the last inference, and of the last one that asked.
        self.record: StepRecord | None = None
        self._last_request: StepRecord | None = None
        self.seam = False
        self._inference: Callable[[], StepRecord] | None = None

    @property
    def wants_inference(self) -> bool:
        """Whether the next control step runs an inference; otherwise it plays the next action of the last chunk."""
        return self._player.empty or self.safety.expired

    @property
    def wants_observation(self) -> bool:
        """Whether the next inference depends on the current observation: it is due, or reads a history."""
        return self.wants_inference or self._history.length > 1

    @property
    def origin(self) -> Origin | None:
        """Origin of the last action; for a mean over several chunks, that of the newest chunk."""
        if self.safety.overrides:
            return Origin.FALLBACK
        return None if self.record is None else Origin(self.record.origins[self._player.played - 1])

    def act(self, observation: Observation) -> NDArray[np.float32]:
        """One control step: the action ``[A]`` to execute now, in the environment's units.

        The observation is a mapping with every array of the pair's, or one array, taken as ``state``.

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
        self.seam = False
        if self.safety.expired:
            self._player.reset()
        self._apply_late_verdict()
        if self._player.empty and not self.safety.stopped:
            assert window is not None, "an inference is due"
            self._inference = self._infer(window)

    def finish(self) -> NDArray[np.float32]:
        """The second half of :meth:`act_on`: waits for the verification, and returns the action."""
        if self._inference is not None:
            inference, self._inference = self._inference, None
            record = self.record = inference()
            self._last_request = record if record.decision.transmit else self._last_request
            self._player.put(record.proposal.actions, record.actions)
            self.seam |= not self._corrects  # a chunk of a corrector is one action, and no seam
            for follower in self._followers:
                follower.on_inference(record)
            self._tell_verified(record)
            self._apply_late_verdict()
        if self.safety.stopped:
            still = self.safety.stop_action
            assert still is not None, "a robot without one is not acted on any more"
            return still
        drafted, executed = self._player.next()
        assert self.record is not None, "of the chunk that is played"
        failed = self.record.origins[self._player.played - 1] == Origin.FALLBACK
        action = self.safety.send(executed, failed and self.safety.fallback.on_miss == "hold_last")
        for follower in self._followers:
            follower.on_action(drafted, executed)
        return action

    def wait(self, seconds: float) -> bool:
        """False: every control step of this policy has an action, see :class:`~specact.robot.loop.Acting`."""
        return False

    def _infer(self, window: Window) -> Callable[[], StepRecord]:
        """Algorithm 1: drafts, decides and requests; the result waits for the verification and says what to execute."""
        address, clock = self.address, self.clock
        started = clock.now()
        self.safety.see(started)
        proposal = self._drafter.propose(window, self._streams(Role.DRAFT, address))
        if not is_valid(proposal.actions):
            raise ObservationError(NOT_FINITE)
        drafted = clock.now()
        decision = self.gate.decide(proposal, self._streams(Role.GATE, address))
        if self._verdicts.late:
            self.counts["wanted"] += decision.transmit
            if not self._verdicts.free:
                decision = replace(decision, transmit=False)
        decided = clock.now()
        request = self._verdicts.ask(self._verifier, proposal, address, started) if decision.transmit else NO_OUTCOME
        submitted = clock.now()

        def conclude() -> StepRecord:
            resumed = clock.now()
            result = request.result()
            offload = NO_OFFLOAD if result is None else result.times
            # What other policies do between the two halves is not part of the step.
            rest = submitted - decided + clock.now() - resumed - offload.total
            times = StageTimes(drafted - started, decided - drafted, offload, rest)
            self.counts["steps"] += 1
            self.counts["transmitted"] += decision.transmit
            self.address = address.following
            actions, origins = self._chosen(proposal.actions, result, proposal.origin)
            return StepRecord(address, proposal, decision, result, actions, origins, times)

        return conclude

    def _chosen(
        self, drafted: Chunk, result: Outcome | Miss | None, origin: Origin = Origin.DRAFTED
    ) -> tuple[Chunk, NDArray[np.uint8]]:
        """The actions to execute, ``[n, A]``, and the origin of each; without a result those of the draft."""
        if result is None:
            return drafted, all_from(origin, len(drafted))
        if isinstance(result, Outcome):
            self.safety.answered()
            self.counts["verified"] += result.verified
            self.counts["accepted"] += result.accepted
            return result.actions, result.origins
        self.counts["missed"] += 1
        self.safety.missed()
        actions = self.safety.instead(drafted)
        return actions, all_from(Origin.FALLBACK, len(actions))

    def _apply_late_verdict(self) -> None:
        """Applies a late verdict to the remaining actions of its chunk; a drafter that corrects goes on from it."""
        playing = None if self._player.empty else self.record
        record = self._last_request if self._corrects else playing
        verdict = self._verdicts.arrived(self.clock.now(), None if record is None else record.address)
        if verdict is None:
            return
        result, in_time = verdict
        if record is None or not in_time:
            # Its chunk was executed unverified, as after a miss, whatever the verdict would have been.
            self.counts["missed"] += 1
            self.safety.missed()
            return
        actions, origins = self._chosen(record.actions, result)
        self.counts["in_time"] += isinstance(result, Outcome)
        if record is playing:
            played, left = self._player.played, self._player.replace(actions)
            self.counts["replaced"] += left * isinstance(result, Outcome)
            # Actions played before the verdict are the draft's, in the record too.
            actions = np.concatenate([record.actions[:played], actions[played:]])
            origins = np.concatenate([record.origins[:played], origins[played:]])
            self.record = replace(record, result=result, actions=actions, origins=origins)
        self._tell_verified(replace(record, result=result, actions=actions, origins=origins))

    def _tell_verified(self, record: StepRecord) -> None:
        if record.outcome is not None:
            self.seam = True
            for follower in self._followers:
                follower.on_verified(record)
