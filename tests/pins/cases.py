"""The cases: what is played through the real policies, and what of it is pinned."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from experiments.split.simulated import LatencyApart
from tests.pins.adapter import (
    Values,
    chunk_policy,
    exchanged,
    gate_of,
    infer,
    observations,
    over_the_wire,
    pair_of,
    play,
    remote,
    runner_of,
    window_of,
)

from specact.errors import ObservationError
from specact.families.codes.sampling import CodeDistribution, sample_codes, verify
from specact.gates.audit import DriftAlarm, RunningMean, expected_true_skip
from specact.gates.calibration import calibrated_gate, threshold_for_rate
from specact.gates.controller import Controller, RateBudget
from specact.gates.settings import GateSettings
from specact.lab.evaluation.calibrate import find_threshold
from specact.lab.rollout.steps import REASONS
from specact.lab.tised.equations import chunk_s, exact_task_s, optimum, stall_s, task_s
from specact.lab.train.split import split_bundle
from specact.policy import SpeculativePolicy
from specact.rng import Role, StepAddress, stream
from specact.systems import freqcache as frequency
from specact.systems import roboecc, staged
from specact.systems.heisd import VerifySkip
from specact.wire.exchange import Request

STORED = Path(__file__).parent / "stored"
# A case is a function of its variant: the seed of the random streams, and how many observations are left out before.
Case = Callable[[int], Values]
CASES: dict[str, Case] = {}

# ---- rollouts: action codes, tokens, flows, pairs of chunk policies --------------------------------------------------

# By pair: recorded observations, and control steps.
RECORDED = {
    "ball": ("ball", 70), "kitchen": ("kitchen", 20), "pusht": ("pusht", 48), "relocate": ("relocate", 40),
    "swarm": ("swarm", 40), "metaworld": ("metaworld", 16), "pusht-camera": ("pusht-camera", 40),
    "pusht-camera-state": ("pusht-camera", 40), "relocate-tokens": ("relocate", 8), "kitchen-tokens": ("kitchen", 20),
    "metaworld-tokens": ("metaworld", 20), "pusht-flow": ("pusht", 56), "metaworld-flow": ("metaworld", 20),
    "ball-chase-flow": ("ball-chase", 40), "chunks-regression": ("metaworld", 20), "chunks-whole": ("metaworld", 20),
    "chunks-average": ("metaworld", 20), "chunks-codes": ("pusht", 40),
}  # fmt: skip
# By pair, the systems by their names.
SYSTEMS = {
    "relocate-tokens": (
        "ar", "strict", "strict_bigram", "specvla", "kerv", "kerv_printed", "kerv_fixed", "heisd_no_switch",
        "heisd_similar", "retrieval", "filter", "last",
    ),
    "kitchen-tokens": (
        "ar", "strict_last", "specvla", "specvla_uniform", "specvla_device", "kerv", "kerv_walk", "heisd",
        "heisd_fixed", "retrieval",
    ),
    "metaworld-tokens": ("ar", "strict", "specvla", "kerv", "heisd_no_switch", "heisd_fixed", "filter"),
    "pusht-flow": (
        "full", "full_5", "full_1", "flash", "flash_fitted", "flash_unguarded", "flash_stale", "flash_device",
        "flash_last", "flash_last_fitted", "flash_shuffled", "block",
    ),
    "metaworld-flow": (
        "full_2", "flash", "flash_fitted", "flash_stale", "flash_policy", "flash_policy_fitted", "unchecked",
        "freqcache", "freqcache_2", "freqcache_still", "freqcache_changed", "freqcache_oldest", "freqcache_frozen",
    ),
    "ball-chase-flow": ("full", "full_3", "flash", "flash_fitted"),
}  # fmt: skip
Decides = Callable[[Any], Any]


def seen_by(source: str, variant: int, count: int | None = None) -> list[Any]:
    """The observations of a pair's rollout; a variant begins at another one, or plays another episode."""
    name, most = RECORDED[source.partition("/")[0]]
    skip, episode = (0, variant % 2) if name == "metaworld" else (variant % 4, 0)
    return observations(name, most if count is None else count, skip, episode)


