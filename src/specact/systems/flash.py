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

We changed: the target checks on a new prefix cache, so that a server needs no state (the released code's cache of the
last full round is ``flash_stale``); if L = 0 the full round follows in the same request; levels and delta can be fitted
to a policy. The check measures whether the flow leads back to the draft, not whether the draft is correct: with little
noise, a smooth expert accepts anything. This has to be measured for each policy, see docs/flash.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from specact.bundle.bundle import Bundle, open_bundle
from specact.bundle.manifest import MANIFEST, joint_fingerprint
from specact.bundle.network import CPU, Compute, Network
from specact.errors import BundleError, ConfigError, SpecactError, WireError
from specact.families.chunks.flow import Array, FlowBundle, FlowPolicy, FlowUnits
from specact.families.chunks.pair import check_one_robot
from specact.families.chunks.policy import ChunkPolicy, ChunkSpec, resized
from specact.families.chunks.sources import LoadedPolicy, units_of
from specact.families.chunks.wire import ChunkExchange
from specact.observation import Window
from specact.pair import UNNAMED, Answer, Follower, Pair, PairSource, Target, TargetVerifier
from specact.records import Count, NotNegative, Record, WholeNumber, check_fields, read_record
from specact.rng import Role, StepAddress, StepStreams
from specact.systems.freqcache import FREQCACHE, FreqCached, RefreshBundle, Reuse, load_refresh
from specact.types import ActionUnits, Chunk, OffloadTimes, Origin, Outcome, Proposal, StepRecord, value
from specact.wire.arrays import Arrays, ArraySpec, Layout
from specact.wire.exchange import Kind, Request
from specact.wire.messages import bad

Grippers = NDArray[np.bool_]
# The block's folder in that of the flow policy it was made for, and its files.
FLASH = "flash"
FLASH_PARTS = {"block": "block.onnx"}
_NO_DEVIATION = np.zeros((0, 0), np.float32)


@dataclass(frozen=True)
class Check:
    """How drafted actions are checked.

    Attributes:
        levels: noise levels s in (0, 1]; all are evaluated in one batch.
        within: delta, tolerance of d, in the flow's units, in which demonstrated actions have variance 1; 0 accepts
            none.
        guarded: whether a change of a gripper ends the accepted prefix.

    Raises:
        ConfigError: for a number out of range.
    """

    levels: tuple[float, ...] = (0.1, 0.05)
    within: float = 0.15
    guarded: bool = True

    def __post_init__(self) -> None:
        if not self.levels or not all(0.0 < level <= 1.0 for level in self.levels):
            raise ConfigError(f"levels must be one or more noise levels above 0 and at most 1, got {self.levels}")
        if not self.within >= 0.0:
            raise ConfigError(f"within must be at least 0, got {self.within}")


def noised(drafted: Array, noise: Array, levels: Array) -> Array:
    """``x_k = s_k eps + (1 - s_k) x``, ``[K, H, W]``, of the drafted chunk ``[H, W]``."""
    share = levels[:, None, None]
    return share * noise + (1.0 - share) * drafted


def implied(chunks: Array, velocities: Array, levels: Array) -> Array:
    """``x^_k = x_k + s_k v(x_k, 1 - s_k)``, all ``[K, H, W]``, the levels ``[K]``."""
    return chunks + levels[:, None, None] * velocities


def deviations(drafted: Array, estimates: Array, grippers: Sequence[int] = ()) -> Array:
    """``d_kh``, ``[K, H]``: root mean square over the dimensions, without grippers unless there are no others.

    Args:
        drafted: ``[H, W]``.
        estimates: see :func:`implied`.
        grippers: excluded dimensions.
    """
    kept = [dimension for dimension in range(drafted.shape[-1]) if dimension not in grippers]
    missing = (estimates - drafted)[..., kept or slice(None)]
    return np.asarray(np.sqrt(np.square(missing).mean(axis=-1)))


def accepted_length(deviation: Array, within: float) -> int:
    """``L`` from ``d [K, H]``, of which NaN is too far, and delta, of which 0 accepts none."""
    if within <= 0.0:
        return 0
    beyond = np.flatnonzero(~(deviation <= within).all(axis=0))
    return int(beyond[0]) if beyond.size else deviation.shape[1]


