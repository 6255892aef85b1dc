"""Realtime-VLA FLASH (arXiv 2605.13778): a flow policy checks drafted chunks, and denoises where a check fails.

A block drafts a chunk x from the encoder's tokens. The flow's expert v, which runs from t = 0, noise, to t = 1, data,
estimates the clean chunk from x with a share s of noise, in one batched pass at K levels s, and the prefix of drafted
actions on which all estimates agree with the draft is executed::

    x_k  = s_k eps + (1 - s_k) x                                  the same noise eps at every level
    x^_k = x_k + s_k v(x_k, 1 - s_k)                              one-step estimates of the clean chunk
    d_kh = rms over the dimensions of (x^_kh - x_h)               without grippers, in the flow's units
    L    = min_k sum_h prod_{j <= h} 1[d_kj <= delta]             accepted actions

A round is full, i.e. denoised, at the start, after ``period`` rounds without a full one, and where L = 0. Guards: if an
estimate moves a gripper L = 0; the prefix ends before a drafted action that moves one, and the next round is full.

We changed: the target checks on a new prefix cache, not on that of the last full round, so that a server needs no
state; if L = 0 the full round follows in the same request; levels and delta can be fitted to a policy. The check
measures whether the flow leads back to the draft, not whether the draft is correct: with little noise, a smooth expert
accepts anything. This has to be measured for each policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from specact.bundle.network import CPU, Compute, Network
from specact.errors import ConfigError, WireError
from specact.families.chunks.flow import Array, FlowPolicy
from specact.families.chunks.pair import accepted_length
from specact.families.chunks.policy import ChunkExchange, filled, resized
from specact.observation import Window
from specact.pair import Answer, Follower, Target, TargetVerifier
from specact.records import Count, NotNegative, PositiveShare, Record, WholeNumber, check_fields
from specact.rng import Role, StepAddress, StepStreams, streams
from specact.types import Chunk, OffloadTimes, Origin, Outcome, Proposal, StepRecord, value
from specact.wire.arrays import Arrays, ArraySpec, Layout
from specact.wire.exchange import Kind, Request
from specact.wire.messages import bad

if TYPE_CHECKING:
    from specact.systems.flow import FlowParts

Grippers = NDArray[np.bool_]
Levels = Annotated[tuple[PositiveShare, ...], Meta(min_length=1)]
_NO_DEVIATION = np.zeros((0, 0), np.float32)


class Check(Record, frozen=True):
    """How drafted actions are checked.

    Attributes:
        levels: noise levels s in (0, 1]; all are evaluated in one batch.
        within: delta, in units in which demonstrated actions have variance 1; 0 accepts none.
        guarded: whether a change of a gripper ends the accepted prefix.
    """

    levels: Levels = (0.1, 0.05)
    within: NotNegative = 0.15
    guarded: bool = True


def noised(drafted: Array, noise: Array, levels: Array) -> Array:
    """``x_k = s_k eps + (1 - s_k) x``, ``[K, H, W]``, of the drafted chunk ``[H, W]``, at levels ``[K]``."""
    share = levels[:, None, None]
    return share * noise + (1.0 - share) * drafted


def implied(chunks: Array, velocities: Array, levels: Array) -> Array:
    """``x^_k = x_k + s_k v(x_k, 1 - s_k)``, all ``[K, H, W]``, the levels ``[K]``."""
    return chunks + levels[:, None, None] * velocities


def deviations(drafted: Array, estimates: Array, grippers: Sequence[int] = ()) -> Array:
    """``d_kh``, ``[K, H]``: root mean square over the dimensions, without grippers unless there are no others."""
    kept = [dimension for dimension in range(drafted.shape[-1]) if dimension not in grippers]
    missing = (estimates - drafted)[..., kept or slice(None)]
    return np.asarray(np.sqrt(np.square(missing).mean(axis=-1)))


def first_switch(closed: Grippers, held: Grippers | None) -> int:
    """The first step of a chunk ``[H, G]`` at which a gripper differs from its state ``[G]``; H if there is none.

    Before the first action the state is unknown, None, and that of the first step is taken.
    """
    before = closed[:1] if held is None else held[None]
    switched = np.flatnonzero((closed != before).any(axis=1))
    return int(switched[0]) if switched.size else len(closed)


def judge(
    check: Check, deviation: Array, drafted: Array, estimates: Array, grippers: Sequence[int], middle: Array,
    held: Grippers | None,
) -> tuple[int, bool]:  # fmt: skip
    """How much of a drafted chunk is accepted, and whether a guard ended it: then the next round must be full.

    Args:
        check: its settings.
        deviation: see :func:`deviations`.
        drafted, estimates: ``[n, W]`` and ``[K, n, W]``, of the actions that may be executed, in the flow's units.
        grippers: the G gripper dimensions.
        middle: threshold of each gripper, ``[G]``, in the flow's units: above it a gripper is closed.
        held: see :func:`first_switch`.
    """
    accepted, index = accepted_length(deviation, check.within), list(grippers)
    if not check.guarded or not index:
        return accepted, False
    if any(first_switch(chunk[:, index] > middle, held) < len(drafted) for chunk in estimates):
        return 0, True
    switch = first_switch(drafted[:, index] > middle, held)
    return min(accepted, switch), switch < accepted


@dataclass(frozen=True)
class FlashSettings:
    """Settings of a target's rounds.

    Attributes:
        execute: largest number of actions of a chunk that are executed before the next round.
        period: largest number of checked rounds between two full ones; 0 for any number.
        grippers: dimensions of an action that are grippers: excluded from distances, and guarded.
        levels, within: of a :class:`Check` fitted to held-out observations.
    """

    execute: Count
    grippers: tuple[WholeNumber, ...] = ()
    period: WholeNumber = 0
    levels: Levels = (0.1, 0.05)
    within: NotNegative = 0.15

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Rounds:
    """How chunks are drafted and checked; other systems and controls extend it.

    Attributes:
        proposes: who drafts: FLASH's block, a draft policy, the rest of the last chunk, or nobody: all rounds are full.
        on_device: whether the block runs on the device, which needs the target's encoder for that.
        levels, within, guarded: of the :class:`Check`; levels and delta are those of :class:`FlashSettings` if None.
        periodic, full: whether full rounds are forced with the settings' period, and whether no others are requested.
        steps: Euler steps of a full round.
        gate, rate_of: the gate's name; for random ones the composition whose transmission rate they have.
    """

    about: str
    proposes: Literal["nothing", "block", "last", "policy"] = "nothing"
    on_device: bool = False
    levels: tuple[float, ...] | None = (0.1, 0.05)
    within: float | None = 0.15
    guarded: bool = True
    periodic: bool = True
    full: bool = False
    steps: int = 10
    gate: str = "always"
    rate_of: str | None = None
    # Whether its verifier keeps a state of the robot, so that it needs the target in its own process.
    local: ClassVar[bool] = False

    def verifier(self, parts: FlowParts, target: Target[RoundAnswer]) -> FlashVerifier:
        """A new one, of one robot, for a target in this process; :class:`FlashExchange` is for a server."""
        return FlashVerifier(target, parts)


@value
class RoundRequest:
    """The request for the next chunk: all inputs of the target besides the observation; the evidence of a proposal.

    Attributes:
        full: whether a full round is requested, without a check.
        drafted: the chunk to check ``[H, A]``, in the environment's units; None lets the target's own block draft.
        check, steps: its settings; and Euler steps of a full round, at least 1.
        held: whether each gripper is closed, ``[G]``; None before the first action.
    """

    full: bool
    drafted: Chunk | None = None
    check: Check = Check()
    steps: int = 10
    held: Grippers | None = None


@value
class Round:
    """The result of a round.

    Attributes:
        chunk: ``[H, A]``, in the environment's units: the drafted one, of which ``accepted`` actions may be executed,
            or if that is 0 the target's own.
        checked: whether a chunk was checked; if none of it was accepted, a full round followed.
        switches: whether a gripper's change ended the accepted prefix, so that the next round must be a full one.
        deviation: of the check, ``[K, n]``; empty without one, and from a server.
        reused: of each camera, the tokens whose part of an earlier prefix cache was used again; None in a new cache.
    """

    chunk: Chunk
    accepted: int
    checked: bool
    switches: bool
    deviation: Array = field(default_factory=lambda: _NO_DEVIATION)
    reused: Mapping[str, NDArray[np.bool_]] | None = None

    @property
    def full(self) -> bool:
        """Whether the chunk is the target's own."""
        return self.accepted == 0

    @property
    def reused_share(self) -> float:
        """Share of the cameras' tokens that were reused."""
        return float(np.concatenate(list(self.reused.values())).mean()) if self.reused else 0.0

    def outcome(self, parts: FlowParts, times: OffloadTimes) -> Outcome:
        """The accepted actions alone, or the target's chunk; the round is the outcome's evidence."""
        count, execute = self.accepted or len(self.chunk), parts.settings.execute
        origins = np.full(count, Origin.ACCEPTED if self.accepted else Origin.REPLACED, np.uint8)
        actions, kept = parts.units.from_environment(self.chunk[:count]), float(self.accepted >= execute)
        return Outcome(actions, origins, execute * self.checked, self.accepted, times, self, kept)


