"""FreqCache on our flow policies with two cameras: reuse, error and time of its variants, and success.

Those of LIBERO-Object are trained on what their recipe names. Ten simulators live in a process: ``--workers 1``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure

from experiments.figures import draw_series, points_of
from experiments.flash import METHODS as FULL
from experiments.grid import ROOT, Cell, Results, Run, evaluated, evaluation_cell, specact, trained
from experiments.measure import interleaved, outcomes, paired, relative_costs, seconds_of, target_path
from experiments.report import Picture, Report, Table, contrast_table, glossary, methods_of, one_family, under
from specact.families.chunks.flow import FlowNetworks, load_flow
from specact.lab.evaluation.run import Evaluation
from specact.lab.rollout.methods import composed
from specact.lab.rollout.rollout import EpisodeRange
from specact.load import load_pair
from specact.observation import Window
from specact.pair import Pair
from specact.rng import Role, stream
from specact.systems import freqcache
from specact.systems.flash import FlashSettings
from specact.systems.flow import load_flow_pair
from specact.systems.freqcache import Frame, FreqCached, Motion, Plane, RefreshBundle, Reuse, ReusingRounds

# The policy, and the same recipe at 48 pixels: as many tokens as FreqCache computes again, for nothing more.
WHOLE, SMALLER = "metaworld-flow", "metaworld-flow-48"
# A policy of LIBERO-Object with finer patches, of 8 x 8 pixels, and its methods.
FINER, SUITE = "libero-object-patches", "libero-object"
ON_FINER = {
    "summary": ("full", "freqcache", "freqcache_still", "freqcache_random", "freqcache_frozen", "full_5"),
    # Added when these lost nearly all: a frame after every four actions, not sixteen.
    "often": ("full", "freqcache"),
}
EXECUTED = {"summary": "every sixteen actions", "often": "every four actions"}
# The variable of the environment with the path of the policy that :func:`often` loads.
PATH = "SPECACT_FINER"


@dataclass(frozen=True)
class OtherRounds(ReusingRounds):
    """Controls of FreqCache.

    Attributes:
        remaps: whether tokens move with the estimated motion; otherwise none is assumed.
        window: whether frames have a window, and weak frequencies less weight, where the motion is estimated.
        first: which tokens are recomputed first: those with the most energy at high frequencies (``edges``), those
            whose patch changed most, those that were computed longest ago, or random ones.
    """

    remaps: bool = True
    window: bool = True
    first: Literal["edges", "changed", "oldest", "random"] = "edges"

    def cached(self, networks: FlowNetworks, refresh: RefreshBundle) -> FreqCached:
        return OtherCached(networks, refresh, self)


class OtherCached(FreqCached):
    """Chooses tokens otherwise, see :class:`OtherRounds`."""

    def __init__(self, networks: FlowNetworks, refresh: RefreshBundle, rounds: OtherRounds) -> None:
        self._rounds, self._patches = rounds, refresh.spec.cameras
        super().__init__(networks, refresh, rounds.reuse)

    def reset(self) -> None:
        super().reset()
        self._rng = stream(0, Role.VERIFY)
        # How often each token was reused since it was computed, and its source in the last cache.
        self._ages: dict[str, tuple[Plane, Any]] = {}

    def motion(self, before: Frame, now: Frame) -> Motion:
        if not self._rounds.remaps:
            return Motion(0, 0, np.inf)
        return super().motion(before, now) if self._rounds.window else bare_motion(before.luma, now.luma)

    def rank(self, name: str, before: Frame, now: Frame, earlier: Any) -> Plane:
        grid, first = self._patches[name].grid, self._rounds.first
        if first == "random":
            return self._rng.random(len(earlier))
        if first == "changed":
            changes = np.abs(freqcache.patches_of(now.luma, grid) - freqcache.patches_of(before.luma, grid)[earlier])
            return np.asarray(changes.mean(axis=(1, 2)))
        if first == "oldest":
            ages, source = self._ages.get(name, (np.zeros(len(earlier)), earlier))
            mask = self.masks.get(name, np.zeros(len(earlier), bool))
            ages = np.where(mask, ages[source] + 1.0, 0.0)
            self._ages = self._ages | {name: (ages, earlier)}
            return np.asarray(ages[earlier])
        return super().rank(name, before, now, earlier)


def bare_motion(before: Plane, now: Plane) -> Motion:
    """The motion between frames without a window, all frequencies with the same weight."""
    return freqcache.phase_correlation(freqcache.spectrum(before), freqcache.spectrum(now), now.shape, floor=1e-12)


def windowed_motion(before: Plane, now: Plane) -> Motion:
    """The motion between frames with a window."""
    first, second = (freqcache.spectrum(freqcache.windowed(frame)) for frame in (before, now))
    return freqcache.phase_correlation(first, second, now.shape)


_WHOLE = Reuse(least=1.0, most=1.0, refreshed=0.0)
REUSE: dict[str, ReusingRounds] = {
    "freqcache": ReusingRounds("FreqCache: the tokens of smooth patches reused, moved with the picture"),
    "freqcache_still": OtherRounds("FreqCache without motion: tokens stay in place", remaps=False),
    "freqcache_bare": OtherRounds("FreqCache without a window before phase correlation", window=False),
    "freqcache_all": ReusingRounds("every token of the overlap reused, edges and budget ignored", reuse=_WHOLE),
    "freqcache_random": OtherRounds("FreqCache with as many tokens reused, any of them", first="random"),
    "freqcache_oldest": OtherRounds(
        "FreqCache with as many tokens reused, those that were computed last", first="oldest"
    ),
    "freqcache_changed": OtherRounds(
        "tokens of the patches that changed least reused, in place", remaps=False, first="changed"
    ),
    "freqcache_frozen": OtherRounds(
        "the cameras' tokens computed once in an episode: the control", reuse=_WHOLE, remaps=False
    ),
}


# In the order of the page, with their rivals.
RIVALS: dict[str, tuple[str, ...]] = {
    "freqcache": ("full", "full_5", "freqcache_still", "freqcache_bare", "freqcache_all", "freqcache_random"),
    "freqcache_frozen": ("full",), "freqcache_random": ("full",), "freqcache_still": (), "freqcache_bare": ("full",),
    "freqcache_oldest": ("full",), "full_5": (), "full_3": (), "full_2": (), "freqcache_changed": ("full",),
    "freqcache_all": (),
}  # fmt: skip
METHODS = {
    "full": FULL["full"],
    **{name: composed(name, REUSE[name], *rivals) if name in REUSE else FULL[name] for name, rivals in RIVALS.items()},
    "freqcache_2": composed("freqcache_2", ReusingRounds("FreqCache, and 2 steps", steps=2), "full_2"),
}
SHOWN = {
    "freqcache": "FreqCache", "freqcache_random": "random tokens", "freqcache_oldest": "oldest recomputed",
    "freqcache_still": "without motion", "freqcache_changed": "least changed reused", "freqcache_all": "whole overlap",
}  # fmt: skip


def plan(run: Run) -> Iterator[Cell]:
    """Success, motion, reuse along the target's path, and the policy on smaller frames, which is trained."""
    for cell, names, episodes in (("large", ("full", "freqcache"), 200), ("summary", tuple(METHODS), 50)):
        methods = tuple(METHODS[name] for name in names)
        yield evaluation_cell(f"{WHOLE}/{cell}", Evaluation(WHOLE, None, methods, episodes, run.seed, shard=10))
    yield Cell("pans", pans)
    yield Cell(f"{WHOLE}/reuse", partial(measure_reuse, WHOLE))
    if not run.quick:
        yield Cell("smaller", smaller)
        yield Cell(f"{FINER}/training", train)
        yield from (Cell(f"{FINER}/{cell}", partial(finer, cell)) for cell in ON_FINER)
        yield Cell(f"{FINER}/reuse", partial(measure_reuse, FINER))