def first_switch(closed: Grippers, held: Grippers | None) -> int:
    """The first step of a chunk at which a gripper differs from its current state; H if there is none.

    Args:
        closed, held: at each step ``[H, G]``, and now ``[G]``; None before the first action, for the first step's.
    """
    before = closed[:1] if held is None else held[None]
    switched = np.flatnonzero((closed != before).any(axis=1))
    return int(switched[0]) if switched.size else len(closed)


@dataclass(frozen=True)
class Verdict:
    """The accepted actions, whether a guard ended them (the next round must be full), and the deviations ``[K, H]``."""

    accepted: int
    switches: bool
    deviation: Array


def judge(
    check: Check, drafted: Array, estimates: Array, grippers: Sequence[int], middle: Array, held: Grippers | None
) -> Verdict:
    """Accepts a prefix of the drafted chunk.

    Args:
        check: its settings.
        drafted: ``[n, W]``, the actions that may be executed, in the flow's units.
        estimates: ``[K, n, W]``.
        grippers: the G gripper dimensions.
        middle: threshold of each gripper, ``[G]``, in the flow's units: above it a gripper is closed.
        held: see :func:`first_switch`.
    """
    deviation = deviations(drafted, estimates, grippers)
    accepted, count = accepted_length(deviation, check.within), len(drafted)
    if not check.guarded or not grippers:
        return Verdict(accepted, False, deviation)
    index = list(grippers)
    if any(first_switch(chunk[:, index] > middle, held) < count for chunk in estimates):
        return Verdict(0, True, deviation)
    switch = first_switch(drafted[:, index] > middle, held)
    return Verdict(min(accepted, switch), switch < accepted, deviation)


@dataclass(frozen=True)
class FlashSettings:
    """Settings of a target's rounds.

    Attributes:
        execute: maximum number of executed actions of a chunk before the next round.
        grippers: dimensions of an action that are grippers: excluded from distances, and guarded.
        period: maximum number of checked rounds between two full ones; 0 for no limit.
        levels, within: of a :class:`Check` fitted to held-out observations, see docs/flash.md.

    Raises:
        ConfigError: for a number out of range.
    """

    execute: Count
    grippers: tuple[WholeNumber, ...] = ()
    period: WholeNumber = 0
    levels: tuple[float, ...] = (0.1, 0.05)
    within: NotNegative = 0.15

    def __post_init__(self) -> None:
        check_fields(self)
        Check(self.levels, self.within)


@dataclass(frozen=True)
class Rounds:
    """One composition of drafter and check.

    Attributes:
        about: one line for a table.
        proposes: the drafter: none, so that every round is full; FLASH's block; the remainder of the last chunk, padded
            with its last action; or a draft policy.
        on_device: whether the block drafts on the device, which then needs the target's encoder; otherwise the target's
            own block drafts, on the same tokens that the check uses.
        levels, within: of the :class:`Check`; None for those of :class:`FlashSettings`.
        guarded, periodic: whether grippers are guarded, and whether full rounds are forced with the settings' period.
        stale: whether the check uses the prefix cache of the last full round. Only for a target in this process.
        full: whether only full rounds are requested; steps that are not transmitted execute the draft.
        steps: Euler steps of a full round.
        reuse: how prefix tokens are reused between rounds, see :mod:`specact.systems.freqcache`; None computes a new
            prefix in every round. Only for a target in this process with a refresh.
        gate, rate_of: which steps are transmitted; for random controls the composition whose share of full rounds is
            used.
    """

    about: str
    proposes: Literal["nothing", "block", "last", "policy"] = "nothing"
    on_device: bool = False
    levels: tuple[float, ...] | None = (0.1, 0.05)
    within: float | None = 0.15
    guarded: bool = True
    periodic: bool = True
    stale: bool = False
    full: bool = False
    steps: int = 10
    reuse: Reuse | None = None
    gate: str = "always"
    rate_of: str | None = None

    @property
    def local(self) -> bool:
        """Whether they are only for a target in this process."""
        return self.stale or self.reuse is not None

    def verifier(self, target: Target[RoundAnswer], units: ActionUnits, execute: int) -> FlashVerifier:
        """For a target in this process; :class:`FlashExchange` is for a server."""
        return FlashVerifier(target, units, execute)


