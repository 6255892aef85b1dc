"""A pair of policies as one value that a family fills, and its seams: drafter, target, verifier."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from specact.errors import MissError
from specact.observation import ObservationSpec, Window
from specact.rng import StepAddress
from specact.types import CLOCK, ActionUnits, Chunk, Clock, Miss, OffloadTimes, Outcome, Proposal, StepRecord, value

if TYPE_CHECKING:
    from specact.wire.exchange import Exchange

# Limit on the norm of a normalised chunk; demonstrated actions lie near [-1, 1]. Means, differences and squares of
# numbers up to this are finite in float32, so that computations after decoding cannot overflow.
_MAX_NORM = 1e15
# Normalised actions that differ by less are the same: some went through the environment's units and back.
_SAME = 1e-4

A = TypeVar("A")
B = TypeVar("B")
T_co = TypeVar("T_co", covariant=True)


class Drafter(Protocol):
    """Proposes a chunk of actions; the small policy on the device. One with a state is a :class:`Follower` as well."""

    def propose(self, window: Window, rng: np.random.Generator) -> Proposal:
        """The drafted chunk for one window, sampled with ``rng``."""
        ...


class Follower:
    """What is told of everything that its robot executes: a gate, or a stateful drafter; one instance per robot."""

    def reset(self) -> None:
        """Forgets the episode."""

    def on_action(self, drafted: NDArray[np.float32], executed: NDArray[np.float32]) -> None:
        """Records the drafted and the executed action of a control step, both ``[A]``, normalised."""

    def on_inference(self, record: StepRecord) -> None:
        """Records an inference, once, with its outcome and times; a late verdict is not known yet."""

    def on_verified(self, record: StepRecord) -> None:
        """Records an inference whose verification has arrived, at once or late; after :meth:`on_inference`."""


@value
class Pending(Generic[T_co]):
    """A request to the target whose result is not known yet.

    Attributes:
        result: the result, or a miss; blocks until it is there, at most until the target's deadline. Call it once.
        done: whether ``result`` would return without blocking; always True after the deadline.
        sent: whether the request could be sent.
    """

    result: Callable[[], T_co | Miss]
    done: Callable[[], bool] = lambda: True
    sent: bool = True

    def then(self, read: Callable[[T_co], B | Miss]) -> Pending[B]:
        """The request whose result is what ``read`` makes of this one's; a miss remains a miss."""

        def result() -> B | Miss:
            answer = self.result()
            return answer if isinstance(answer, Miss) else read(answer)

        return Pending(result, self.done, self.sent)


class Verifier(Protocol):
    """Turns a proposal into the actions to execute."""

    def submit(self, proposal: Proposal, address: StepAddress) -> Pending[Outcome]:
        """Requests the verification of a step; does not wait for it."""
        ...


@value
class Answer(Generic[A]):
    """The target's answer for one window, and the time of each stage."""

    value: A
    times: OffloadTimes


class Target(Protocol[A]):
    """The target policy, local or remote; A is its family's type of answer."""

    def submit(self, window: Window, address: StepAddress) -> Pending[Answer[A]]:
        """Requests the answer for one window; does not wait for it."""
        ...


class TargetPolicy(Protocol[T_co]):
    """The pure function behind a :class:`Target`."""

    def answer(self, window: Window, address: StepAddress) -> T_co:
        """The target's answer for a window; ``address`` selects the random stream of a target that samples."""
        ...


class LocalTarget(Generic[A]):
    """A :class:`Target` in this process; it is computed when its result is requested, and timed by the clock.

    It misses only where the policy asks a server of its own, and that misses.
    """

    def __init__(self, policy: TargetPolicy[A], clock: Clock = CLOCK) -> None:
        self._policy, self._clock = policy, clock

    def submit(self, window: Window, address: StepAddress) -> Pending[Answer[A]]:
        def result() -> Answer[A] | Miss:
            start = self._clock.now()
            try:
                value = self._policy.answer(window, address)
            except MissError as error:
                return Miss.of(error, OffloadTimes(target=self._clock.now() - start))
            return Answer(value, OffloadTimes(target=self._clock.now() - start))

        return Pending(result)