def train(folder: Path, run: Run) -> dict[str, Any]:
    """The policy with finer patches, which is given the network that FreqCache needs."""
    data = run.needed(f"the demonstrations of {SUITE}").resolve()
    policy = trained((ROOT / "recipes" / f"{FINER}.toml").read_text(), folder, run, "--data", data)
    specact("export", policy, "--refresh", "--out", folder / FINER)
    return {"fingerprint": load_pair(str(folder / FINER)).fingerprint}


def installed(policy: str, run: Run) -> str:
    """A policy of the package, or the one that is trained here."""
    return policy if policy != FINER else str(run.out / FINER / "training" / FINER)


def often() -> Pair[Any]:
    """The policy with finer patches, of whose chunks four actions are executed."""
    return load_flow_pair(load_flow(os.environ[PATH])).composed(settings=FlashSettings(4))


def finer(cell: str, folder: Path, run: Run) -> dict[str, Any]:
    """Success of the policy with finer patches in the benchmark's initial states."""
    run.result(f"{FINER}/training")
    path = os.environ[PATH] = installed(FINER, run)
    methods = tuple(METHODS[name] for name in ON_FINER[cell])
    pair = f"{__name__}:often" if cell == "often" else path
    return evaluated(Evaluation(pair, SUITE, methods, 50, run.seed, shard=10), folder, run)