def rollout(source: str, decides: Decides, variant: int) -> Values:
    """A pair as ``NAME`` or ``NAME/SYSTEM`` with a gate and its target in this process."""
    pair = pair_of(source)
    return play(SpeculativePolicy(pair, decides(pair), seed=variant), seen_by(source, variant))


def own_gate(pair: Any) -> Any:
    """The gate that a decoding names."""
    return gate_of(pair, (getattr(pair.parts, "decoding", None) or pair.parts.rounds).gate, 0.5)


def calibrated(name: str, rate: float) -> Decides:
    return lambda pair: calibrated_gate(pair, name, rate)


def with_gate(name: str, threshold: float = 0.0, **options: Any) -> Decides:
    return lambda pair: gate_of(pair, name, threshold, **options)


def audited(pair: Any) -> Any:
    gate = gate_of(pair, "never")
    gate.audit_rate = 0.3
    return gate


def deviation(
    threshold: float, reading: str = "euclidean", alpha: float = 0.5, source: str = "executed", **limits: int
) -> Decides:
    return with_gate("adahi", threshold, reading=reading, alpha=alpha, source=source, **limits)


always = with_gate("always")
for _pair in list(RECORDED)[:8]:
    CASES[f"codes-{_pair}-adahi"] = partial(rollout, _pair, calibrated("adahi", 0.6))
for _pair, _gate, _rate in (
    ("ball", "learned", 0.6), ("ball", "learned_action", 0.4), ("ball", "uncertainty", 0.6), ("ball", "oracle", 0.6),
    ("ball", "oracle_action", 0.6), ("pusht", "learned", 0.4), ("kitchen", "learned_action", 0.6),
    ("relocate", "learned", 0.6), ("swarm", "uncertainty", 0.4),
):  # fmt: skip
    CASES[f"codes-{_pair}-{_gate}"] = partial(rollout, _pair, calibrated(_gate, _rate))
for _name, _decides in {
    "always": always, "never": with_gate("never"), "random": with_gate("random", 0.5),
    "periodic": with_gate("periodic"), "max-skips": deviation(1e3, "jump", 0.5, "draft", max_skips=2),
}.items():  # fmt: skip
    CASES[f"gate-{_name}"] = partial(rollout, "ball", _decides)
for _kind, _level in {"temperature": 0.95, "disagreement": 0.985, "entropy": 4.04, "one_minus_q": 0.981}.items():
    CASES[f"gate-uncertainty-{_kind}"] = partial(rollout, "ball", with_gate("uncertainty", _level, kind=_kind))
for _reading, _level in {"euclidean": 0.35, "path_ratio": 0.31, "disparity": 0.8, "zscore": 3.0, "jump": 0.3}.items():
    for _past in ("executed", "draft"):
        CASES[f"gate-deviation-{_reading}-{_past}"] = partial(rollout, "ball", deviation(_level, _reading, 0.3, _past))
for _pair, _systems in SYSTEMS.items():
    for _system in _systems:
        CASES[f"{_pair}-{_system}"] = partial(rollout, f"{_pair}/{_system}", own_gate)
CASES |= {
    "chunks-whole": partial(rollout, "chunks-whole", with_gate("random", 0.5)),
    "chunks-within": partial(rollout, "chunks-regression", always),
    "chunks-average": partial(rollout, "chunks-average", with_gate("periodic")),
    "chunks-codes-within": partial(rollout, "chunks-codes", always),
    "chunks-codes-deviation": partial(rollout, "chunks-codes", deviation(0.2)),
    "gate-verify-skip": partial(rollout, "relocate-tokens/heisd_no_switch", lambda _: VerifySkip(0.2, reach=2)),
    "gate-similarity": partial(rollout, "relocate-tokens/heisd_no_switch", lambda _: VerifySkip(0.05, reach=None)),
    "audit": partial(rollout, "ball", audited),
}  # fmt: skip


def guarded(variant: int) -> Values:
    """FLASH with a gripper: in variant 1 its change ends an accepted prefix, and the next round is a full one."""
    flow = pair_of("pusht-flow/flash_last")
    pair = flow.composed(settings=replace(flow.parts.settings, grippers=(0,)))
    return play(SpeculativePolicy(pair, gate_of(pair, "always"), seed=variant + 3), observations("pusht", 60))