_FLASH = Rounds("FLASH: a block drafts, the flow checks at 5 and 10 % of noise within .15", "block")
ROUNDS: dict[str, Rounds] = {
    "full": Rounds("every chunk in 10 steps"),
    **{f"full_{steps}": Rounds(f"every chunk in {steps} steps", steps=steps) for steps in (5, 3, 2, 1)},
    "flash": _FLASH,
    "flash_fitted": replace(_FLASH, about="FLASH with fitted noise levels and delta", levels=None, within=None),
    "flash_stale": replace(_FLASH, about="FLASH, checked on the cache of the last full round", stale=True),
    "flash_device": replace(_FLASH, about="FLASH, the block on the device", on_device=True),
    "flash_last": Rounds("FLASH's check of what is left of the last chunk", "last"),
    "flash_policy": Rounds("FLASH's check of a draft policy's chunk", "policy"),
    "block": replace(_FLASH, about="FLASH's block alone, never checked: the control", on_device=True, gate="never"),
    "unchecked": replace(
        _FLASH, about="drafts unchecked, as many full rounds as FLASH, at random: the control",
        on_device=True, full=True, gate="random", rate_of="flash",
    ),
    "freqcache": Rounds("FreqCache: the tokens of smooth patches reused, moved with the picture", reuse=Reuse()),
    "freqcache_random": Rounds("FreqCache with as many tokens reused, any of them", reuse=Reuse(first="random")),
}  # fmt: skip


@value
class RoundRequest:
    """The request for the next chunk: all inputs of the target besides the observation; the evidence of a proposal.

    Attributes:
        full: whether a full round is requested, without a check.
        drafted: the chunk to check ``[H, A]``, in the environment's units; None lets the target's own block draft.
        check: its settings.
        steps: Euler steps of a full round, at least 1.
        held: whether each gripper is closed, ``[G]``; None before the first action.
        cache: of an earlier window, for the check; None for that of this window.
        parts: stateful networks that compute this robot's prefix cache; None for the policy's own.
        local: see :class:`Rounds`.
    """

    full: bool
    drafted: Chunk | None = None
    check: Check = Check()
    steps: int = 10
    held: Grippers | None = None
    cache: Any = None
    parts: FreqCached | None = None
    local: bool = False


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
    deviation: Array = field(default_factory=lambda: _NO_DEVIATION)
    cache: Any = None

    @property
    def full(self) -> bool:
        """Whether the chunk is the target's own."""
        return self.accepted == 0

    def outcome(self, units: ActionUnits, execute: int, times: OffloadTimes) -> Outcome:
        """The accepted actions alone, or the target's chunk; the round is the outcome's evidence."""
        count = self.accepted or len(self.chunk)
        origins = np.full(count, Origin.ACCEPTED if self.accepted else Origin.REPLACED, np.uint8)
        actions, kept = units.from_environment(self.chunk[:count]), float(self.accepted >= execute)
        return Outcome(actions, origins, execute * self.checked, self.accepted, times, self, kept)


@value
class RoundAnswer:
    """A target's answer to a window: its round is computed when the request is known.

    The window's prefix cache is computed here, unless a server has computed it.
    """

    target: FlashTarget
    window: Window
    address: StepAddress
    cache: Any = None

    def round(self, request: RoundRequest) -> Round:
        """The round for a request."""
        return self.target.round(self.window, self.address, request, self.cache)


