"""Two chunk policies as a pair: executes the draft's chunk, the target's, or a prefix of the first, then the second.

This is not exact: accepted actions differ from the target's by up to the threshold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from specact.errors import BundleError, ConfigError
from specact.families.chunks.policy import Chunk, ChunkPolicy, ChunkSpec, InfersChunks
from specact.families.chunks.wire import ChunkExchange
from specact.observation import ObservationSpec, Window
from specact.pair import UNNAMED, Pair, PairSource
from specact.rng import Role, StepAddress, StepStreams
from specact.types import Origin, Outcome, Proposal
from specact.units import ActionUnits
from specact.verification import Answer, Target, TargetVerifier


@dataclass(frozen=True)
class ChunkParts:
    """A chunk policy as the draft, and any other as the target.

    Attributes:
        name: of the pair.
        draft: the small policy.
        units: of the actions, also for distances between actions.
        target_spec: of the local or remote target.
        load_target: loads the target into this process on first use; None if it is only on a server.
        execute: how many actions of a chunk are executed before the next inference.
        accept_within: the drafted actions are executed up to the first one that is further from the target's
            [root mean square over the action's dimensions, in normalised units]; 0 takes the target's chunk whole.
        overlap, env, fingerprint, path, source: see :class:`~specact.pair.Pair`.

    Raises:
        ConfigError: for incompatible policies, or a number out of range.
    """

    name: str
    draft: ChunkPolicy
    units: ActionUnits
    target_spec: ChunkSpec
    load_target: Callable[[], ChunkPolicy] | None
    execute: int
    accept_within: float = 0.0
    overlap: Literal["drop", "average"] = "drop"
    env: str = ""
    fingerprint: str = ""
    path: Path | None = None
    source: PairSource = UNNAMED

    def __post_init__(self) -> None:
        draft, target = self.draft.spec, self.target_spec
        check_one_robot(draft, target)
        _ = draft.observation.union(target.observation)
        if {self.units.centre.shape, self.units.scale.shape} != {(draft.actions,)}:
            raise ConfigError(f"the range of the actions must be that of {draft.actions} actions")
        most = min(draft.chunk, target.chunk)
        if not 1 <= self.execute <= most:
            raise ConfigError(f"execute must lie between 1 and {most}, the shorter of both chunks; got {self.execute}")
        if not self.accept_within >= 0.0:
            raise ConfigError(f"accept_within must be at least 0, got {self.accept_within}")

    @cached_property
    def target(self) -> ChunkPolicy:
        """The target as a chunk policy.

        Raises:
            BundleError: where it is only on a server.
        """
        if self.load_target is None:
            raise BundleError(
                f"the target of {self.name} is only on its server; connect to it, as with specact run --server URL"
            )
        return self.load_target()

    def pair(self) -> Pair[Chunk]:
        """As a pair."""
        seen = self.draft.spec.observation
        return Pair(
            name=self.name, observation=seen.union(self.target_spec.observation), units=self.units,
            execute=self.execute, rate_hz=self.draft.spec.rate_hz, overlap=self.overlap, env=self.env,
            fingerprint=self.fingerprint, path=self.path, source=self.source, parts=self,
            drafter=lambda: ChunkDrafter(self.draft, seen, self.units),
            target=lambda: ChunkAnswers(self.target),
            verifier=lambda target: ChunkVerifier(target, self.units, self.execute, self.accept_within),
            exchange=ChunkExchange(self.target_spec, self.name, self.fingerprint, lambda: self.target),
        )  # fmt: skip


def check_one_robot(draft: ChunkSpec, target: ChunkSpec) -> None:
    """Refuses policies of different robots.

    Raises:
        ConfigError: for different numbers of actions, or control rates.
    """
    if (draft.actions, draft.rate_hz) != (target.actions, target.rate_hz):
        raise ConfigError(
            f"the draft has {draft.actions} actions at {draft.rate_hz:g} Hz and the target {target.actions} at "
            f"{target.rate_hz:g} Hz; they must be those of one robot"
        )


class ChunkDrafter:
    """Proposes a chunk policy's chunk, see :class:`~specact.pair.Drafter`.

    Args:
        policy: the draft.
        observation: the draft's observation spec.
        units: of the proposed actions.
    """

    def __init__(self, policy: InfersChunks, observation: ObservationSpec, units: ActionUnits) -> None:
        self._policy, self._observation, self._units = policy, observation, units

    def propose(self, window: Window, rng: np.random.Generator) -> Proposal:
        """The drafted chunk; there is no other evidence."""
        chunk = self._policy.infer(self._observation.select(window), rng)
        return Proposal(window, self._units.from_environment(chunk))


class ChunkAnswers:
    """A chunk policy as a :class:`~specact.verification.TargetPolicy`, with the random stream of the step.

    Args:
        policy: the target.
    """

    def __init__(self, policy: ChunkPolicy) -> None:
        self._policy, self._streams = policy, StepStreams()

    def answer(self, window: Window, address: StepAddress) -> Chunk:
        """The chunk, in the environment's units; as on a server, only its own fields are passed, and it may be NaN."""
        seen = self._policy.spec.observation.select(window)
        return self._policy.infer_batch([seen], [self._streams(Role.VERIFY, address)])[0]


class ChunkVerifier(TargetVerifier[Chunk]):
    """Accepts drafted actions up to the first that is too far from the target's; the rest are the target's.

    Args:
        target: local or remote.
        units: of the proposed actions.
        execute, accept_within: see :class:`ChunkParts`.
    """

    def __init__(self, target: Target[Chunk], units: ActionUnits, execute: int, accept_within: float = 0.0) -> None:
        super().__init__(target)
        self._units, self._execute, self._within = units, execute, accept_within

    def judge(self, answer: Answer[Chunk], proposal: Proposal, address: StepAddress) -> Outcome:
        """See :class:`~specact.verification.TargetVerifier`; as many actions as both have."""
        wanted = self._units.from_environment(answer.value)
        actions, accepted = replaced_after_prefix(proposal.actions, wanted, self._within)
        origins = np.full(len(actions), Origin.REPLACED, np.uint8)
        origins[:accepted] = Origin.ACCEPTED
        # Actions beyond the executed ones do not matter.
        kept = float(accepted >= self._execute)
        return Outcome(actions, origins, len(actions), accepted, answer.times, wanted, kept)


def replaced_after_prefix(drafted: Chunk, wanted: Chunk, within: float) -> tuple[Chunk, int]:
    """The accepted prefix of the drafted actions and then the wanted ones, as many as both have, and its length.

    Args:
        drafted, wanted: ``[n, A]`` and ``[m, A]``, normalised.
        within: see :func:`accepted_prefix`.
    """
    count = min(len(wanted), len(drafted))
    accepted = accepted_prefix(drafted[:count], wanted[:count], within)
    return np.concatenate([drafted[:accepted], wanted[accepted:count]]), accepted


def chunk_distance(drafted: Chunk, wanted: Chunk) -> float:
    """Root mean square over the action's dimensions, mean over the actions, of two chunks ``[n, A]``."""
    return float(np.sqrt(np.square(drafted - wanted).mean(axis=-1)).mean())


def accepted_prefix(drafted: Chunk, wanted: Chunk, within: float) -> int:
    """Number of drafted actions before the first that is further than ``within`` from the target's.

    Args:
        drafted, wanted: ``[n, A]``, normalised.
        within: root mean square over the action's dimensions; 0 accepts none, equal actions included.
    """
    if within <= 0.0:
        return 0
    distance = np.sqrt(np.square(drafted - wanted).mean(axis=-1))
    beyond = np.flatnonzero(~(distance <= within))
    return int(beyond[0]) if beyond.size else len(drafted)