class TargetVerifier(ABC, Generic[A]):
    """A :class:`Verifier` that requests the target's answer and verifies the proposal on the device."""

    def __init__(self, target: Target[A]) -> None:
        self._target = target

    def submit(self, proposal: Proposal, address: StepAddress) -> Pending[Outcome]:
        request = self._target.submit(proposal.window, address)
        return request.then(lambda answer: self._outcome(answer, proposal, address))

    # Finite numbers can still overflow on their way to an action.
    @np.errstate(over="ignore", invalid="ignore")
    def _outcome(self, answer: Answer[A], proposal: Proposal, address: StepAddress) -> Outcome | Miss:
        return checked(self.judge(answer, proposal, address), proposal)

    @abstractmethod
    def judge(self, answer: Answer[A], proposal: Proposal, address: StepAddress) -> Outcome:
        """The outcome of a proposal, given the target's answer."""


def checked(outcome: Outcome, proposal: Proposal) -> Outcome | Miss:
    """The outcome, or a miss if its actions cannot be executed.

    In families without a probability of ``kept`` it is 1 if the outcome's actions are the proposed ones, else 0.
    """
    if not is_valid(outcome.actions):
        return Miss("invalid", outcome.times)
    if not math.isnan(outcome.kept):
        return outcome
    same = np.allclose(outcome.actions, proposal.actions[: len(outcome.actions)], rtol=0.0, atol=_SAME)
    return replace(outcome, kept=float(same))


def is_valid(actions: Chunk) -> bool:
    """Whether the normalised actions ``[n, A]`` are finite and their norm is small enough not to overflow later."""
    return bool(np.vdot(actions, actions) <= _MAX_NORM**2)


@dataclass(frozen=True)
class PairSource:
    """What a user named; another process loads the same pair with it, see :func:`specact.load_pair`.

    Attributes:
        name_or_path: of the pair.
        draft, target, decoding: where not the pair's own.
    """

    name_or_path: str
    draft: str | None = None
    target: str | None = None
    decoding: str = ""

    @property
    def cli_args(self) -> str:
        """As arguments of a command."""
        options = {"draft": self.draft, "target": self.target, "decoding": self.decoding}
        return self.name_or_path + "".join(f" --{name} {value}" for name, value in options.items() if value)


UNNAMED = PairSource("")


@dataclass(frozen=True)
class PairIdentity:
    """What a pair is called and where it comes from; a family's parts and the pair that they make share it.

    Attributes:
        env: name of the environment that it was made for; empty if unknown.
        fingerprint: joint fingerprint of both policies; a calibration is valid for this fingerprint alone.
        path: the folder that contains its calibrations, or None.
        source: how another process loads it.
    """

    name: str
    _: KW_ONLY
    env: str = ""
    fingerprint: str = ""
    path: Path | None = None
    source: PairSource = UNNAMED

    @property
    def identity(self) -> dict[str, Any]:
        """These values by name, for :class:`Pair`."""
        return {entry.name: getattr(self, entry.name) for entry in fields(PairIdentity)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair(PairIdentity, Generic[A]):
    """Draft and target of one robot; A is the type of the target's answers.

    Attributes:
        observation: union of the observations that draft and target need; the device stores these.
        units: of the actions that drafter, gate and verifier exchange.
        execute, overlap: how many actions of a chunk are executed before the next inference, and how actions that
            several chunks predict for the same control step are combined; ``rate_hz`` is that of control steps [Hz].
        drafter, verifier: make a new one for each robot; a verifier asks a local or remote target.
        target: the target in this process; raises BundleError where it is only on a server.
        exchange: what crosses the wire between a device and a server of the target.
        corrects: for how many control steps the drafter corrects a chunk of the target, so that a late verdict is of
            use after its own step; 0 if it does not.
    """

    observation: ObservationSpec
    units: ActionUnits
    execute: int
    rate_hz: float
    drafter: Callable[[], Drafter]
    target: Callable[[], TargetPolicy[A]]
    verifier: Callable[[Target[A]], Verifier]
    exchange: Exchange[Any]
    overlap: Literal["drop", "average"] = "drop"
    corrects: int = 0
    recommended_gates: Mapping[str, Any] = field(default_factory=dict)  # see specact.gates.settings
    parts: Any = None  # the family's own dataclass, whose method ``pair`` made this pair

    def composed(self, **changes: Any) -> Pair[A]:
        """The pair with other values of some fields of its :attr:`parts`."""
        pair: Pair[A] = replace(self.parts, **changes).pair()
        return pair