class Block:
    """The drafting network: from the target encoder's ``tokens``, of N and W, to a chunk, of H and A.

    Raises:
        BundleError: if the file is no ONNX model, or has other inputs or outputs.
    """

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
        self.policy, self.settings, self.block = policy, settings, block
        self._velocity, self._streams = policy.networks.velocity, StepStreams()
        units, actions = policy.units, policy.spec.actions
        middle = (units.low[:actions] + units.high[:actions]) / np.float32(2.0)
        self._gripper_thresholds = units.to_flow(middle)[list(settings.grippers)]

    def answer(self, window: Window, address: StepAddress) -> RoundAnswer:
        return RoundAnswer(self, self.policy.spec.observation.select(window), address)

    # Extreme observations or drafts overflow to NaN.
    @np.errstate(over="ignore", invalid="ignore")
    def round(self, window: Window, address: StepAddress, request: RoundRequest, new: Any = None) -> Round:
        """One round, full or checked; a full one uses the same noise as the policy's own answer at this address.

        ``new`` is the window's prefix cache, if already computed.

        Raises:
            ConfigError: if the request needs a block that is missing.
        """
        policy, rng = self.policy, self._streams(Role.VERIFY, address)
        noise, parts = policy.noise(rng), request.parts or policy.networks
        tokens, deviation = None, _NO_DEVIATION
        if not request.full:
            drafted = request.drafted
            if drafted is None:
                if self.block is None:
                    raise ConfigError("this target has no block that drafts; let the device draft")
                tokens = policy.networks.tokens([window])
                drafted = policy.to_environment(self.block.chunks(tokens)[0])
            if request.cache is None and new is None:
                new = parts.cache([window], tokens)
            verdict = self._check(
                policy.to_flow(drafted), policy.noise(rng), new if request.cache is None else request.cache, request
            )
            if verdict.accepted:
                return Round(drafted, verdict.accepted, True, verdict.switches, verdict.deviation)
            deviation = verdict.deviation
        if new is None:
            new = parts.cache([window])
        chunk = policy.to_environment(policy.denoised(noise[None], new, request.steps)[0])
        return Round(chunk, 0, not request.full, False, deviation, new)

    def _check(self, drafted: Array, noise: Array, cache: Any, request: RoundRequest) -> Verdict:
        levels = np.array(request.check.levels, np.float32)
        chunks = noised(drafted, noise, levels)
        estimates = implied(chunks, self._velocity(chunks, np.float32(1.0) - levels, cache), levels)
        count, actions = self.settings.execute, self.policy.spec.actions
        return judge(
            request.check, drafted[:count, :actions], estimates[:, :count, :actions], self.settings.grippers,
            self._gripper_thresholds, request.held,
        )  # fmt: skip


class FlashVerifier(TargetVerifier[RoundAnswer]):
    """Checks with a target in this process; ``execute`` actions of a chunk at most are executed."""

    def __init__(self, target: Target[RoundAnswer], units: ActionUnits, execute: int) -> None:
        super().__init__(target)
        self.units, self.execute = units, execute

    def judge(self, answer: Answer[RoundAnswer], proposal: Proposal, address: StepAddress) -> Outcome:
        return answer.value.round(proposal.evidence).outcome(self.units, self.execute, answer.times)