def measure_reuse(policy: str, folder: Path, run: Run) -> dict[str, Any]:
    """Reuse and costs on the target's own rollouts."""
    pair = load_pair(installed(policy, run))
    windows = windows_of(pair, run.few(10), run.seed)
    return {"fingerprint": pair.fingerprint, "inference": compare_variants(pair, windows, run.seed)}


def windows_of(pair: Pair[Any], episodes: int, seed: int) -> list[list[Window]]:
    """The observations of each episode of the target's own rollouts."""
    paths = dict[int, list[Window]]()
    for record in target_path(pair, pair.env, EpisodeRange.FLOW_PATHS.episodes(episodes), seed):
        paths.setdefault(record.address.episode, []).append(record.proposal.window)
    return list(paths.values())


def pans(folder: Path, run: Run) -> dict[str, list[dict[str, float]]]:
    """Pans, and those of other scenes, by which the least confidence was chosen."""
    chosen = measure_pans(run.seed + 100, run.few(100))["Hann"]
    return measure_pans(run.seed, run.few(100)) | {"Hann, other scenes": chosen}


def measure_pans(seed: int, scenes: int = 100) -> dict[str, list[dict[str, float]]]:
    """Estimated motion of smooth pictures, which do not repeat at their borders, with and without a window.

    Scenes are white noise smoothed by a Gaussian of ``sigma`` 1 to 6 pixels. Two frames see it up to 20 pixels apart,
    exactly, or with 8 bits and noise of one level (``noisy``). Shares of the pans that are found ``exact``, that are
    ``confident``, and that are so although off by more than 2 pixels (``wrong``); ``unrelated``: of frames of two
    scenes that are confident. ``largest``: the largest confidence of a pan off by more than 2 pixels, at least 1.
    """
    kinds = {"Hann": windowed_motion, "none": bare_motion}
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    for sigma in range(1, 7):
        trials: dict[str, list[tuple[bool, bool, bool, bool, float]]] = {name: [] for name in kinds}
        for scene in range(scenes):
            rng = np.random.default_rng((seed, sigma, scene))
            world, other = smooth_scene(rng, sigma), smooth_scene(rng, sigma)
            down, right = rng.integers(-20, 21, 2).tolist()
            clean = [world[32:96, 32:96], world[32 - down : 96 - down, 32 - right : 96 - right], other[32:96, 32:96]]
            noisy = [np.rint(128.0 + 40.0 * frame + rng.standard_normal(frame.shape)) for frame in clean]
            for before, now, elsewhere in (clean, noisy):
                for name, motion in kinds.items():
                    pan, unrelated = motion(before, now), motion(before, elsewhere)
                    error = max(abs(pan.rows - down), abs(pan.columns - right))
                    sure, wrong = pan.confidence >= Reuse().confidence, error > 2
                    confused = unrelated.confidence >= Reuse().confidence
                    largest = pan.confidence if wrong else 1.0
                    trials[name].append((error == 0, sure, sure and wrong, confused, largest))
        for name, values in trials.items():
            columns = np.array(values, float)
            shares = zip(("exact", "confident", "wrong", "unrelated"), columns.mean(0).tolist(), strict=False)
            rows[name].append({"sigma": sigma, **dict(shares), "largest": float(columns[:, -1].max())})
    return rows


