"""ADAHI's algorithm: draft, gate, verify, act."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from specact.chunks import ChunkPlayer
from specact.clock import Clock, RealClock
from specact.errors import ConfigError, unknown_name
from specact.gates.gate import Gate
from specact.policies.bundle import Bundle
from specact.policies.policy import CodePolicy
from specact.policies.window import Observation, ObservationWindow
from specact.rng import Role, StepStreams
from specact.sampling import sample_codes
from specact.types import Proposal, StageTimes, StepRecord, Window
from specact.verifiers import SpeculativeVerifier, Verification, Verifier

Offset = Literal["target", "draft", "stale"]


class SpeculativePolicy:
    """A policy pair on a robot: the draft acts, the gate decides when the target is asked (ADAHI, Algorithm 1).

    Every method is a composition: draft only is the gate ``Never``, hybrid ``Always``, ADAHI ``ActionDeviation``;
    the remote target is ``Always`` with a :class:`~specact.verifiers.TargetSampler`.

    Args:
        bundle: the policies and what they agree on.
        gate: decides which steps go to the target; it belongs to this robot alone.
        draft: instead of the bundle's.
        verifier: instead of exact speculative sampling with the bundle's target.
        offset: which offset a verified step gets. ``target``: the target's, for the final codes (the action then
            follows the target's law); ``draft``: the draft's, for the final codes; ``stale``: the draft's for the codes
            it drafted, even where they were replaced. The last two are ablations.
        seed, robot: address of the random streams; two robots with one seed get different ones.
        clock: what the step times are read from.
    """

    def __init__(
        self,
        bundle: Bundle,
        gate: Gate,
        *,
        draft: CodePolicy | None = None,
        verifier: Verifier | None = None,
        offset: Offset = "target",
        seed: int = 0,
        robot: int = 0,
        clock: Clock | None = None,
    ) -> None:
        if offset not in get_args(Offset):
            raise unknown_name("offset", offset, get_args(Offset))
        if seed < 0 or robot < 0:
            raise ConfigError(f"seed and robot must not be negative, got {seed} and {robot}")
        self.gate, self.clock = gate, RealClock() if clock is None else clock
        self.record: StepRecord | None = None
        self._draft = bundle.draft if draft is None else draft
        self._verifier = SpeculativeVerifier(bundle.target, self.clock) if verifier is None else verifier
        self._tokenizer, self._offset = bundle.tokenizer, offset
        self._streams = StepStreams(seed, robot)
        self._window = ObservationWindow(bundle.spec)
        self._player = ChunkPlayer(bundle.spec.execute, bundle.spec.overlap)
        self.reset(episode=0)

    def reset(self, episode: int) -> None:
        """Starts an episode; its number is part of the random streams' address."""
        self._episode, self._step = episode, 0
        self._window.reset()
        self._player.reset()
        self.gate.reset()
        self.record = None

    @property
    def wants_inference(self) -> bool:
        """Whether the next control step needs the policies, or plays on from the last chunk."""
        return self._player.empty

    def act(self, observation: Observation) -> NDArray[np.float32]:
        """One control step: the action ``[A]`` to execute now, in the environment's units.

        Args:
            observation: ``state [O]``, or a mapping with ``state``, ``goal`` and ``image`` as the bundle's spec says.

        Raises:
            ObservationError: if the observation cannot be used; nothing has changed then.
        """
        return self.act_on(self.observe(observation))

    def observe(self, observation: Observation) -> Window:
        """The first half of :meth:`act`: the window that ends with this observation."""
        return self._window.push(observation)

    def act_on(self, window: Window) -> NDArray[np.float32]:
        """The second half of :meth:`act`."""
        if self._player.empty:
            self.record = self._infer(window)
            self._player.put(self.record.proposal.chunk, self.record.chunk)
        drafted, executed = self._player.next()
        self.gate.update(drafted, executed)
        return self._tokenizer.to_environment(executed)

    def _infer(self, window: Window) -> StepRecord:
        started = self.clock.now()
        draft = self._draft.infer(window)
        drafted = self.clock.now()
        codes = sample_codes(draft, self._streams(Role.DRAFT, self._episode, self._step))
        proposal = Proposal(window, draft, codes, self._tokenizer.decode(codes, draft.offsets))
        decision = self.gate.decide(proposal, self._streams(Role.GATE, self._episode, self._step))
        decided = self.clock.now()
        chunk, verified = proposal.chunk, None
        if decision.transmit:
            verified = self._verifier.verify(proposal, self._streams(Role.VERIFY, self._episode, self._step))
            codes, chunk = verified.verdict.codes, self._decode(proposal, verified)
        finished = self.clock.now()
        network, target = (verified.network, verified.target_time) if verified else (0.0, 0.0)
        record = StepRecord(
            episode=self._episode,
            step=self._step,
            proposal=proposal,
            decision=decision,
            verdict=verified.verdict if verified else None,
            target=verified.target if verified else None,
            codes=codes,
            chunk=chunk,
            times=StageTimes(
                draft=drafted - started,
                gate=decided - drafted,
                network=network,
                target=target,
                finish=finished - decided - network - target,
            ),
        )
        self._step += 1
        return record

    def _decode(self, proposal: Proposal, verified: Verification) -> NDArray[np.float32]:
        codes = verified.verdict.codes
        if self._offset == "target":
            return self._tokenizer.decode(codes, verified.target.offsets)
        if self._offset == "draft":
            return self._tokenizer.decode(codes, proposal.draft.offsets)
        stale = proposal.chunk - self._tokenizer.base(proposal.codes)
        return self._tokenizer.base(codes) + stale
