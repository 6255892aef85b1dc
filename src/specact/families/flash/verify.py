"""Verification of a drafted chunk by a flow policy: a pure function of one window and one request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError
from specact.families.chunks.flow import FlowPolicy
from specact.families.chunks.policy import Chunk
from specact.families.flash.bundle import Block, FlashSettings
from specact.families.flash.check import Array, Check, Verdict, implied, judge, noised
from specact.families.freqcache.cached import FreqCached
from specact.observation import Window
from specact.rng import Role, StepAddress, StepStreams
from specact.types import Origin, Outcome, Proposal, value
from specact.units import ActionUnits
from specact.verification import Answer, Target, TargetVerifier


@value
class RoundRequest:
    """The request for the next chunk: all inputs of the target besides the observation.

    Attributes:
        full: whether a full round is requested, without a check.
        drafted: the chunk to check ``[H, A]``, in the environment's units; None lets the target's own block draft.
        check: its settings.
        steps: Euler steps of a full round, at least 1.
        held: whether each gripper is closed, ``[G]``; None before the first action.
        stale: whether prefix caches of earlier windows are used; not on a server, which is stateless.
        cache: of an earlier window, for the check; None for that of this window.
        parts: stateful networks that compute this robot's prefix cache, see
            :class:`~specact.families.freqcache.cached.FreqCached`; not on a server either.
        shuffled: whether another round's verdict is used, as a control; not on a server either.
    """

    full: bool
    drafted: Chunk | None = None
    check: Check = Check()
    steps: int = 10
    held: NDArray[np.bool_] | None = None
    stale: bool = False
    cache: Any = None
    parts: FreqCached | None = None
    shuffled: bool = False


@value
class Round:
    """The result of a round.

    Attributes:
        chunk: ``[H, A]``, in the environment's units: the drafted one if part of it was accepted, otherwise the
            target's own.
        accepted: number of drafted actions that may be executed; 0 in a full round.
        checked: whether a chunk was checked; if none of it was accepted, a full round followed.
        switches: whether a gripper's change ended the accepted prefix, so that the next round must be a full one.
        deviation: of the check, ``[K, n]``; empty without one, and from a server.
        cache: of this window, after a full round.
    """

    chunk: Chunk
    accepted: int
    checked: bool
    switches: bool
    deviation: Array
    cache: Any = None

    @property
    def full(self) -> bool:
        """Whether the chunk is the target's own."""
        return self.accepted == 0


_ACCEPT_ALL = Check(within=float("inf"), guarded=False)
_NO_DEVIATION = np.zeros((0, 0), np.float32)


@value
class PendingRound:
    """A window submitted to a target; the round is computed when its request is known.

    Attributes:
        target: the target.
        window: its input.
        address: of the step's random stream.
        cache: the window's prefix cache, if a server has computed it; None computes it here.
    """

    target: FlashTarget
    window: Window
    address: StepAddress
    cache: Any = None

    def round(self, question: RoundRequest) -> Round:
        """The round for a request."""
        return self.target.round(self.window, self.address, question, self.cache)