def smooth_scene(rng: np.random.Generator, sigma: float, size: int = 128) -> Plane:
    """White noise smoothed by a Gaussian [pixels], with mean 0 and variance 1, ``[size, size]``."""
    frequency = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.fftfreq(size))
    noise = np.fft.fft2(rng.standard_normal((size, size)))
    scene = np.fft.ifft2(noise * np.exp(-2.0 * np.square(np.pi * sigma * frequency))).real
    return np.asarray((scene - scene.mean()) / scene.std())


def compare_variants(pair: Pair[Any], paths: list[list[Window]], seed: int) -> dict[str, Any]:
    """Reuse, error and time of each variant on the same observations, timed in random order.

    The first of each episode, where the cache is empty, is left out. Of each of ``cameras``: the share of inferences
    whose motion estimate is ``confident``, and also half a patch or more, ``moved``. Of each of ``variants``: the share
    ``reused`` of the cameras' tokens, the ``cosine`` of the cache to the full one over these, the ``distance`` of the
    chunk to that of a full round from the same noise (root mean square, flow's units). ``costs``: of a variant's whole
    inference, of its ``prefix``, of full rounds of fewer steps, of ``encoder``, ``prefix`` and a step of ``expert``.
    """
    policy, refresh, order = pair.parts.policy, pair.parts.refresh, stream(seed, Role.GATE)
    cached = {name: rounds.cached(policy.networks, refresh) for name, rounds in REUSE.items()}
    positions = np.concatenate([p.first + np.arange(p.rows * p.columns) for p in refresh.spec.cameras.values()])
    stats: dict[str, list[tuple[float, float, float]]] = {name: [] for name in REUSE}
    motions: dict[str, list[tuple[bool, bool]]] = {name: [] for name in refresh.spec.cameras}
    seconds: dict[str, list[float]] = {name: [] for name in ("encoder", "expert", "prefix", *REUSE)}
    for path in paths:
        for parts in cached.values():
            parts.reset()
        for number, window in enumerate(path):
            seen, noise = [policy.spec.observation.select(window)], policy.noise(order)[None]
            tokens = policy.networks.tokens(seen)
            whole = policy.networks.cache(seen, tokens)
            full_chunk = policy.denoised(noise, whole, 10)
            timed: dict[str, Callable[[], object]] = {
                "encoder": partial(policy.networks.tokens, seen),
                "expert": partial(policy.networks.velocity, noise, np.zeros(1, np.float32), whole),
                "prefix": partial(policy.networks.cache, seen, tokens),
                **{name: partial(_next_cache, parts, seen, tokens) for name, parts in cached.items()},
            }  # fmt: skip
            for name in order.permutation(list(timed)).tolist() if number else ():
                seconds[name].append(seconds_of(timed[name], 5))
            for name, parts in cached.items():
                cache = parts.cache(seen[0], tokens)
                if number:
                    error = np.sqrt(np.square(policy.denoised(noise, cache, 10) - full_chunk).mean())
                    cosine = _cosine(cache[..., positions, :], whole[..., positions, :])
                    stats[name].append((np.concatenate([*parts.masks.values()]).mean(), cosine, float(error)))
            for camera, motion in cached["freqcache"].motions.items() if number else ():
                confident = bool(motion.confidence >= Reuse().confidence)
                grid, shape = refresh.spec.cameras[camera], policy.spec.observation[camera].shape
                patches = max(abs(motion.rows) * grid.rows / shape[0], abs(motion.columns) * grid.columns / shape[1])
                motions[camera].append((confident, confident and patches >= 0.5))

    def means(names: tuple[str, ...], values: list[Any]) -> dict[str, float]:
        return dict(zip(names, np.mean(values, axis=0).tolist(), strict=True))

    return {
        "inferences": len(seconds["prefix"]),
        "cameras": {name: means(("confident", "moved"), values) for name, values in motions.items()},
        "variants": {name: means(("reused", "cosine", "distance"), values) for name, values in stats.items()},
        "costs": inference_costs(seconds),
    }


def _next_cache(parts: FreqCached, seen: list[Window], tokens: Any) -> object:
    """On a copy, so that the parts keep their state."""
    return copy(parts).cache(seen[0], tokens)


def _cosine(first: Any, second: Any) -> float:
    """The cosine of two arrays, each taken as one vector."""
    norms = math.sqrt(float(np.square(first).sum()) * float(np.square(second).sum()))
    return float((first * second).sum() / norms)