class FlashDrafter(Follower):
    """FLASH on the device: the robot's state, drafting, and the request; see :class:`~specact.pair.Follower`.

    The proposed actions are the drafted chunk; if the target drafts, the remainder of the last chunk with its last
    action repeated, or zeros (the middle of the demonstrated range) before the first one.

    Raises:
        ConfigError: if the rounds need a block or a draft that is missing.
        BundleError: if they need the target's encoder, and the target is only on a server.
    """

    def __init__(self, parts: FlashParts, networks: FreqCached | None = None) -> None:
        rounds, settings = parts.rounds, parts.settings
        if rounds.proposes == "block" and parts.block is None:
            raise ConfigError(
                'these rounds need a block that drafts; train one: specact train with a recipe of kind = "flash"'
            )
        if rounds.proposes == "policy" and parts.draft is None:
            raise ConfigError("these rounds need a draft policy; name one: --draft NAME")
        self._policy, self._units, self._rounds, self._settings = parts.policy, parts.units, rounds, settings
        self._block, self._draft, self._parts = parts.block, parts.draft, networks
        # Taken here, where a robot does not move yet.
        self._tokens = self._policy.networks.tokens if rounds.on_device else None
        levels = settings.levels if rounds.levels is None else rounds.levels
        within = settings.within if rounds.within is None else rounds.within
        self._check = Check(levels, within, rounds.guarded)
        self.reset()

    @property
    def stateless(self) -> bool:
        """Whether what it proposes depends on the window alone."""
        return self._rounds.proposes == "policy" or self._tokens is not None

    def reset(self) -> None:
        self._full_due, self._rounds_since_full, self._played = True, 0, 0
        self._chunk: Chunk | None = None
        self._last_executed: Array | None = None
        self._round: Round | None = None
        if self._parts is not None:
            self._parts.reset()

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
        self._chunk = self._units.from_environment(played.chunk)
        # A late verdict concerns a chunk that is partly played.
        self._played = self._played if late else 0
        self._full_due = played.switches
        self._rounds_since_full = 0 if played.full else self._rounds_since_full + (not late)
        if played.full:
            self._round = played

    def propose(self, window: Window, rng: np.random.Generator) -> Proposal:
        rounds, period = self._rounds, self._settings.period
        periodic = rounds.periodic and 0 < period <= self._rounds_since_full
        full = rounds.full or rounds.proposes == "nothing" or self._full_due or periodic
        drafted = self._drafted(window, rng)
        actions = self._remaining() if drafted is None else self._units.from_environment(drafted)
        if rounds.proposes == "last" and not full:
            drafted = self._units.to_environment(actions)
        held = None if self._last_executed is None else self._last_executed[list(self._settings.grippers)] > 0.0
        cache = self._round.cache if rounds.stale and self._round is not None else None
        drafted = None if full else drafted
        request = RoundRequest(full, drafted, self._check, rounds.steps, held, cache, self._parts, rounds.local)
        return Proposal(window, actions, request)

    def _drafted(self, window: Window, rng: np.random.Generator) -> Chunk | None:
        """The chunk drafted on the device, in the environment's units ``[H, A]``, or None."""
        policy = self._policy
        if self._rounds.proposes == "block" and self._tokens is not None:
            assert self._block is not None, "rounds that need a block have one"
            tokens = self._tokens([policy.spec.observation.select(window)])
            return policy.to_environment(self._block.chunks(tokens)[0])
        if self._rounds.proposes == "policy":
            assert self._draft is not None, "rounds that need a draft have one"
            return resized(self._draft.infer(self._draft.spec.observation.select(window), rng), policy.spec.chunk)
        return None

    def _remaining(self) -> Chunk:
        spec = self._policy.spec
        if self._chunk is None:
            return np.zeros((spec.chunk, spec.actions), np.float32)
        return resized(self._chunk[min(self._played, len(self._chunk) - 1) :], spec.chunk)


# Maximum of noise levels and of Euler steps of one request.
MAX_LEVELS, MAX_STEPS = 4, 100
# Kinds of a request; the numbers are part of the wire format, as is the mark of a gripper of unknown state.
_FULL, _TARGET_DRAFTS, _DRAFTED = 0, 1, 2
_UNKNOWN = -1