class FlashTarget:
    """A flow policy as a :class:`~specact.verification.TargetPolicy` whose answers depend on what was drafted.

    Args:
        policy: the flow policy.
        settings: of its rounds.
        block: drafts for requests without a chunk.
    """

    def __init__(self, policy: FlowPolicy, settings: FlashSettings, block: Block | None = None) -> None:
        self.policy, self.settings, self.block = policy, settings, block
        self._velocity = policy.networks.velocity
        self._streams = StepStreams()
        units, actions = policy.units, policy.spec.actions
        middle = (units.low[:actions] + units.high[:actions]) / np.float32(2.0)
        self._gripper_thresholds = units.to_flow(middle)[list(settings.grippers)]

    def answer(self, window: Window, address: StepAddress) -> PendingRound:
        """The window, without any computation yet."""
        return PendingRound(self, self.policy.spec.observation.select(window), address)

    # Extreme observations or drafts overflow to NaN.
    @np.errstate(over="ignore", invalid="ignore")
    def round(self, window: Window, address: StepAddress, question: RoundRequest, given: Any = None) -> Round:
        """One round, full or checked; a full one uses the same noise as the policy's own answer at this address.

        Args:
            window, address: of the step.
            question: the request.
            given: the window's prefix cache, if already computed.

        Raises:
            ConfigError: if the request needs a block that is missing.
        """
        policy, rng = self.policy, self._streams(Role.VERIFY, address)
        noise, parts = policy.noise(rng), question.parts or policy.networks
        if question.full:
            new = parts.cache([window]) if given is None else given
            return self._full(new, noise, question.steps, _NO_DEVIATION, checked=False)
        cache, drafted, new = question.cache, question.drafted, given
        if drafted is None:
            tokens, chunk = self._tokens(window)
            new = parts.cache([window], tokens) if cache is None and new is None else new
        else:
            chunk = policy.to_flow(drafted)
            new = parts.cache([window]) if cache is None and new is None else new
        verdict = self._check(chunk, policy.noise(rng), new if cache is None else cache, question)
        if verdict.accepted:
            offered = policy.to_environment(chunk) if drafted is None else drafted
            return Round(offered, verdict.accepted, True, verdict.switches, verdict.deviation)
        if new is None:
            new = parts.cache([window])
        return self._full(new, noise, question.steps, verdict.deviation, checked=True)

    def _tokens(self, window: Window) -> tuple[Array, Array]:
        if self.block is None:
            raise ConfigError("this target has no block that drafts; let the device draft")
        tokens = self.policy.networks.tokens([window])
        return tokens, self.policy.to_flow(self.policy.to_environment(self.block.chunks(tokens)[0]))

    def _check(self, drafted: Array, noise: Array, cache: Any, question: RoundRequest) -> Verdict:
        levels = np.array(question.check.levels, np.float32)
        chunks = noised(drafted, noise, levels)
        estimates = implied(chunks, self._velocity(chunks, np.float32(1.0) - levels, cache), levels)
        count, actions = self.settings.execute, self.policy.spec.actions
        return judge(
            question.check, drafted[:count, :actions], estimates[:, :count, :actions], self.settings.grippers,
            self._gripper_thresholds, question.held,
        )  # fmt: skip

    def _full(self, cache: Any, noise: Array, steps: int, deviation: Array, *, checked: bool) -> Round:
        found = self.policy.denoised(noise[None], cache, steps)[0]
        return Round(self.policy.to_environment(found), 0, checked, False, deviation, cache)


class FlashVerifier(TargetVerifier[PendingRound]):
    """Checks on the device, with a target in this process.

    Args:
        target: receives the windows.
        units: of the actions.
        execute: see :class:`~specact.families.flash.bundle.FlashSettings`.
    """

    def __init__(self, target: Target[PendingRound], units: ActionUnits, execute: int) -> None:
        super().__init__(target)
        self._units, self._execute = units, execute
        self._streams = StepStreams()
        # Verdicts of this robot's checks so far: accepted actions, and whether a gripper's change ended them.
        self._verdicts: list[tuple[int, bool]] = []

    def judge(self, answer: Answer[PendingRound], proposal: Proposal, address: StepAddress) -> Outcome:
        """See :class:`~specact.verification.TargetVerifier`."""
        asked, question = answer.value, proposal.evidence.question
        found = asked.round(question)
        if question.shuffled and found.checked:
            found = self._shuffled(asked, question, found, address)
        return round_outcome(found, self._units, self._execute, answer.times)

    def _shuffled(self, asked: PendingRound, question: RoundRequest, found: Round, address: StepAddress) -> Round:
        """The round with a random one of all verdicts so far: the same distribution, independent of the scene."""
        self._verdicts.append((found.accepted, found.switches))
        drawn = self._verdicts[self._streams(Role.GATE, address).integers(len(self._verdicts))]
        if drawn == (found.accepted, found.switches):
            return found
        if drawn[0] == 0:
            full = asked.round(replace(question, full=True, drafted=None))
            return replace(full, checked=True, deviation=found.deviation)
        whole = asked.round(replace(question, check=_ACCEPT_ALL))
        return replace(whole, accepted=drawn[0], switches=drawn[1], deviation=found.deviation)


def round_outcome(found: Round, units: ActionUnits, execute: int, times: Any) -> Outcome:
    """A round as an outcome: the accepted actions alone, or the target's chunk.

    Args:
        found: the round; it is the outcome's evidence.
        units: of the outcome's actions.
        execute: see :class:`~specact.families.flash.bundle.FlashSettings`.
        times: time that the device waited.
    """
    count = found.accepted or len(found.chunk)
    actions = units.from_environment(found.chunk[:count])
    origins = np.full(count, Origin.ACCEPTED if found.accepted else Origin.REPLACED, np.uint8)
    kept = float(found.accepted >= execute)
    return Outcome(actions, origins, execute * found.checked, found.accepted, times, found, kept)