def frequencies(variant: int) -> Values:
    """Between recorded frames, which hardly move, and a frame and itself, moved by patches and a few pixels."""
    frames = [seen["image.corner2"] for seen in observations("metaworld", 8, episode=variant % 2)]
    moved = [(frames[0], np.roll(frames[0], shift, axis=(0, 1))) for shift in [(16, 0), (0, -32), (-13, 21)]]
    pairs, grid = [], (4, 4)
    for before, now in [*zip(frames[::3], frames[1::3], strict=False), *moved]:
        planes = [frequency.luma(frame) for frame in (before, now)]
        spectra, shape = [frequency.spectrum(plane) for plane in planes], planes[0].shape
        windowed = [frequency.spectrum(frequency.windowed(plane)) for plane in planes]
        motion = frequency.phase_correlation(windowed[0], windowed[1], shape)
        earlier = frequency.source_patches(motion, (shape[0] // grid[0], shape[1] // grid[1]), grid)
        edges = frequency.edge_energy(frequency.patches_of(planes[1], grid))
        entropy = frequency.spectral_entropy(spectra[1])
        budget = frequency.reuse_budget(entropy, 0.2, 0.9)
        pairs.append({
            "motion": [motion.rows, motion.columns, min(motion.confidence, 1e3)], "earlier": earlier, "edges": edges,
            "entropy": entropy, "budget": budget, "reused": frequency.reused(earlier, edges, budget, 0.3),
        })  # fmt: skip
    return {"pairs": pairs}


CASES |= {"flash-guarded": guarded, "freqcache-frequencies": frequencies}

# ---- codes whose second depends on the first: no packaged bundle has them --------------------------------------------


def sequential(variant: int) -> Values:
    rng, steps = np.random.default_rng(variant), []

    def distribution() -> Any:
        rows = rng.dirichlet(np.full(6, 0.5), (8,))
        return CodeDistribution(rows[:2], np.zeros((2, 6, 1, 1), np.float32), rows[2:])

    for step in range(20):
        target, draft = distribution(), distribution()
        codes = sample_codes(draft, stream(variant, Role.DRAFT, step=step))
        verdict = verify(target, draft, codes, stream(variant, Role.VERIFY, step=step))
        steps.append({"drafted": codes, "codes": verdict.codes, "accepted": verdict.accepted, "r": verdict.rejection})
    return {"steps": steps}


CASES["codes-sequential"] = sequential

# ---- inpainting ------------------------------------------------------------------------------------------------------


def inpainted(source: str, variant: int) -> Values:
    policy, seen = chunk_policy(source, 6), seen_by(source, variant, 12)
    first = infer(policy, seen[:8], variant)
    weights = np.linspace(1.5, -0.5, len(first)).clip(0.0, 1.0)
    guided = [infer(policy, seen, variant + step, np.roll(first, -4, axis=0), weights) for step in (1, 2)]
    return {"first": first, "free": infer(policy, seen, variant + 1), "guided": guided}


for _pair in ("pusht-flow", "metaworld-flow", "ball-chase-flow"):
    CASES[f"inpainting-{_pair}"] = partial(inpainted, _pair)

# ---- time: late verdicts, real-time chunking, misses -----------------------------------------------------------------


def slow(step: int) -> float:
    """Seconds until the target's answer; every fourth takes long."""
    return 0.6 if step % 4 == 3 else 0.07 + 0.03 * (step % 3)


def timed(source: str, variant: int, decides: Decides = always, **options: Any) -> Values:
    """A control loop on a virtual clock: step k begins at k periods, or when the step before has ended."""
    pair = pair_of(source)
    policy, clock = remote(pair, decides(pair), slow, seed=variant, **options)
    wait = lambda step: clock.sleep(max(0.0, step / pair.rate_hz - clock.now()))  # noqa: E731
    return play(policy, seen_by(source, variant), wait) | {"stopped": policy.safety.stopped, "seconds": clock.now()}


CASES |= {
    "late-codes": partial(timed, "ball", decides=with_gate("random", 0.8), late_for_s=0.5, draft_s=0.005),
    "late-codes-wait": partial(timed, "ball", decides=calibrated("adahi", 0.6), draft_s=0.005),
    "late-tokens": partial(timed, "metaworld-tokens/specvla", late_for_s=0.3),
    "late-flash": partial(timed, "pusht-flow/flash_fitted", late_for_s=1.0),
    "late-old": partial(timed, "ball", late_for_s=0.09),
    "age": partial(timed, "ball", max_chunk_age_ms=150.0),
    "miss-draft": partial(timed, "ball", deadline_s=0.1),
    "miss-hold": partial(timed, "ball", deadline_s=0.1, on_miss="hold_last"),
    "miss-stop": partial(timed, "ball", deadline_s=0.2, on_miss="stop"),
    "miss-stop-after": partial(timed, "ball", deadline_s=0.08, stops_after=1),
    "miss-late": partial(timed, "ball", deadline_s=0.1, late_for_s=0.5, stops_after=6),
    "miss-tokens": partial(timed, "kitchen-tokens/kerv", deadline_s=0.2),
}


def blind(variant: int) -> Values:
    """Observations that cannot be used, in between and at the end, until the robot stops."""
    pair, steps = pair_of("ball"), []
    policy, _ = remote(pair, gate_of(pair, "always"), lambda step: 0.0, stops_after=3, seed=variant)
    for step, observation in enumerate(observations("ball", 24)):
        unusable = step in (7, 8, 13) or step > 15
        error = ObservationError("not finite", "not_finite")
        action = policy.safety.hold(error) if unusable else policy.act(observation)
        steps.append([action, policy.origin.name, policy.safety.stopped])
    return {"steps": steps}


CASES["miss-blind"] = blind


def run_chunks(kind: str, execute: int, overlap: int, variant: int, **options: Any) -> Values:
    policy, steps = chunk_policy("pusht-flow", 3), []

    def took(step: int) -> float:
        return 0.95 if step % 4 == 3 else 0.15 + 0.1 * (step % 3)

    runner, clock = runner_of(policy, kind, execute, overlap, took, seed=variant, **options)
    for step, observation in enumerate(seen_by("pusht-flow", variant)):
        clock.sleep(max(0.0, step / policy.spec.rate_hz - clock.now()))
        action = runner.act(observation)
        steps.append([action, None if runner.origin is None else runner.origin.name, runner.safety.stopped])
    return {"steps": steps, "counts": dict(sorted(runner.counts.items()))}


# Named as they were recorded.
_KINDS = {"naive": "append", "inpainting": "rtc"}
for _kind, _overlap in {"synchronous": 0, "naive": 4, "aligned": 6, "roll_forward": 4, "inpainting": 6}.items():
    CASES[f"runner-{_kind}"] = partial(run_chunks, _KINDS.get(_kind, _kind), 8, _overlap)
CASES |= {
    "runner-deadline": partial(run_chunks, "aligned", 6, 3, deadline_s=0.5, idle="nothing"),
    "runner-age": partial(run_chunks, "append", 8, 4, max_chunk_age_ms=550.0),
    "runner-stop": partial(run_chunks, "aligned", 6, 2, deadline_s=0.5, idle="stop_action", stops_after=1),
}

# ---- budgets, audits, drift, calibration -----------------------------------------------------------------------------


def controlled(variant: int) -> Values:
    pair, thresholds = pair_of("kitchen"), list[float]()
    gate = Controller(deviation(0.0, "zscore")(pair), RateBudget(0.4), window=8, horizon=4.0)
    policy = SpeculativePolicy(pair, gate, seed=variant)
    values = play(policy, observations("kitchen", 30), lambda step: thresholds.append(gate.threshold))
    return values | {"thresholds": thresholds}


def alarm(values: Sequence[float], level: float, **options: Any) -> int | None:
    """After how many values the drift alarm is raised."""
    detector = DriftAlarm(level, **options)
    return next((index for index, value in enumerate(values) if detector.take(value)), None)


def running_mean(values: Sequence[float]) -> list[float | None]:
    """Mean and confidence interval of values in [0, 1]."""
    mean = RunningMean()
    for value in values:
        mean.take(value)
    interval = mean.estimate()
    return [interval.mean, interval.low, interval.high]


def drift(variant: int) -> Values:
    rng = np.random.default_rng(variant)
    before, after = rng.beta(8, 2, 400), rng.beta(5, 5, 400)
    values = np.concatenate([before, after]).tolist()
    return {
        "steady": alarm(before.tolist(), 0.8, tolerance=0.05, run_length=1000.0),
        "drifting": alarm(values, 0.8, tolerance=0.05, run_length=1000.0),
        "falling short": alarm(values, 0.9, tolerance=0.02),
        "means": [running_mean(values[:count]) for count in (1, 20, 400, 800)],
        "expected": [expected_true_skip(np.linspace(0.0, 0.9, 10).tolist(), rate) for rate in (0.0, 0.33, 0.6)],
    }


def calibration(pair_name: str, name: str, variant: int, **options: Any) -> Values:
    """Thresholds, ties and rates of three rounds on a stored rollout, which the gate sees again in every round."""
    pair = pair_of(pair_name)

    def roll(settings: GateSettings, number: int) -> dict[str, Any]:
        policy, made = SpeculativePolicy(pair, settings.build(pair), seed=variant), list[Any]()
        for observation in observations(pair_name, 60 if pair_name == "pusht" else 30):
            policy.act(observation)
            assert policy.record is not None
            if not made or made[-1] is not policy.record.decision:
                made.append(policy.record.decision)
        return {
            "score": np.array([decision.score for decision in made]),
            "reason": np.array([REASONS.index(decision.reason) for decision in made]),
            "transmitted": np.array([decision.transmit for decision in made]),
        }

    def rounds_at(rate: float) -> list[Any]:
        search = find_threshold(GateSettings(name, options=tuple(options.items())), rate, 3, roll)
        tried = [(trial.settings, trial.rate) for trial in search.rounds]
        tried.append((search.settings, search.checked["transmitted"].mean()))
        return [[settings.threshold, settings.tie_probability, rate] for settings, rate in tried]

    scores = np.array([0.0, 0.0, 0.0, 0.1, 0.2, 0.2, 0.5])
    ties = [threshold_for_rate(scores, rate) for rate in (0.2, 0.5, 0.9)]
    return {"ties": ties} | {str(rate): rounds_at(rate) for rate in (0.3, 0.6)}


CASES |= {
    "controller": controlled, "drift": drift,
    "calibration-deviation": partial(
        calibration, "kitchen", "adahi", reading="euclidean", alpha=0.5, source="executed"
    ),
    "calibration-uncertainty": partial(calibration, "pusht", "uncertainty", kind="disagreement"),
}  # fmt: skip

# ---- stages and where they run ---------------------------------------------------------------------------------------


def stages(bundle: str, variant: int) -> Values:
    """A network's outputs where a server has run so many of its stages and sent what it has at a precision."""
    with TemporaryDirectory() as folder:
        made = split_bundle(bundle, Path(folder) / "stages")
    spec, last, exchange = made.spec, made.spec.stages, staged.SplitExchange(made)
    request = Request(window_of(spec.observation, seen_by(bundle, variant, 6)), StepAddress(0, 0, 0, 0))

    def at(cut: int, precision: Any) -> list[Any]:
        if cut == 0:
            return list(made.run([request.window]))
        arrays = exchanged(exchange, staged.kind_at(spec, cut, precision), request)
        if cut == last:
            return [arrays[name].reshape(1, *shape) for name, shape in spec.outputs.items()]
        return list(made.finish(staged.unpack(arrays, spec.activations[cut - 1]), cut))

    values: Values = {"stages": last, "activations": spec.activations, "outputs": spec.outputs}
    for precision in ("float32", "float16", "uint8"):
        outputs = [at(cut, precision) for cut in range(last + 1)]
        values[precision] = [[[float(array.mean()), float(array.std())] for array in arrays] for arrays in outputs]
    return values


def placement(variant: int) -> Values:
    rng = np.random.default_rng(variant)
    costs: dict[str, Any] = {
        "server_s": [0.002, 0.003, 0.004, 0.003], "device_s": [0.02, 0.03, 0.05, 0.02],
        "cut_bytes": [0.0, 40e3, 9e3, 25e3, 2e3], "observation_bytes": 30e3, "load": [0.1, 0.3, 0.4, 0.2],
    }  # fmt: skip
    known = roboecc.StageCosts(**costs)
    links, pool = np.exp(np.cumsum(rng.normal(0.0, 0.7, 40)) + np.log(2e6)).tolist(), range(known.stages + 1)

    def cuts(rule: Any, latency_s: float, **options: Any) -> list[int]:
        """Of successive inferences on a link of given bandwidths."""
        choose, past = rule(known, pool, **options), deque[tuple[float, float]](maxlen=roboecc.MAX_EXCHANGES)
        cut, cuts = 0, []
        for bytes_s in links:
            cut = choose(cut, past)
            cuts.append(cut)
            if cut:
                past.append((known.crossing()[cut], latency_s + known.crossing()[cut] / bytes_s))
        return cuts

    totals = {
        kind: [roboecc.total_s(known, rate, 0.01, kind) for rate in (1e5, 1e6, 1e7)] for kind in ("faithful", "printed")
    }
    best = partial(roboecc.best_cut, loads=known.loads, allowed=range(5))
    adjusted = partial(roboecc.adjusted_cut, 2, low=-1e5, high=1e5, pool=range(1, 5), cut_bytes=known.cut_bytes)
    smallest = partial(cuts, roboecc.SmallestTotal)
    return {
        "totals": totals,
        "best": [[best(row, budget=budget) for row in totals["faithful"]] for budget in (0.5, 9.0)],
        "adjusted": [adjusted(change=change) for change in (-2e5, 0.0, 2e5)],
        "roboecc": cuts(roboecc.RoboeccRule, 0.01),
        "smallest": smallest(0.01, look_every=3),
        "smallest, latency apart": cuts(LatencyApart, 0.03),
        "smallest, budget": smallest(0.01, budget=0.5),
    }


CASES |= {f"stages-{bundle}": partial(stages, bundle) for bundle in ("ball", "pusht-flow")} | {"placement": placement}

# ---- TISED's equations -----------------------------------------------------------------------------------------------


def tised(variant: int) -> Values:
    depths = np.arange(7)
    times_s = task_s(20.0 + 0.15 * depths**2, chunk_s(0.3, 0.05, 8, overlap=depths))
    optima = optimum(depths, times_s, "least"), optimum([1.0, 0.7, 0.5, 0.2], [3.0, 2.5, 2.6, 2.4], "least")
    best = [[point.where, point.value, point.interior, point.conditions] for point in optima]
    return {
        "overlap": best[0],
        "scan": best[1],
        "times": [chunk_s(0.3, 0.05, 8, 0.7, depths), exact_task_s(20.0, 0.3, 0.05, 8, 0.7, depths)],
        "stall": stall_s(0.3, 0.05, 0.7, depths),
    }


CASES["tised"] = tised

# ---- the wire: the pairs and decodings of each family ----------------------------------------------------------------

WIRED = (
    "ball", "metaworld", "kitchen-tokens/ar", "metaworld-tokens/specvla", "kitchen-tokens/specvla_device",
    "kitchen-tokens/kerv", "relocate-tokens/heisd_no_switch", "pusht-flow/full_3", "pusht-flow/flash_fitted",
    "metaworld-flow/flash_policy_fitted", "chunks-regression",
)  # fmt: skip


def wired(source: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The local outcome of some inferences, and those that crossed the wire, by the place where they were sampled."""
    pair = pair_of(source)
    policy: Any = SpeculativePolicy(pair, gate_of(pair, "always"), seed=1)
    for observation in seen_by(source, 1):
        inferring = policy.wants_inference
        policy.act(observation)
        if inferring and policy.record.address.step < 4:
            yield policy.record.outcome, over_the_wire(pair, policy.record)