@value
class RoundAnswer:
    """A target's answer to a window: its round is computed when the request is known.

    ``cache`` is the window's prefix cache, where it is known already.
    """

    target: FlashTarget
    window: Window
    address: StepAddress
    cache: Any = None

    # Extreme observations or drafts overflow to NaN.
    @np.errstate(over="ignore", invalid="ignore")
    def round(self, request: RoundRequest) -> Round:
        """One round, full or checked; a full one uses the same noise as the policy's own answer at this address.

        Raises:
            ConfigError: if the request needs a block that is missing.
        """
        target, policy, cache = self.target, self.target.policy, self.cache
        rng = target.streams(Role.VERIFY, self.address)
        noise, tokens, deviation = policy.noise(rng), None, _NO_DEVIATION
        drafted = request.drafted
        if not request.full and drafted is None:
            if target.block is None:
                raise ConfigError("this target has no block that drafts; let the device draft")
            tokens = policy.networks.tokens([self.window])
            drafted = policy.to_environment(target.block.chunks(tokens)[0])
        if cache is None:
            cache = policy.networks.cache([self.window], tokens)
        if not request.full:
            assert drafted is not None
            accepted, switches, deviation = target.check(policy.to_flow(drafted), policy.noise(rng), cache, request)
            if accepted:
                return Round(drafted, accepted, True, switches, deviation)
        chunk = policy.to_environment(policy.denoised(noise[None], cache, request.steps)[0])
        return Round(chunk, 0, not request.full, False, deviation)


