"""A token policy as the target of a pair: how its chunks are drafted on the device, and verified by the target.

Here are the compositions that need nothing but a policy and its own drafters. Those of Spec-VLA's head on the device,
KERV and HeiSD extend :class:`Decoding` and :class:`TokenDrafter`, see :mod:`specact.systems`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from specact.errors import ConfigError
from specact.families.chunks.pair import joint_observation
from specact.families.chunks.policy import ChunkPolicy, resized
from specact.families.tokens.policy import DecodingRequest, Prefilled, TokenPolicy, to_actions, to_tokens
from specact.families.tokens.speculative import UNLIMITED, Acceptance, Array, Decoded, Tokens, relaxed
from specact.families.tokens.verify import TokenExchange, TokenVerifier
from specact.observation import Window
from specact.pair import Follower, Pair, PairIdentity
from specact.types import ActionUnits, Chunk, Origin, Proposal, StepRecord


class TokenDrafter(Follower):
    """Proposes candidates; the proposed actions are the most likely one. Systems extend it.

    Where it ends, or without one, they are the draft's chunk if there is a draft, else the last executed action
    repeated, or zeros (the middle of the demonstrated range). ``executed`` are the last executed actions, ``[A]`` each,
    at most :attr:`history`.

    Raises:
        ConfigError: if the decoding needs drafters or a draft that are not there.
    """

    history = 1

    def __init__(self, parts: TokenParts, decoding: Decoding) -> None:
        if parts.drafters is None and decoding.learned:
            raise ConfigError(
                "this decoding needs drafters that learned from the target, and there are none beside its bundle; "
                'train them: specact train with a recipe of kind = "drafters"'
            )
        if parts.draft is None and decoding.proposes == "draft":
            raise ConfigError("this decoding needs a draft policy; name one: --draft NAME")
        self.parts, self.decoding = parts, decoding
        self.executed: deque[Array] = deque(maxlen=self.history)

    @property
    def stateless(self) -> bool:
        """Whether what it proposes depends on the window alone."""
        return self.decoding.proposes in ("draft", "nothing") and self.parts.draft is not None

    def reset(self) -> None:
        self.executed.clear()

    def on_action(self, drafted: Array, executed: Array) -> None:
        self.executed.append(executed)

    def on_verified(self, record: StepRecord) -> None:
        assert record.outcome is not None
        self.verified(record.outcome.evidence)

    def verified(self, decoded: Decoded) -> None:
        """Learns from an answer."""

    def propose(self, window: Window, rng: np.random.Generator) -> Proposal:
        request = self.request(window, rng)
        actions = self._actions(request.candidates, window, rng)
        return Proposal(window, actions, request, Origin.RETRIEVED if request.retrieved else Origin.DRAFTED)

    def request(self, window: Window, rng: np.random.Generator) -> DecodingRequest:
        """The request to the target, the proposal's evidence; its first candidate is proposed."""
        return DecodingRequest(self.candidates(window, rng), self.decoding.then, self.rule(), tail=self.tail())

    def candidates(self, window: Window, rng: np.random.Generator) -> Tokens:
        """Candidates for a window, ``[K, T]``."""
        if self.decoding.proposes == "draft":
            return _tokens(self._drafted(window, rng))
        if self.decoding.proposes == "last" and self.executed:
            return _tokens(self.repeated())
        return np.zeros((0, self.parts.policy.networks.length), np.int64)

    def rule(self) -> Acceptance:
        """The rule for the next request."""
        return self.within(self.decoding.bins)

    def within(self, bins: int, groups: Sequence[int] | None = None, total: int = UNLIMITED) -> Acceptance:
        """The rule :func:`relaxed`, in which a gripper's tokens are strict, unless the decoding says otherwise."""
        spec, drafters = self.parts.policy.spec, self.parts.drafters
        strict = () if drafters is None or self.decoding.uniform else drafters.settings.strict
        return relaxed(bins, spec.chunk * spec.actions, spec.actions, strict, groups, total)

    def tail(self) -> Tokens | None:
        """The chunk ``[T]`` whose tokens replace those from the first rejected one on, or None."""
        return None

    def _actions(self, candidates: Tokens, window: Window, rng: np.random.Generator) -> Chunk:
        spec = self.parts.policy.spec
        if not len(candidates) or candidates[0, -1] < 0:
            rest = self.repeated() if self.parts.draft is None else self._drafted(window, rng)
            if not len(candidates):
                return rest
            candidates = np.where(candidates[:1] < 0, _tokens(rest), candidates[:1])
        return to_actions(candidates[0]).reshape(spec.chunk, spec.actions)

    def repeated(self) -> Chunk:
        """The last executed action as a chunk ``[H, A]``; zeros before the first."""
        spec = self.parts.policy.spec
        last = self.executed[-1] if self.executed else np.zeros(spec.actions, np.float32)
        return np.repeat(last[None], spec.chunk, axis=0)

    def _drafted(self, window: Window, rng: np.random.Generator) -> Chunk:
        draft = self.parts.draft
        assert draft is not None
        chunk = draft.infer(draft.spec.observation.select(window), rng)
        return self.parts.units.from_environment(resized(chunk, self.parts.policy.spec.chunk))