def inference_costs(seconds: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
    """Costs of the parts, and of whole inferences as sums of their parts, over the observations."""
    part = {name: np.array(spent) for name, spent in seconds.items()}
    whole = {f"full_{steps}": part["encoder"] + part["prefix"] + steps * part["expert"] for steps in (10, 5, 3, 2)}
    reusing = {name: part["encoder"] + part[name] + 10 * part["expert"] for name in REUSE}
    renamed = {f"{name}:prefix" if name in REUSE else name: spent for name, spent in part.items()}
    return relative_costs(renamed | whole | reusing, whole["full_10"])


def smaller(folder: Path, run: Run) -> dict[str, Any]:
    """The same recipe trained on smaller frames, beside the policy itself: success and the time of an inference."""
    data = run.needed("the demonstrations of metaworld").resolve()
    recipe = (ROOT / "recipes" / f"{SMALLER}.toml").read_text()
    bundles = {WHOLE: WHOLE, SMALLER: str(trained(recipe, folder, run, "--data", data))}
    success, won = {}, {}
    for name, methods in ((WHOLE, ("full", "freqcache_bare")), (SMALLER, ("full",))):
        values = tuple(METHODS[method] for method in methods)
        evaluation = Evaluation(bundles[name], None, values, 200, seed=run.seed, shard=10)
        summary = evaluated(evaluation, folder / name, run)
        for method in methods:
            success[f"{name} {method}"] = summary["methods"][method]["success"]
            won[f"{name} {method}"] = outcomes(folder / name, method)
    pairs = [(f"{SMALLER} full", f"{WHOLE} {method}") for method in ("full", "freqcache_bare")]
    loaded = {name: load_pair(bundle) for name, bundle in bundles.items()}
    return {
        "episodes": 200, "seed": run.seed, "success": success, "contrasts": paired(won, pairs),
        "costs": costs_of_policies(loaded, run.seed),
    }  # fmt: skip


def costs_of_policies(pairs: Mapping[str, Pair[Any]], seed: int) -> dict[str, dict[str, float]]:
    """Tokens of the prefix, and what encoder, prefix and ten steps take on the same observations, in turns."""
    windows = [window for path in windows_of(pairs[WHOLE], 4, seed) for window in path]
    tokens: dict[str, int] = {}

    def infer(name: str, window: Window) -> None:
        policy = pairs[name].parts.policy
        seen, noise = [policy.spec.observation.select(window)], policy.noise(stream(seed, Role.GATE))[None]
        cameras = policy.networks.tokens(seen)
        policy.denoised(noise, policy.networks.cache(seen, cameras), 10)
        tokens[name] = cameras.shape[1]

    spent = interleaved({name: partial(infer, name) for name in pairs}, windows, stream(seed, Role.GATE), 5)
    return {name: {"tokens": tokens[name], **cost} for name, cost in relative_costs(spent, spent[WHOLE]).items()}


def report(results: Results) -> Report:
    """Success, time and reuse of FreqCache, its variants and two simpler ways, and one family of contrasts."""
    summary, reuse, small = results[WHOLE]["summary"], results[WHOLE]["reuse"]["inference"], results["smaller"]
    large = results[WHOLE]["large"]
    costs = costs_of(reuse)
    methods = [{**row, "time": costs.get(row["name"])} for row in methods_of(summary)]
    on_200 = f"{WHOLE}, 200 episodes"
    # FLASH's report tests two steps on more episodes; the larger run here does so for FreqCache and the full policy.
    more = [("full_2", "full"), ("freqcache", "full")]
    kept = [row for row in summary["contrasts"] if (row["first"], row["second"]) not in more]
    few = under(f"{WHOLE}, 50 episodes", kept)
    fine, places = results[FINER], {cell: f"{FINER}, {about}, 50 episodes" for cell, about in EXECUTED.items()}
    contrasts = one_family([
        *few, *under(on_200, large["contrasts"]), *under(on_200, small["contrasts"]),
        *(row for cell, place in places.items() for row in under(place, fine[cell]["contrasts"])),
    ])  # fmt: skip
    policies = [
        {"label": label, "success": success, **cost, "time": cost if label.endswith("full") else None}
        for label, success in small["success"].items() for cost in [small["costs"][label.split(" ")[0]]]
    ]  # fmt: skip
    finer_costs = costs_of(fine["reuse"]["inference"])
    on_finer = {cell: {row["name"]: row for row in methods_of(fine[cell])} for cell in EXECUTED}
    variants = [
        {"policy": policy, "name": name, "reused": None, "cosine": None, "distance": None,
         **measured["variants"].get(name, {}), **spent[name],
         "prefix_ms": spent.get(f"{name}:prefix", spent["prefix"])["ms"]}
        for policy, measured, spent in ((WHOLE, reuse, costs), (FINER, fine["reuse"]["inference"], finer_costs))
        for name in ("full", "full_5", "full_3", "full_2", *measured["variants"])
    ]  # fmt: skip
    moves = [{"window": window, **row} for window, rows in results["pans"].items() for row in rows]
    tables = [
        Table("main", f"Success in {summary['episodes']} paired episodes; time of an inference beside `full`.",
              "method | success | time | tokens reused",
              "`{name}` | {success:ci2} | {time:ci2} | {reused:.2f}", methods),
        Table("smaller", f"Smaller frames and FreqCache in {small['episodes']} paired episodes; time beside `full`.",
              "policy and method | tokens | success | time",
              "{label} | {tokens} | {success:ci3} | {time:ci2}", policies),
        Table("finer", f"{FINER} in 50 paired episodes, in the benchmark's initial states; time beside `full`.",
              "a frame | method | success | time | tokens reused",
              "{cell} | `{name}` | {success:ci2} | {time:ci2} | {reused:.2f?}",
              [{"cell": EXECUTED[cell], "reused": None, **row, "time": None if cell == "often" else finer_costs[name]}
               for cell, rows in on_finer.items() for name, row in rows.items()]),
        glossary(METHODS),
        Table("variants", "On the same observations of the target's own path: reuse, likeness to the full cache and "
              "chunk, time.", rows=variants),
        Table("pans", "Pans of smooth synthetic scenes: share found exactly, with confidence, and wrong by more than 2 "
              "pixels with confidence; frames of two scenes with confidence; the largest confidence of a wrong pan.",
              rows=moves),
        contrast_table(contrasts, family="success on 50 and on 200 episodes"),
    ]  # fmt: skip
    facts: dict[str, Any] = {
        {on_200: "large_", places["summary"]: "finer_", places["often"]: "often_"}.get(row["on"], "")
        + f"{row['first']}_{row['second']}".replace(" ", "_").replace("-", "_"): row
        for row in contrasts
    }
    facts |= {
        "cost": costs, "small": {row["label"]: row for row in policies}, "small_episodes": small["episodes"],
        "cameras": reuse["cameras"], "variants": reuse["variants"],
        "finer": {
            **on_finer["summary"], "often": on_finer["often"], "cost": finer_costs,
            "episodes": fine["summary"]["episodes"],
            **{name: fine["reuse"]["inference"][name] for name in ("cameras", "variants")},
        },
        "episodes": summary["episodes"], "large": {"episodes": large["episodes"], **large["methods"]},
    }  # fmt: skip
    for window in ("Hann", "none"):
        # Only scenes that are smoothed by 2 pixels or more.
        exact, wrong = ([row[key] for row in results["pans"][window][1:]] for key in ("exact", "wrong"))
        facts[window] = {
            "smoothest": results["pans"][window][-1], "most_exact": max(exact), "least_wrong": min(wrong),
            "most_wrong": max(wrong),
        }  # fmt: skip
    return Report(tables, facts, [Picture("freqcache.svg", partial(draw, methods))])


def costs_of(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Costs of a policy's variants, of which ten steps are the full one."""
    return {name.removesuffix("_10"): cost for name, cost in measured["costs"].items()}


def draw(methods: Sequence[Mapping[str, Any]]) -> Figure:
    """Success over the time of an inference."""
    timed = {row["name"]: points_of({row["time"]["relative"]: row["success"]}) for row in methods if row["time"]}
    fewer = [point for name, points in timed.items() if name.startswith("full") for point in points]
    series = {name: timed[name] for name in SHOWN} | {"full": fewer}
    names = {"full": "10 to 2 steps"} | SHOWN
    return draw_series(series, "time of an inference (10 steps: 1)", "success", "metaworld", names)