class Block:
    """The drafting network: from the target encoder's ``tokens``, of N and W, to a chunk, of H and A."""

    def __init__(self, path: Path, chunk: tuple[int, int], *, compute: Compute = CPU) -> None:
        inputs, outputs = {"tokens": ("batch", "N", "W")}, {"chunks": ("batch", *chunk)}
        self._network = Network(path, inputs, outputs, compute, repair="train it again with specact train")
        self.tokens = [self._network.sizes["N"], self._network.sizes["W"]]

    def chunks(self, tokens: Array) -> Array:
        """Drafted chunks ``[B, H, A]`` in the flow's units, from tokens ``[B, N, W]``."""
        return self._network.run({"tokens": tokens})[0]


class FlashTarget:
    """A flow policy as a :class:`~specact.pair.TargetPolicy`; its block drafts where the device does not.

    Its answers depend on what was drafted.
    """

    def __init__(self, policy: FlowPolicy, settings: FlashSettings, block: Block | None = None) -> None:
        self.policy, self.settings, self.block, self.streams = policy, settings, block, StepStreams()
        self._velocity = policy.networks.velocity
        units, actions = policy.units, policy.spec.actions
        middle = (units.low[:actions] + units.high[:actions]) / np.float32(2.0)
        self._gripper_thresholds = units.to_flow(middle)[list(settings.grippers)]

    def answer(self, window: Window, address: StepAddress) -> RoundAnswer:
        return RoundAnswer(self, self.policy.spec.observation.select(window), address)

    def check(self, chunk: Array, noise: Array, cache: Any, request: RoundRequest) -> tuple[int, bool, Array]:
        """The :func:`judge` of a drafted chunk ``[H, W]``, in the flow's units, on a prefix cache; the deviations."""
        levels, grippers = np.array(request.check.levels, np.float32), self.settings.grippers
        chunks = noised(chunk, noise, levels)
        velocities = self._velocity(chunks, np.float32(1.0) - levels, cache)
        executed = slice(self.settings.execute), slice(self.policy.spec.actions)
        drafted, estimates = chunk[executed], implied(chunks, velocities, levels)[:, *executed]
        gaps = deviations(drafted, estimates, grippers)
        return *judge(request.check, gaps, drafted, estimates, grippers, self._gripper_thresholds, request.held), gaps


class FlashVerifier(TargetVerifier[RoundAnswer]):
    """Rounds of a target in this process."""

    def __init__(self, target: Target[RoundAnswer], parts: FlowParts) -> None:
        super().__init__(target)
        self.parts = parts

    def judge(self, answer: Answer[RoundAnswer], proposal: Proposal, address: StepAddress) -> Outcome:
        return answer.value.round(proposal.evidence).outcome(self.parts, answer.times)