class FlashExchange(ChunkExchange):
    """See :class:`~specact.wire.exchange.VerifyingExchange`; the check is the server's, which keeps no state.

    It extends the messages of chunk policies, which clients without rounds can use, by requests to verify. Rounds are
    computed one after the other; full ones take several times as long as checks. ``target`` is called on a server only.
    """

    def __init__(
        self, spec: ChunkSpec, units: ActionUnits, execute: int, name: str, fingerprint: str,
        target: Callable[[], FlashTarget],
    ) -> None:  # fmt: skip
        super().__init__(spec, name, fingerprint, lambda: target().policy, units)
        chunk = ArraySpec((spec.chunk, spec.actions), np.float32)
        request = {
            "drafted": chunk,
            "levels": ArraySpec((MAX_LEVELS,), np.float32, 0.0, 1.0),
            "within": ArraySpec((1,), np.float32, 0.0),
            "held": ArraySpec((spec.actions,), np.int16, _UNKNOWN, 1),
            "how": ArraySpec((3,), np.int16, 0, np.iinfo(np.int16).max),
        }
        reply = {"chunk": chunk, "how": ArraySpec((3,), np.int16, 0, spec.chunk)}
        kinds = {**self.contract.kinds, "verify": Kind(Layout(request), Layout(reply))}
        self.contract = replace(self.contract, kinds=kinds, step_kind="verify")
        self._spec, self._units, self._execute, self._rounds = spec, units, execute, cache(target)

    @property
    def steady(self) -> bool:
        return False

    def request(self, proposal: Proposal) -> Arrays:
        given: RoundRequest = proposal.evidence
        spec, levels = self._spec, np.zeros(MAX_LEVELS, np.float32)
        if given.local or len(given.check.levels) > MAX_LEVELS:
            raise ConfigError(
                f"a server keeps no cache of a robot and checks at {MAX_LEVELS} noise levels at most; choose other "
                "rounds than flash_stale and freqcache, or a target in this process"
            )
        levels[: len(given.check.levels)] = given.check.levels
        held = np.full(spec.actions, _UNKNOWN, np.int16)
        if given.held is not None:
            held[: len(given.held)] = given.held
        kind = _FULL if given.full else _TARGET_DRAFTS if given.drafted is None else _DRAFTED
        return {
            "drafted": np.zeros((spec.chunk, spec.actions), np.float32) if given.drafted is None else given.drafted,
            "levels": levels,
            "within": np.array([given.check.within], np.float32),
            "held": held,
            "how": np.array([kind, given.check.guarded, given.steps], np.int16),
        }

    def outcome(self, arrays: Arrays, times: OffloadTimes) -> Outcome:
        accepted, checked, switches = arrays["how"].tolist()
        reply = Round(arrays["chunk"], min(accepted, self._execute), bool(checked), bool(switches))
        return reply.outcome(self._units, self._execute, times)

    def answer(self, kind: str, requests: Sequence[Request]) -> list[Arrays | WireError]:
        return [self._round(request) for request in requests] if kind == "verify" else super().answer(kind, requests)

    def _round(self, request: Request) -> Arrays | WireError:
        arrays, target = request.arrays, self._rounds()
        kind, guarded, steps = arrays["how"].tolist()
        if kind > _DRAFTED or not 1 <= steps <= MAX_STEPS:
            return bad(f"how must name a kind of 0 to {_DRAFTED} and 1 to {MAX_STEPS} steps, got {kind} and {steps}")
        if kind == _TARGET_DRAFTS and target.block is None:
            return bad("this server's target has no block that drafts; start it with a bundle that has one")
        levels = tuple(arrays["levels"][arrays["levels"] > 0.0].tolist())
        held = arrays["held"][: len(target.settings.grippers)]
        try:
            check = Check(levels or (1.0,), float(arrays["within"][0]), bool(guarded))
        except ConfigError as error:
            return bad(str(error))
        drafted, closed = arrays["drafted"] if kind == _DRAFTED else None, held.astype(bool)
        asked = RoundRequest(kind == _FULL, drafted, check, steps, None if (held == _UNKNOWN).any() else closed)
        done = target.answer(request.window, request.address).round(asked)
        return {"chunk": done.chunk, "how": np.array([done.accepted, done.checked, done.switches], np.int16)}