@dataclass(frozen=True)
class Decoding:
    """How chunks of tokens are drafted and accepted; systems extend it, and have other candidates.

    Attributes:
        about: one line for a table.
        proposes: the device's candidates: ``nothing``, a ``draft`` policy's chunk, the ``last`` action; or a system's.
        then: the target's own drafter if the device proposes nothing, or after its candidates were rejected: ``none``,
            ``bigram``, or ``head`` (Spec-VLA's).
        bins, uniform: tolerance of a token [bins], 0 is strict; whether a gripper has it, too (Spec-VLA's paper).
        execute: actions of a chunk that are executed before the next inference; None: all.
        tail_actions: actions that a tail fills at most; the executed chunk ends with them.
        gate, rate_of: decides which steps are verified; of a random one the decoding whose achieved rate is used.
        drafts: the class of the drafter on the device.
    """

    about: str
    proposes: str = "nothing"
    then: str = "none"
    bins: int = 0
    uniform: bool = False
    execute: int | None = None
    tail_actions: int = 1
    gate: str = "always"
    rate_of: str | None = None
    drafts: ClassVar[type[TokenDrafter]] = TokenDrafter

    @property
    def learned(self) -> bool:
        """Whether it needs what was fitted to the target."""
        return self.then != "none" or (self.bins > 0 and not self.uniform)


GREEDY = Decoding("greedy decoding, token by token")


def _tokens(actions: Chunk) -> Tokens:
    """The tokens ``[1, T]`` of a normalised chunk ``[H, A]``."""
    return to_tokens(actions).reshape(1, -1)


@dataclass(frozen=True)
class TokenParts(PairIdentity):
    """A token policy as the target, which is greedy.

    Attributes:
        policy: the target, with drafters of its own.
        drafters: a :class:`~specact.systems.tokens.DrafterBundle`, what was fitted to it, or None.
        draft: a policy on the device, or None.
        decoding: of verified steps, with its source of candidates.
        target_fingerprint: of the target alone.
    """

    policy: TokenPolicy
    drafters: Any = None
    draft: ChunkPolicy | None = None
    decoding: Decoding = GREEDY
    target_fingerprint: str = ""

    @property
    def units(self) -> ActionUnits:
        """Units of the tokens: the outermost bins are -1 and 1."""
        return ActionUnits(self.policy.units.centre, self.policy.units.scale)

    def target(self) -> TokenPolicy:
        """The target; BundleError if it was exported without its decoder."""
        self.policy.networks.check_decodes()
        return self.policy

    def pair(self) -> Pair[Prefilled]:
        """As a pair; ConfigError for a draft that is incompatible with the target."""
        spec, execute = self.policy.spec, self.decoding.execute
        return Pair(
            **self.identity, observation=joint_observation(self.draft, spec), units=self.units,
            execute=spec.chunk if execute is None else execute, rate_hz=spec.rate_hz, parts=self,
            drafter=lambda: self.decoding.drafts(self, self.decoding), target=self.target,
            verifier=lambda target: TokenVerifier(target, self), exchange=TokenExchange(self),
        )  # fmt: skip