class FlashDrafter(Follower):
    """FLASH on the device: the robot's state, drafting, and the request; see :class:`~specact.pair.Follower`.

    The proposed actions are the drafted chunk; if the target drafts, the remainder of the last chunk with its last
    action repeated, or zeros (the middle of the demonstrated range) before the first one.

    Raises:
        ConfigError: if the rounds need a block or a draft that is missing.
        BundleError: if they need the target's encoder, and the target is only on a server.
    """

    def __init__(self, parts: FlowParts) -> None:
        rounds, settings = parts.rounds, parts.settings
        if rounds.proposes == "block" and parts.block is None:
            raise ConfigError(
                'these rounds need a block that drafts; train one: specact train with a recipe of kind = "flash"'
            )
        if rounds.proposes == "policy" and parts.draft is None:
            raise ConfigError("these rounds need a draft policy; name one: --draft NAME")
        self._parts, self._rounds = parts, rounds
        # Taken here, where a robot does not move yet.
        self._tokens = parts.policy.networks.tokens if rounds.on_device else None
        levels = settings.levels if rounds.levels is None else rounds.levels
        self._check = Check(levels, settings.within if rounds.within is None else rounds.within, rounds.guarded)
        self.reset()

    @property
    def stateless(self) -> bool:
        """Whether what it proposes depends on the window alone."""
        return self._rounds.proposes == "policy" or self._tokens is not None

    def reset(self) -> None:
        self._full_due, self._rounds_since_full, self._played = True, 0, 0
        self._chunk: Chunk | None = None
        self._last_executed: Array | None = None

    def on_action(self, drafted: Array, executed: Array) -> None:
        self._last_executed = executed
        self._played += 1

    def on_inference(self, record: StepRecord) -> None:
        if record.outcome is None:
            self._chunk, self._played = record.proposal.actions, 0
            self._rounds_since_full += 1

    def on_verified(self, record: StepRecord) -> None:
        assert record.outcome is not None
        played: Round = record.outcome.evidence
        late = record.proposal.actions is self._chunk
        self._chunk = self._parts.units.from_environment(played.chunk)
        # A late verdict concerns a chunk that is partly played.
        self._played = self._played if late else 0
        self._full_due = played.switches
        self._rounds_since_full = 0 if played.full else self._rounds_since_full + (not late)

    def propose(self, window: Window, rng: np.random.Generator) -> Proposal:
        rounds, settings, units = self._rounds, self._parts.settings, self._parts.units
        periodic = rounds.periodic and 0 < settings.period <= self._rounds_since_full
        full = rounds.full or rounds.proposes == "nothing" or self._full_due or periodic
        drafted = self._drafted(window, rng)
        actions = self._remaining() if drafted is None else units.from_environment(drafted)
        if rounds.proposes == "last":
            drafted = units.to_environment(actions)
        held = None if self._last_executed is None else self._last_executed[list(settings.grippers)] > 0.0
        drafted = None if full else drafted
        return Proposal(window, actions, RoundRequest(full, drafted, self._check, rounds.steps, held))

    def _drafted(self, window: Window, rng: np.random.Generator) -> Chunk | None:
        """The chunk drafted on the device, in the environment's units ``[H, A]``, or None."""
        policy, draft, block = self._parts.policy, self._parts.draft, self._parts.block
        if self._rounds.proposes == "policy" and draft is not None:
            return resized(draft.infer(draft.spec.observation.select(window), rng), policy.spec.chunk)
        if self._rounds.proposes == "block" and self._tokens is not None and block is not None:
            tokens = self._tokens([policy.spec.observation.select(window)])
            return policy.to_environment(block.chunks(tokens)[0])
        return None

    def _remaining(self) -> Chunk:
        spec = self._parts.policy.spec
        if self._chunk is None:
            return np.zeros((spec.chunk, spec.actions), np.float32)
        return resized(self._chunk[min(self._played, len(self._chunk) - 1) :], spec.chunk)


# Maximum of noise levels of one request.
MAX_LEVELS = 4
# What a request checks; the numbers are part of the wire format.
_FULL, _TARGET_DRAFTS, _DRAFTED = 0, 1, 2