@dataclass(frozen=True)
class FlashParts:
    """A flow policy as the target, and what drafts for it.

    Attributes:
        policy: the target.
        settings: of its rounds.
        block: drafts from the target encoder's tokens; None if there is none.
        refresh: recomputes a part of the target's prefix; None if there is none.
        draft: a policy on the device, or None.
        rounds: how chunks are drafted and verified.
        name, env, fingerprint, path, source: see :class:`~specact.pair.Pair`.

    Raises:
        ConfigError: for a draft that is incompatible with the target.
    """

    policy: FlowPolicy
    settings: FlashSettings
    block: Block | None = None
    refresh: RefreshBundle | None = None
    draft: ChunkPolicy | None = None
    rounds: Rounds = ROUNDS["full"]
    name: str = ""
    env: str = ""
    fingerprint: str = ""
    path: Path | None = None
    source: PairSource = UNNAMED

    def __post_init__(self) -> None:
        if self.draft is not None:
            check_one_robot(self.draft.spec, self.policy.spec)

    @property
    def units(self) -> ActionUnits:
        """The demonstrated range is [-1, 1]."""
        actions = self.policy.spec.actions
        return ActionUnits.of_range(self.policy.units.low[:actions], self.policy.units.high[:actions])

    def drafter(self) -> FlashDrafter:
        """A new one, of one robot; errors as for :class:`FlashDrafter`, and ConfigError for a missing refresh."""
        if self.rounds.reuse is None:
            return FlashDrafter(self)
        if self.refresh is None:
            raise ConfigError(
                "these rounds compute a part of the prefix again, and this target has no network for that; make one: "
                "specact export --refresh"
            )
        return FlashDrafter(self, FreqCached(self.policy.networks, self.refresh, self.rounds.reuse))

    def target(self) -> FlashTarget:
        """The target with its block."""
        return FlashTarget(self.policy, self.settings, self.block)

    def pair(self) -> Pair[RoundAnswer]:
        """As a pair."""
        spec, units, execute = self.policy.spec, self.units, self.settings.execute
        seen = spec.observation if self.draft is None else self.draft.spec.observation.union(spec.observation)
        return Pair(
            name=self.name, observation=seen, units=units, execute=execute, rate_hz=spec.rate_hz, env=self.env,
            fingerprint=self.fingerprint, path=self.path, source=self.source, parts=self,
            drafter=self.drafter, target=self.target,
            verifier=lambda target: self.rounds.verifier(target, units, execute),
            exchange=FlashExchange(spec, units, execute, self.name, self.fingerprint, self.target),
        )  # fmt: skip


def load_flow_pair(
    bundle: FlowBundle, draft: LoadedPolicy | None = None, source: PairSource | None = None, *,
    rounds: Rounds = ROUNDS["full"], compute: Compute = CPU,
) -> Pair[RoundAnswer]:  # fmt: skip
    """A flow policy's bundle as a pair, with the block and the refresh in its folder.

    Without a block the whole chunk is executed, and no dimension is a gripper. ``source`` says how it was named.

    Raises:
        BundleError: if the block or the refresh is incompatible with the target, or damaged.
        ConfigError: if the draft is incompatible with the target.
    """
    target = LoadedPolicy(bundle.name, bundle.policy(), None, bundle.fingerprint, bundle.env)
    folder, again = bundle.path / FLASH, bundle.path / FREQCACHE
    made = load_flash(folder, target, compute=compute) if folder.exists() else None
    refresh = load_refresh(again, bundle, compute=compute) if again.exists() else None
    return flash_pair(target, made, refresh, draft, bundle.path, source, rounds)


def flash_pair(
    target: LoadedPolicy, made: FlashBundle | None, refresh: RefreshBundle | None = None,
    draft: LoadedPolicy | None = None, path: Path | None = None, source: PairSource | None = None,
    rounds: Rounds = ROUNDS["full"],
) -> Pair[RoundAnswer]:  # fmt: skip
    """A pair of these parts; see :class:`FlashParts` and :class:`~specact.pair.Pair`."""
    policy = flow_of(target)
    settings = FlashSettings(policy.spec.chunk) if made is None else made.spec.settings
    prints = [part.fingerprint for part in (target, made, draft) if part is not None]
    # A flow policy alone keeps its own.
    fingerprint = joint_fingerprint(*prints) if len(prints) > 1 else target.fingerprint
    return FlashParts(
        policy, settings, None if made is None else made.block, refresh, None if draft is None else draft.policy,
        rounds, target.name, target.env, fingerprint, path, PairSource(str(path)) if source is None else source,
    ).pair()  # fmt: skip


