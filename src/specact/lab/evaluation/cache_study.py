"""FreqCache beside the controls that could make it unnecessary: what it reuses, what that takes and what it changes."""

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
from specact.lab.evaluation.flow_study import FlowChapter, path_of
from specact.lab.statistics import mean_interval
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


def plan_cache(*, seed: int, quick: bool) -> list[FlowChapter]:
    """The flow policy with patches that comes with the package.

    Args:
        seed: of everything random.
        quick: few episodes, to see that everything works.
    """
    arm = Evaluation("metaworld-flow", None, METHODS, 10 if quick else 50, seed=seed, shard=10)
    return [FlowChapter(arm, 1 if quick else 10)]


def along(
    pair: FlashPair, paths: list[list[Window]], seed: int, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """What each variant reuses, changes and takes on the same observations, one after the other in random order.

    Args:
        pair: with a refresh.
        paths: observations of each episode.
        seed: of order and noise.
        progress: told (done, in all).

    Returns:
        ``inferences``, without the first of each episode, which nothing can be reused in; of each of ``cameras``, the
        share of them at which motion is ``confident``, and at which it is that and by half a patch or more, ``moved``;
        of each of ``variants``: ``reused``, the share of the cameras' tokens; ``cosine`` of the cache to the full one
        over these tokens; ``distance`` of the chunk to that of a full round from the same noise (root mean square,
        flow's units); of each of ``costs``: ``ms``, the median, each the fastest of five passes, and ``relative``, the
        geometric mean of the ratio to ``full_10``, with its interval: of a variant's whole inference, of its ``prefix``
        (frequencies and refresh), of full rounds of fewer steps, of ``encoder``, ``prefix`` and ``expert``, one step
        of it.
    """
    if pair.refresh is None:
        raise ConfigError(f"{pair.name} has no refresh; make one: specact export --refresh")
    policy, made, order = pair.policy, pair.refresh, stream(seed, Role.GATE)
    cached = {name: FreqCached(policy.networks, made, how) for name in VARIANTS if (how := ROUNDS[name].reuse)}
    places = np.concatenate([p.first + np.arange(p.rows * p.columns) for p in made.cameras.values()])
    said: dict[str, dict[str, list[float]]] = {name: {"reused": [], "cosine": [], "distance": []} for name in VARIANTS}
    motions: dict[str, list[tuple[bool, bool]]] = {name: [] for name in made.cameras}
    seconds: dict[str, list[float]] = {name: [] for name in ("encoder", "expert", "prefix", *VARIANTS)}
    total, done = sum(map(len, paths)), 0
    for path in paths:
        for parts in cached.values():
            parts.reset()
        for number, window in enumerate(path):
            seen, noise = [policy.spec.observation.select(window)], policy.noise(order)[None]
            tokens = policy.networks.tokens(seen)
            whole = policy.networks.cache(seen, tokens)
            wanted = policy.denoised(noise, whole, 10)
            works: dict[str, Callable[[], Any]] = {
                "encoder": partial(policy.networks.tokens, seen),
                "expert": partial(policy.networks.velocity, noise, np.zeros(1, np.float32), whole),
                "prefix": partial(policy.networks.cache, seen, tokens),
                **{name: partial(_of_copy, parts, seen, tokens) for name, parts in cached.items()},
            }
            for name in order.permutation(list(works)).tolist() if number else ():
                seconds[name].append(_fastest(works[name]))
            for name, parts in cached.items():
                cache = parts.cache(seen, tokens)
                if number:
                    entry, chunk = said[name], policy.denoised(noise, cache, 10)
                    entry["reused"].append(parts.share)
                    entry["cosine"].append(_cosine(cache[..., places, :], whole[..., places, :]))
                    entry["distance"].append(float(np.sqrt(np.square(chunk - wanted).mean())))
            done += 1
            progress(done, total)
            if not number:
                continue
            for camera, found in cached["freqcache"].last.items():
                confident = bool(found.motion.confidence >= Reuse().confidence)
                grid, shape = made.cameras[camera], policy.spec.observation[camera].shape
                far = max(
                    abs(found.motion.rows) * grid.rows / shape[0], abs(found.motion.columns) * grid.columns / shape[1]
                )
                motions[camera].append((confident, confident and far >= 0.5))
    return {
        "inferences": len(seconds["prefix"]),
        "cameras": {
            name: dict(zip(("confident", "moved"), np.mean(found, axis=0).tolist(), strict=True))
            for name, found in motions.items()
        },
        "variants": {name: {key: float(np.mean(entry)) for key, entry in told.items()} for name, told in said.items()},
        "costs": _costs(seconds),
    }  # fmt: skip


def _of_copy(parts: FreqCached, seen: list[Window], tokens: Array) -> Array:
    """The next cache, which the parts themselves do not get to know of."""
    return copy(parts).cache(seen, tokens)


def _fastest(work: Callable[[], Any]) -> float:
    """Seconds of the fastest of five passes: what else runs on the machine only adds to them."""
    taken = []
    for _ in range(5):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return min(taken)


def _cosine(found: Any, wanted: Any) -> float:
    """Of the two as one vector each."""
    return float((found * wanted).sum() / math.sqrt(float(np.square(found).sum()) * float(np.square(wanted).sum())))


def _costs(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Of the parts, and of inferences as the sum of theirs, of each observation."""
    part = {name: np.array(spent) for name, spent in seconds.items()}
    whole = {f"full_{steps}": part["encoder"] + part["prefix"] + steps * part["expert"] for steps in _STEPS}
    reusing = {name: part["encoder"] + part[name] + 10 * part["expert"] for name in VARIANTS}
    called = {f"{name}:prefix" if name in VARIANTS else name: spent for name, spent in part.items()}
    found = {}
    for name, spent in (called | whole | reusing).items():
        # Logarithms: one inference that was held up would decide the mean of ratios.
        ratio = mean_interval(np.log(spent) - np.log(whole["full_10"]))
        low, mean, high = (math.exp(value) for value in (ratio.low, ratio.mean, ratio.high))
        found[name] = {
            "ms": 1e3 * float(np.median(spent)), "relative": mean, "relative_low": low, "relative_high": high,
        }  # fmt: skip
    return found


def reuse_of(chapter: FlowChapter, out: Path, progress: Progress) -> dict[str, Any]:
    """Measures reuse and costs along the target's own paths, at every inference and at every control step; to ``out``.

    Raises:
        ConfigError: if the chapter's policy is no flow policy, or has no refresh.
    """
    what = chapter.what
    pair = load_pair(what.bundle)
    if not isinstance(pair, FlashPair):
        raise ConfigError(f"{what.bundle} is no flow policy, and only one has a prefix to reuse")
    found: dict[str, Any] = {
        "bundle": pair.name, "fingerprint": pair.fingerprint, "episodes": chapter.on_path, "seed": what.seed,
    }  # fmt: skip
    for name, execute in (("inference", pair.execute), ("step", 1)):
        led = replace(pair, settings=replace(pair.settings, execute=execute))
        paths = path_of(led, what.env or pair.env, chapter.on_path, what.seed)
        told = along(pair, paths, what.seed, lambda done, total: progress("reuse along paths", done, total))
        found[name] = {"execute": execute, **told}
    write_json(out, found)
    return found
