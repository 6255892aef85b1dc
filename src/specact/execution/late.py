"""Late verification: the draft's chunk runs at once, and the verdict corrects what is left of it when it arrives."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from specact.envs.moving import MovingWorld
from specact.errors import ConfigError
from specact.execution.clock import WorldClock
from specact.execution.far import Route
from specact.execution.senses import NOW_S, Senses
from specact.execution.tally import Episode, Tally
from specact.gates.gate import Gate
from specact.gates.settings import GateSettings
from specact.links.model import Link
from specact.policies.bundle import Bundle
from specact.rng import Role, StepStreams, stream
from specact.sampling import sample_codes
from specact.types import Proposal
from specact.verifiers import LocalTarget, SpeculativeVerifier, Verification


@dataclass(frozen=True)
class Late:
    """How a pair verifies late, and what its parts take.

    Attributes:
        gate: the calibrated gate.
        link: between device and target.
        draft_s, target_s: of one inference of each [s]; the robot waits for the draft's only.
        max_age_s: a verdict on an observation older than this is not used, > 0.

    Raises:
        ConfigError: for an age out of range.
    """

    gate: GateSettings
    link: Link
    draft_s: float
    target_s: float
    max_age_s: float = inf

    def __post_init__(self) -> None:
        if not self.max_age_s > 0.0:
            raise ConfigError(f"max_age_s of a late verdict must be above 0, got {self.max_age_s}")


@dataclass(frozen=True)
class Verdicts:
    """What became of the steps that a gate wanted verified.

    Attributes:
        wanted: steps that the gate would transmit.
        sent: of them, those sent; the others came while a verdict was still under way.
        in_time: verdicts that found actions of their chunk still to be played, and were fresh enough.
        replaced: actions that were played as a verdict had them; many are what the draft had drawn too.
    """

    wanted: int
    sent: int
    in_time: int
    replaced: int


def run_late(
    world: MovingWorld, bundle: Bundle, late: Late, *, start: int, seed: int, episode: int
) -> tuple[Episode, Verdicts]:
    """Runs one episode to its success, its loss or its time limit.

    What is drafted and what is decided is drawn as in :class:`~specact.agent.SpeculativePolicy`; with a verdict that
    takes no time the actions are the same. ``transmission_rate`` counts what was sent.

    Args:
        world: where.
        bundle: the pair.
        late: how it is used.
        start: the environment's seed.
        seed, episode: address of all random streams.

    Raises:
        ConfigError: for a bundle that averages over chunks: a verdict replaces what is left of one.
    """
    if bundle.spec.overlap != "drop":
        raise ConfigError(f"the bundle {bundle.name!r} averages over chunks, which late verification cannot replace")
    world.reset(start)
    robot = _Robot(Senses(world, bundle.spec), bundle, late, seed, episode)
    while not world.done:
        robot.step()
    sent = robot.tally.episode(episode, robot.senses)
    return sent, Verdicts(robot.wanted, robot.sent, robot.in_time, robot.replaced)


@dataclass(frozen=True)
class _Flight:
    """A step on its way to the target and back."""

    proposal: Proposal
    step: int
    seen_s: float
    arrives_s: float


class _Robot:
    """The device's loop; one chunk of the draft's in play, at most one verdict under way."""

    def __init__(self, senses: Senses, bundle: Bundle, late: Late, seed: int, episode: int) -> None:
        self.senses, self.tally = senses, Tally()
        self.wanted = self.sent = self.in_time = self.replaced = 0
        self._bundle, self._late, self._episode = bundle, late, episode
        self._streams = StepStreams(seed, robot=0)
        self._gate: Gate = late.gate.build(bundle)
        self._gate.reset()
        self._verifier = SpeculativeVerifier(LocalTarget(bundle.target, WorldClock(senses)), bundle.tokenizer)
        self._route = Route.of_codes(late.link, bundle.spec, stream(seed, Role.LINK, episode=episode))
        self._step, self._played = -1, bundle.spec.execute
        self._drafted = self._executed = np.zeros((0, bundle.spec.actions), np.float32)
        self._flight: _Flight | None = None

    def step(self) -> None:
        """One action; where the chunk is at its end, first a new one."""
        self._land()
        if self._played >= self._bundle.spec.execute:
            self._infer()
            self._land()
        drafted, executed = self._drafted[self._played], self._executed[self._played]
        self._played += 1
        self._gate.update(drafted, executed)
        self.senses.play(self._bundle.tokenizer.to_environment(executed))

    def _infer(self) -> None:
        seen_s, window = self.senses.world.now, self.senses.window()
        draft = self._bundle.draft.infer(window)
        self.senses.wait(self._late.draft_s)
        self._step += 1
        codes = sample_codes(draft, self._streams(Role.DRAFT, self._episode, self._step))
        chunk = self._bundle.tokenizer.decode(codes, draft.offsets)
        proposal = Proposal(window, draft, codes, chunk)
        wanted = self._gate.decide(proposal, self._streams(Role.GATE, self._episode, self._step)).transmit
        sent = wanted and self._flight is None
        if sent:
            now = self.senses.world.now
            arrives_s = now + self._route.round_trip_s(now) + self._late.target_s
            self._flight = _Flight(proposal, self._step, seen_s, arrives_s)
        self.wanted += wanted
        self.sent += sent
        self._drafted, self._executed, self._played = chunk, chunk, 0
        self.tally.inferred(self._late.draft_s, sent)
        if not self.senses.world.done:
            self.tally.began(self.senses.world.now - seen_s)

    def _land(self) -> None:
        """Takes the verdict that has arrived; it counts from its own time index on, and only for its own chunk."""
        flight, now = self._flight, self.senses.world.now
        if flight is None or flight.arrives_s > now + NOW_S:
            return
        self._flight = None
        left = self._bundle.spec.execute - self._played
        if flight.step != self._step or not left or now - flight.seen_s > self._late.max_age_s:
            return
        rng = self._streams(Role.VERIFY, self._episode, flight.step)
        verified = self._verifier.verify(flight.proposal, rng)
        assert isinstance(verified, Verification), "a target in this process never misses"
        self._executed = np.concatenate([self._executed[: self._played], verified.chunk[self._played :]])
        self.in_time += 1
        self.replaced += left