class FlashExchange(ChunkExchange):
    """See :class:`~specact.wire.exchange.VerifyingExchange`; the check is the server's, which keeps no state.

    A request may ask for as many Euler steps as the served policy has, and no more.
    """

    steady = False

    def __init__(self, parts: FlowParts) -> None:
        spec, flag = parts.policy.spec, ArraySpec((1,), np.bool_)
        chunk = ArraySpec((spec.chunk, spec.actions), np.float32)
        request = {
            "drafted": chunk, "levels": ArraySpec((MAX_LEVELS,), np.float32, 0.0, 1.0),
            "within": ArraySpec((1,), np.float32, 0.0), "steps": ArraySpec((1,), np.int16, 1, parts.policy.steps),
            "checks": ArraySpec((1,), np.uint8, 0, _DRAFTED), "held": ArraySpec((spec.actions,), np.bool_),
            "known": flag, "guarded": flag,
        }  # fmt: skip
        accepted = ArraySpec((1,), np.int16, 0, spec.chunk)
        reply = {"chunk": chunk, "accepted": accepted, "checked": flag, "switches": flag}
        verify = self._verify = Kind(Layout(request), Layout(reply))
        super().__init__(
            spec, parts.name, parts.target_fingerprint, lambda: parts.policy, parts.units, verify,
            steps=parts.policy.steps, inpaints=True,
        )  # fmt: skip
        self._parts = parts

    def request(self, proposal: Proposal) -> Arrays:
        wanted: RoundRequest = proposal.evidence
        check, drafted, held = wanted.check, wanted.drafted, wanted.held
        if self._parts.rounds.local or len(check.levels) > MAX_LEVELS:
            raise ConfigError(
                f"a server keeps no cache of a robot and checks at {MAX_LEVELS} noise levels at most; choose other "
                "rounds, or a target in this process"
            )
        checks = _FULL if wanted.full else _TARGET_DRAFTS if drafted is None else _DRAFTED
        return filled(
            self._verify.request, drafted=drafted, levels=check.levels, within=check.within, steps=wanted.steps,
            checks=checks, held=held, known=held is not None, guarded=check.guarded,
        )  # fmt: skip

    def outcome(self, arrays: Arrays, times: OffloadTimes) -> Outcome:
        accepted, checked, switches = (arrays[name][0].item() for name in ("accepted", "checked", "switches"))
        accepted = min(accepted, self._parts.settings.execute)
        return Round(arrays["chunk"], accepted, checked, switches).outcome(self._parts, times)

    def work(self, kind: str, request: Request) -> float:
        """The most passes of the expert that a request needs, relative to an inference's."""
        if kind != "verify":
            return 1.0
        steps, checks = (request.arrays[name][0].item() for name in ("steps", "checks"))
        return float((steps + (checks != _FULL)) / self._parts.policy.steps)

    def verify(self, requests: Sequence[Request]) -> list[Arrays | WireError]:
        """Full rounds of one number of steps are one batch; checks, most of which are one pass, are made one by one."""
        replies, full = dict[int, Arrays | WireError](), dict[int, list[int]]()
        for row, request in enumerate(requests):
            if request.arrays["checks"][0] == _FULL:
                full.setdefault(request.arrays["steps"][0].item(), []).append(row)
            else:
                replies[row] = self._checked(request)
        for steps, rows in full.items():
            rngs = streams(Role.VERIFY, (requests[row].address for row in rows))
            chunks = self._parts.policy.infer_batch([requests[row].window for row in rows], rngs, steps)
            replies |= zip(rows, (self._reply(Round(chunk, 0, False, False)) for chunk in chunks), strict=True)
        return [replies[row] for row in range(len(requests))]

    @cached_property
    def _flash(self) -> FlashTarget:
        return self._parts.target()

    def _checked(self, request: Request) -> Arrays | WireError:
        arrays, target = request.arrays, self._flash
        drafted = arrays["drafted"] if arrays["checks"][0] == _DRAFTED else None
        if drafted is None and target.block is None:
            return bad("this server's target has no block that drafts; start it with a bundle that has one")
        if not (levels := tuple(arrays["levels"][arrays["levels"] > 0.0].tolist())):
            return bad("a check needs noise levels, of which at least one is above 0")
        within, guarded, steps, known = (arrays[name][0].item() for name in ("within", "guarded", "steps", "known"))
        held = arrays["held"][: len(target.settings.grippers)] if known else None
        wanted = RoundRequest(False, drafted, Check(levels, within, guarded), steps, held)
        return self._reply(target.answer(request.window, request.address).round(wanted))

    def _reply(self, reply: Round) -> Arrays:
        layout = self._verify.reply
        return filled(
            layout, chunk=reply.chunk, accepted=reply.accepted, checked=reply.checked, switches=reply.switches
        )