def flow_of(target: LoadedPolicy) -> FlowPolicy:
    """The flow policy of a target, whose networks FLASH uses one by one.

    Raises:
        ConfigError: if it is no flow policy, or has no range of actions or no fingerprint.
    """
    policy = target.policy
    if not isinstance(policy, FlowPolicy):
        raise ConfigError(
            f"{target.name} answers with whole chunks and has no parts that a chunk could be checked with; FLASH needs "
            "a flow policy: a bundle of one, or SmolVLA, pi0 or pi05 of LeRobot's whose actions are not relative to "
            "what is observed"
        )
    ends = (end[: policy.spec.actions] for end in (policy.units.low, policy.units.high))
    if not target.fingerprint or not all(np.isfinite(end).all() for end in ends):
        raise ConfigError(
            f"{target.name} must say the range of its actions, and have a fingerprint of its weights; save it with the "
            "statistics of its dataset"
        )
    return policy


@dataclass(frozen=True)
class MadeFor:
    """The target that a block was made for: the fingerprint of its bundle, and the settings of its rounds."""

    target: str
    settings: FlashSettings

    def describe(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


@dataclass(frozen=True)
class FlashBundle(Bundle[MadeFor]):
    """A loaded bundle of a block."""

    block: Block


def load_flash(name_or_path: str | Path, target: LoadedPolicy, *, compute: Compute = CPU) -> FlashBundle:
    """Loads FLASH's block for a target.

    Raises:
        BundleError: if a part is missing or damaged, or was made for another target.
        ConfigError: if there is no bundle of that name, or the target is no flow policy, see :func:`flow_of`.
    """
    policy, bundle = flow_of(target), open_bundle(name_or_path, "flash", MadeFor, FLASH_PARTS)
    path, settings, spec = bundle.path, bundle.spec.settings, policy.spec
    if bundle.spec.target != target.fingerprint:
        raise BundleError(
            f"the block in {path} was made for the target {bundle.spec.target}, but {target.name} is "
            f"{target.fingerprint}; take that target, or train a block for this one with specact train and a recipe "
            'of kind = "flash"'
        )
    if settings.execute > spec.chunk or any(dimension >= spec.actions for dimension in settings.grippers):
        raise BundleError(f"the settings in {path} do not fit chunks of {spec.chunk} x {spec.actions}: {settings}")
    block = Block(bundle.files["block"], (spec.chunk, spec.actions), compute=compute)
    here = not isinstance(policy.networks, RemoteParts)
    wanted = list(policy.networks.tokens([spec.observation.zeros()]).shape[1:]) if here else block.tokens
    if block.tokens != wanted:
        raise BundleError(f"the block in {path} reads tokens {block.tokens}, the target's encoder gives {wanted}")
    return FlashBundle(path, bundle.manifest, bundle.spec, bundle.files, block)


class RemoteParts:
    """Placeholder for the networks of a flow policy on a server; refuses any use, before anything is drafted."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, part: str) -> Any:
        raise BundleError(
            f"the flow policy that {self._name} drafts for is not here; name it with --target, such as "
            "lerobot:PATH@HZ, or leave drafting and checks to a server that has it"
        )


class DescribedTarget(Record, frozen=True):
    """A target for devices whose server drafts and checks: its spec, and the range of its actions, ``[A]``."""

    spec: ChunkSpec
    low: tuple[float, ...]
    high: tuple[float, ...]


def remote_target(path: Path) -> LoadedPolicy:
    """The target of a block on a server, as the block's manifest describes it; it cannot infer.

    Raises:
        BundleError: if the manifest does not describe it, or cannot be read.
    """
    bundle, where = open_bundle(path, "flash", MadeFor, FLASH_PARTS), f"{path / MANIFEST}: target"
    described = read_record(bundle.manifest.target, DescribedTarget, where, BundleError)
    try:
        units = units_of(described.low, described.high, described.spec.actions)
    except SpecactError as error:
        raise BundleError(f"{where}: {error}") from None
    low, high = np.array(described.low, np.float32), np.array(described.high, np.float32)
    flow = FlowUnits((low + high) / np.float32(2.0), np.ones_like(low), low, high)
    policy = FlowPolicy(RemoteParts(bundle.name), flow, described.spec)
    return LoadedPolicy(bundle.name, policy, units, bundle.spec.target, bundle.env)
