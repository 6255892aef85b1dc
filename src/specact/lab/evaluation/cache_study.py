"""FreqCache and its controls: share of reused tokens, inference time, and change of cache and chunk."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from specact.errors import ConfigError
from specact.families.chunks.flow import Array
from specact.families.flash.pair import FlashPair
from specact.families.flash.rounds import ROUNDS
from specact.families.freqcache.cached import FreqCached, Reuse
from specact.families.load import load_pair
from specact.files import write_json
from specact.lab.evaluation.evaluation import Evaluation
from specact.lab.evaluation.flow_study import FlowStudy, relative_costs, target_observations
from specact.observation import Window
from specact.rng import Role, stream

VARIANTS = (
    "freqcache", "freqcache_still", "freqcache_all", "freqcache_random", "freqcache_oldest", "freqcache_changed",
    "freqcache_frozen",
)  # fmt: skip
METHODS = (
    "full", "freqcache", "freqcache_frozen", "freqcache_random", "freqcache_still", "freqcache_oldest", "full_5",
    "full_3", "full_2", "freqcache_changed", "freqcache_all", "freqcache_2",
)  # fmt: skip
_STEPS = (10, 5, 3, 2)

Progress = Callable[[str, int, int], None]


def plan_cache(*, seed: int, quick: bool) -> list[FlowStudy]:
    """The flow policy with patches that comes with the package.

    Args:
        seed: random seed.
        quick: few episodes, for a smoke test.
    """
    arm = Evaluation("metaworld-flow", None, METHODS, 10 if quick else 50, seed=seed, shard=10)
    return [FlowStudy(arm, 1 if quick else 10)]


def compare_variants(
    pair: FlashPair, paths: list[list[Window]], seed: int, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Reuse, error and time of each variant on the same observations, timed in random order.

    Args:
        pair: with a refresh.
        paths: observations of each episode.
        seed: of the order and the noise.
        progress: called with (done, total).

    Returns:
        ``inferences``, without the first of each episode, where the cache is empty; of each of ``cameras``, the share
        of inferences whose motion estimate is ``confident``, and also half a patch or more, ``moved``;
        of each of ``variants``: ``reused``, the share of the cameras' tokens; ``cosine`` of the cache to the full one
        over these tokens; ``distance`` of the chunk to that of a full round from the same noise (root mean square,
        flow's units); of each of ``costs``: ``ms``, the median, each the fastest of five passes, and ``relative``, the
        geometric mean of the ratio to ``full_10``, with its interval: of a variant's whole inference, of its ``prefix``
        (frequencies and refresh), of full rounds of fewer steps, of ``encoder``, ``prefix`` and one step of ``expert``.
    """
    if pair.refresh is None:
        raise ConfigError(f"{pair.name} has no refresh; make one: specact export --refresh")
    policy, refresh, order = pair.policy, pair.refresh, stream(seed, Role.GATE)
    cached = {name: FreqCached(policy.networks, refresh, reuse) for name in VARIANTS if (reuse := ROUNDS[name].reuse)}
    positions = np.concatenate([p.first + np.arange(p.rows * p.columns) for p in refresh.cameras.values()])
    stats: dict[str, dict[str, list[float]]] = {name: {"reused": [], "cosine": [], "distance": []} for name in VARIANTS}
    motions: dict[str, list[tuple[bool, bool]]] = {name: [] for name in refresh.cameras}
    seconds: dict[str, list[float]] = {name: [] for name in ("encoder", "expert", "prefix", *VARIANTS)}
    total, done = sum(map(len, paths)), 0
    for path in paths:
        for parts in cached.values():
            parts.reset()
        for number, window in enumerate(path):
            seen, noise = [policy.spec.observation.select(window)], policy.noise(order)[None]
            tokens = policy.networks.tokens(seen)
            whole = policy.networks.cache(seen, tokens)
            full_chunk = policy.denoised(noise, whole, 10)
            timed: dict[str, Callable[[], Any]] = {
                "encoder": partial(policy.networks.tokens, seen),
                "expert": partial(policy.networks.velocity, noise, np.zeros(1, np.float32), whole),
                "prefix": partial(policy.networks.cache, seen, tokens),
                **{name: partial(_next_cache, parts, seen, tokens) for name, parts in cached.items()},
            }
            for name in order.permutation(list(timed)).tolist() if number else ():
                seconds[name].append(fastest(timed[name]))
            for name, parts in cached.items():
                cache = parts.cache(seen, tokens)
                if number:
                    entry, chunk = stats[name], policy.denoised(noise, cache, 10)
                    entry["reused"].append(parts.share)
                    entry["cosine"].append(_cosine(cache[..., positions, :], whole[..., positions, :]))
                    entry["distance"].append(float(np.sqrt(np.square(chunk - full_chunk).mean())))
            done += 1
            progress(done, total)
            if not number:
                continue
            for camera, estimate in cached["freqcache"].last.items():
                motion = estimate.motion
                confident = bool(motion.confidence >= Reuse().confidence)
                grid, shape = refresh.cameras[camera], policy.spec.observation[camera].shape
                patches = max(abs(motion.rows) * grid.rows / shape[0], abs(motion.columns) * grid.columns / shape[1])
                motions[camera].append((confident, confident and patches >= 0.5))
    return {
        "inferences": len(seconds["prefix"]),
        "cameras": {
            name: dict(zip(("confident", "moved"), np.mean(found, axis=0).tolist(), strict=True))
            for name, found in motions.items()
        },
        "variants": {
            name: {key: float(np.mean(values)) for key, values in entry.items()} for name, entry in stats.items()
        },
        "costs": _costs(seconds),
    }  # fmt: skip


