"""ADAHI's algorithm: draft, gate, verify, act."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from specact.clock import Clock, RealClock
from specact.errors import ConfigError, ObservationError, unknown_name
from specact.execution.player import ChunkPlayer
from specact.fallback import EXECUTE_DRAFT, Fallback
from specact.families.codes.bundle import Bundle
from specact.families.codes.spec import CodePolicy
from specact.gates.gate import Gate
from specact.gates.prefetch import Forecast
from specact.observation import Observation, ObservationWindow
from specact.rng import Role, StepStreams
from specact.sampling import sample_codes
from specact.types import Decision, OffloadTimes, Proposal, StageTimes, StepRecord, Window
from specact.verifiers import LocalTarget, Miss, SpeculativeVerifier, Verification, Verifier

Offset = Literal["target", "draft", "stale"]
_NOTHING = OffloadTimes()
# Of a normalised action; demonstrated ones lie in [-1, 1]. Means, differences and squares of numbers up to this are
# finite in float32, so that nothing after decoding can overflow.
_LARGEST = 1e15
_NOT_FINITE = "the policy's action is not finite for this observation; check its units and range"


@dataclass(frozen=True)
class _UnderWay:
    """A step whose verdict nobody waits for: its number, and when its observation was made."""

    proposal: Proposal
    step: int
    seen_s: float


class SpeculativePolicy:
    """A policy pair on a robot: the draft acts, the gate decides when the target is asked (ADAHI, Algorithm 1).

    Every method is a composition: draft only is the gate ``Never``, hybrid ``Always``, ADAHI ``ActionDeviation``;
    the remote target is ``Always`` with a :class:`~specact.verifiers.TargetSampler`.

    Args:
        bundle: the policies and what they agree on.
        gate: decides which steps go to the target; it belongs to this robot alone.
        draft: instead of the bundle's.
        verifier: instead of exact speculative sampling with the bundle's target in this process.
        offset: which offset a verified step gets. ``target``: the target's, for the final codes (the action then
            follows the target's law); ``draft``: the draft's, for the final codes; ``stale``: the draft's for the codes
            it drafted, even where they were replaced. The last two are ablations.
        fallback: what is executed where the target cannot be had in time.
        forecast: lets requests leave before the draft is computed; None asks after the gate, as in the paper.
        late_for_s: None waits for the target, as in the paper. With a number nobody waits: the draft's chunk runs at
            once, and a verdict that arrives while it runs, and no longer than this after its observation, replaces what
            is left of it. While one is under way no other is asked for. Needs a verifier that draws on the device.
        max_chunk_age_s: what is left of a chunk is dropped once its observation is older than this [s], and the next
            control step infers; see :attr:`expired` for an inference that takes longer. Infinite for no limit.
        seed, robot: address of the random streams; two robots with one seed get different ones.
        clock: what the step times are read from.

    Attributes:
        record: of the last inference; None before the first of an episode.
        counts: ``steps`` (inferences), how many of them were ``transmitted`` and ``missed``, how many codes were
            ``verified`` and ``accepted``, since the policy was made; where verdicts may be late also how many steps the
            gate ``wanted`` sent, how many verdicts came ``in_time``, and how many actions they ``replaced``.
        stopped: whether the fallback stopped the robot; every action is the stop action then, until :meth:`reset`.

    Raises:
        ConfigError: for something else than a bundle and a gate, an unknown offset, a negative seed or robot, a stop
            action of another size, a late_for_s that is not positive or stands beside a forecast, or a max_chunk_age_s
            that is not positive.
    """

    def __init__(
        self,
        bundle: Bundle,
        gate: Gate,
        *,
        draft: CodePolicy | None = None,
        verifier: Verifier | None = None,
        offset: Offset = "target",
        fallback: Fallback = EXECUTE_DRAFT,
        forecast: Forecast | None = None,
        late_for_s: float | None = None,
        max_chunk_age_s: float = math.inf,
        seed: int = 0,
        robot: int = 0,
        clock: Clock | None = None,
    ) -> None:
        if not isinstance(bundle, Bundle):
            raise ConfigError(f"bundle must be a Bundle, got {bundle!r}; load one: specact.load_bundle('ball')")
        if not isinstance(gate, Gate):
            raise ConfigError(
                f"gate must be a Gate, got {gate!r}; make one: specact.calibrated_gate(bundle, 'deviation', rate=0.6)"
            )
        if offset not in get_args(Offset):
            raise unknown_name("offset", offset, get_args(Offset))
        if seed < 0 or robot < 0:
            raise ConfigError(f"seed and robot must not be negative, got {seed} and {robot}")
        if late_for_s is not None and (not late_for_s > 0.0 or forecast is not None):
            raise ConfigError(
                f"late_for_s must be above 0, and needs no forecast since nobody waits; got {late_for_s} and {forecast}"
            )
        if not max_chunk_age_s > 0.0:
            raise ConfigError(f"max_chunk_age_s must be above 0, got {max_chunk_age_s}")
        self.gate, self.clock = gate, RealClock() if clock is None else clock
        self.record: StepRecord | None = None
        self.counts: Counter[str] = Counter()
        self._tokenizer, self._offset = bundle.tokenizer, offset
        self._draft = bundle.draft if draft is None else draft
        if verifier is None:
            verifier = SpeculativeVerifier(LocalTarget(bundle.target, self.clock), bundle.tokenizer)
        self._verifier, self._fallback, self._forecast = verifier, fallback, forecast
        self._late_for_s, self._max_chunk_age_s = late_for_s, max_chunk_age_s
        self._streams = StepStreams(seed, robot)
        self._window = ObservationWindow(bundle.spec)
        self._player = ChunkPlayer(bundle.spec.execute, bundle.spec.overlap)
        self._still = None if fallback.stop_action is None else self._tokenizer.normalise(fallback.stop_action)
        self.reset(episode=0)

    def reset(self, episode: int) -> None:
        """Starts an episode; its number is part of the random streams' address."""
        self._episode, self._step = episode, 0
        # In a row: steps whose target was missed, and control steps without a usable observation.
        self._misses = self._unseen = 0
        self._seen_s = self.clock.now()
        self._under_way: _UnderWay | None = None
        self._window.reset()
        self._player.reset()
        self.gate.reset()
        if self._forecast is not None:
            self._forecast.reset()
        # What "hold the last action" holds before there is one.
        self._last = self._still
        self.record, self.stopped = None, False

    @property
    def wants_inference(self) -> bool:
        """Whether the next control step needs the policies, or plays on from the last chunk."""
        return self._player.empty or self.expired

    @property
    def expired(self) -> bool:
        """Whether the observation behind the last chunk is older than ``max_chunk_age_s``."""
        return self.clock.now() - self._seen_s > self._max_chunk_age_s

    @property
    def stop_action(self) -> NDArray[np.float32] | None:
        """The fallback's: what makes this robot stand still, ``[A]``, or None if nobody said."""
        return None if self._still is None else self._stop_action()

    def act(self, observation: Observation) -> NDArray[np.float32]:
        """One control step: the action ``[A]`` to execute now, in the environment's units.

        Args:
            observation: ``state [O]``, or a mapping with ``state``, ``goal`` and ``image`` as the bundle's spec says.

        Raises:
            ObservationError: if the observation cannot be used, and nothing has changed then; or if the policies make
                no finite action of it. No action is returned either way.
        """
        return self.act_on(self.observe(observation))

    def observe(self, observation: Observation) -> Window:
        """The first half of :meth:`act`: the window that ends with this observation."""
        return self._window.push(observation)

    def act_on(self, window: Window) -> NDArray[np.float32]:
        """The second half of :meth:`act`."""
        self._unseen = 0
        if self.expired:
            self._player.reset()
        self._land()
        if not self.stopped and self._player.empty:
            self.record = self._infer(window)
            self.gate.learn(self.record)
            self._player.put(self.record.proposal.chunk, self.record.chunk)
            self._land()
        if self.stopped:
            return self._stop_action()
        drafted, executed = self._player.next()
        action = self._tokenizer.to_environment(executed)
        if not np.isfinite(action).all():
            raise ObservationError(_NOT_FINITE)
        self._last = executed
        self.gate.update(drafted, executed)
        return action

    def act_unseeing(self, error: ObservationError) -> NDArray[np.float32]:
        """One control step whose observation cannot be used, instead of :meth:`act`: for the fallback it is a miss.

        There is nothing to draft from, so ``execute_draft`` holds the last action, as ``hold_last`` does. The chunk
        goes on with the next usable observation. Control steps without one count as misses in a row until there is
        one again.

        Args:
            error: why the observation cannot be used.

        Returns:
            The action ``[A]``, in the environment's units.

        Raises:
            ObservationError: ``error``, if no action of the episode has been chosen yet.
        """
        if self._last is None or self.record is None:
            raise error
        self._unseen += 1
        self._stop_if_due()
        return self._stop_action() if self.stopped else self._tokenizer.to_environment(self._last)

    def _infer(self, window: Window) -> StepRecord:
        address, clock = (self._episode, self._step), self.clock
        started = self._seen_s = clock.now()
        expected = self._forecast is not None and self._forecast.expects_transmission()
        sent_ahead = expected and self._verifier.prefetch(window)
        draft = self._draft.infer(window)
        drafted = clock.now()
        codes = sample_codes(draft, self._streams(Role.DRAFT, *address))
        proposal = Proposal(window, draft, codes, self._tokenizer.decode(codes, draft.offsets))
        if not _sound(proposal.chunk):
            raise ObservationError(_NOT_FINITE)
        decision = self.gate.decide(proposal, self._streams(Role.GATE, *address))
        decided = clock.now()
        if self._late_for_s is None:
            verified = self._verify(proposal, self._step) if decision.transmit else None
        else:
            decision, verified = self._send(proposal, decision, started)
        chunk = self._executed(proposal, verified)
        if self._forecast is not None:
            self._forecast.learn(decision)
        answered = verified if isinstance(verified, Verification) else None
        self.counts.update(steps=1, transmitted=int(decision.transmit))
        self._count(verified)
        self._step += 1
        offload = _NOTHING if verified is None else verified.times
        return StepRecord(
            episode=self._episode,
            step=address[1],
            proposal=proposal,
            decision=decision,
            sent_ahead=sent_ahead,
            verdict=answered.verdict if answered else None,
            target=answered.target if answered else None,
            miss=verified.cause if isinstance(verified, Miss) else None,
            codes=answered.verdict.codes if answered else codes,
            chunk=chunk,
            times=StageTimes(drafted - started, decided - drafted, offload, clock.now() - decided - offload.total),
            unsent=isinstance(verified, Miss) and not verified.sent,
        )

    def _verify(self, proposal: Proposal, step: int) -> Verification | Miss:
        verified = self._verifier.verify(proposal, self._streams(Role.VERIFY, self._episode, step))
        if isinstance(verified, Verification) and not _sound(self._corrected(proposal, verified)):
            return Miss("invalid", verified.times)
        return verified

    def _send(self, proposal: Proposal, decision: Decision, seen_s: float) -> tuple[Decision, Miss | None]:
        """Sends a step whose verdict may be late; what was sent, and a miss where nothing could be."""
        self.counts["wanted"] += decision.transmit
        if not decision.transmit or self._under_way is not None:
            return replace(decision, transmit=False), None
        if not self._verifier.prefetch(proposal.window):
            return decision, Miss("disconnected", _NOTHING, sent=False)
        self._under_way = _UnderWay(proposal, self._step, seen_s)
        return decision, None

    def _land(self) -> None:
        """Lets a verdict that has arrived replace what is left of its chunk."""
        sent, record = self._under_way, self.record
        if sent is None or record is None or self._verifier.pending(sent.proposal.window):
            return
        self._under_way, age_s = None, self.clock.now() - sent.seen_s
        if sent.step != record.step or self._player.empty or age_s > (self._late_for_s or 0.0):
            self.counts["missed"] += 1
            return
        verified = self._verify(sent.proposal, sent.step)
        chunk = self._executed(sent.proposal, verified)
        self._count(verified)
        left = self._player.replace(chunk)
        if isinstance(verified, Miss):
            self.record = replace(record, miss=verified.cause, chunk=chunk)
            return
        self.counts.update(in_time=1, replaced=left)
        codes, target = verified.verdict.codes, verified.target
        self.record = replace(record, verdict=verified.verdict, target=target, codes=codes, chunk=chunk)

    def _executed(self, proposal: Proposal, verified: Verification | Miss | None) -> NDArray[np.float32]:
        """The chunk to execute, of a step that was skipped where ``verified`` is None."""
        if verified is None:
            return proposal.chunk
        if isinstance(verified, Miss):
            return self._missed(proposal.chunk)
        self._misses = 0
        return self._corrected(proposal, verified)

    def _corrected(self, proposal: Proposal, verified: Verification) -> NDArray[np.float32]:
        codes = verified.verdict.codes
        if self._offset == "target":
            return verified.chunk
        if self._offset == "draft":
            return self._tokenizer.decode(codes, proposal.draft.offsets)
        stale = proposal.chunk - self._tokenizer.base(proposal.codes)
        return self._tokenizer.base(codes) + stale

    def _count(self, verified: Verification | Miss | None) -> None:
        self.counts["missed"] += isinstance(verified, Miss)
        if isinstance(verified, Verification):
            accepted = verified.verdict.accepted
            self.counts.update(verified=len(accepted), accepted=int(accepted.sum()))

    def _missed(self, drafted: NDArray[np.float32]) -> NDArray[np.float32]:
        """The chunk to execute instead; the drafted one, unexecuted, where the robot stops."""
        self._misses += 1
        self._stop_if_due()
        if self.stopped or self._fallback.on_miss == "execute_draft" or self._last is None:
            return drafted
        return np.broadcast_to(self._last, drafted.shape)

    def _stop_if_due(self) -> None:
        self.stopped = self.stopped or self._fallback.stops(self._misses + self._unseen)

    def _stop_action(self) -> NDArray[np.float32]:
        return np.array(self._fallback.stop_action, dtype=np.float32)


def _sound(chunk: NDArray[np.float32]) -> bool:
    """Whether every action ``[n, A]`` is a number that the steps after decoding can handle; NaN is none."""
    return bool((np.abs(chunk) <= _LARGEST).all())