def _next_cache(parts: FreqCached, seen: list[Window], tokens: Array) -> Array:
    """The next cache, computed on a copy, so that ``parts`` keeps its state."""
    return copy(parts).cache(seen, tokens)


def fastest(work: Callable[[], Any]) -> float:
    """Seconds of the fastest of five passes: other load on the machine only adds to them."""
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _cosine(found: Any, wanted: Any) -> float:
    """Of the two as one vector each."""
    return float((found * wanted).sum() / math.sqrt(float(np.square(found).sum()) * float(np.square(wanted).sum())))


def _costs(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Costs of the parts, and of whole inferences as sums of their parts, over the observations."""
    part = {name: np.array(spent) for name, spent in seconds.items()}
    whole = {f"full_{steps}": part["encoder"] + part["prefix"] + steps * part["expert"] for steps in _STEPS}
    reusing = {name: part["encoder"] + part[name] + 10 * part["expert"] for name in VARIANTS}
    renamed = {f"{name}:prefix" if name in VARIANTS else name: spent for name, spent in part.items()}
    return relative_costs(renamed | whole | reusing, whole["full_10"])


def write_reuse(study: FlowStudy, out: Path, progress: Progress) -> dict[str, Any]:
    """Measures reuse and costs on the target's own rollouts, per inference and per control step; writes ``out``.

    Raises:
        ConfigError: if the policy is no flow policy, or has no refresh.
    """
    evaluation = study.evaluation
    pair = load_pair(evaluation.bundle)
    if not isinstance(pair, FlashPair):
        raise ConfigError(f"{evaluation.bundle} is no flow policy, and only one has a prefix to reuse")
    summary: dict[str, Any] = {
        "bundle": pair.name, "fingerprint": pair.fingerprint, "episodes": study.on_path, "seed": evaluation.seed,
    }  # fmt: skip
    for name, execute in (("inference", pair.execute), ("step", 1)):
        driver = replace(pair, settings=replace(pair.settings, execute=execute))
        paths = target_observations(driver, evaluation.env or pair.env, study.on_path, evaluation.seed)
        told = compare_variants(
            pair, paths, evaluation.seed, lambda done, total: progress("reuse along paths", done, total)
        )
        summary[name] = {"execute": execute, **told}
    write_json(out, summary)
    return summary
