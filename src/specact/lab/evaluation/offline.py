"""Offline calibration and evaluation: open loop on held-out demonstrations, without a simulator.

Actions have no effect on the next observation, so success is not measured: only the distances to the demonstrated
actions and to the target's, and the transmission rate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError, DataError
from specact.families.codes.pair import CodeParts
from specact.files import write_json
from specact.gates.calibration import Calibration
from specact.gates.settings import GateSettings
from specact.lab.data.episodes import Episodes
from specact.lab.data.folder import locked
from specact.lab.data.readers import Demonstrations
from specact.lab.envs import env_of
from specact.lab.evaluation.calibrate import Threshold, find_threshold, gate_of_method
from specact.lab.evaluation.metrics import contrasts, step_metrics
from specact.lab.rollout.families import rollout_of
from specact.lab.rollout.methods import HYBRID, Method, load_method
from specact.lab.rollout.pool import Pool
from specact.lab.rollout.rollout import Robot, run_together
from specact.lab.rollout.statistics import mean_interval
from specact.lab.rollout.steps import Audit, Table, concatenated
from specact.load import load_pair
from specact.observation import Observation
from specact.pair import Pair, PairSource
from specact.records import Count, InsideUnit, Seed, read_record, validated

Progress = Callable[[str, int, int], None]


def demonstrations_of(pair: Pair[Any], env: str | None = None) -> Demonstrations:
    """The demonstrations that a pair was trained on, as its manifest says.

    ``env`` is the environment that the user named, see :func:`~specact.lab.envs.env_of`, whose error it raises too.

    Raises:
        ConfigError: if its manifest says none.
    """
    if not isinstance(pair.parts, CodeParts) or not (recipe := pair.parts.manifest.recipe):
        raise ConfigError(
            f"{pair.name} holds no recipe, so its demonstrations are unknown; name them with --recipe, the recipe of "
            "the draft, and --data, the folder of its files"
        )
    known = {name: recipe[name] for name in Demonstrations.__struct_fields__ if name in recipe}
    known["env"] = env_of(pair.env, env) if pair.env else None
    return read_record(known, Demonstrations, "recipe")


@dataclass(frozen=True)
class OpenLoopResult:
    """The result of a method open loop, with one row of ``steps`` per inference.

    ``error`` is the mean squared one of the actions in each episode, summed over the action's dimensions, normalised
    (each dimension's training range is [-1, 1]), ``[E]``; ``raw`` the same in the environment's units.
    """

    error: NDArray[np.float64]
    raw: NDArray[np.float64]
    steps: Table

    @property
    def summary(self) -> dict[str, float]:
        """``mean``, ``low``, ``high`` of the error with a 95 % interval over episodes, ``raw``, and ``episodes``."""
        return asdict(mean_interval(self.error)) | {"raw": float(self.raw.mean()), "episodes": len(self.raw)}


class _Replay:
    """A demonstration as a world: its observations do not depend on the actions."""

    def __init__(self, seen: Mapping[str, Any], steps: range) -> None:
        self._seen, self._steps = seen, steps
        self.acted: list[NDArray[np.float32]] = []

    @property
    def done(self) -> bool:
        return len(self.acted) == len(self._steps)

    def observe(self) -> Observation:
        return {name: values[self._steps[len(self.acted)]] for name, values in self._seen.items()}

    def act(self, action: NDArray[np.float32]) -> None:
        self.acted.append(action)


@validated
def calibrate_offline(
    pair: Pair[Any], gate: GateSettings, rate: InsideUnit, demonstrations: Episodes, pool: Pool, progress: Progress,
    *, method: Method = HYBRID, rounds: Count = 2, seed: Seed = 0, threshold: Threshold = "quantile",
) -> Calibration:  # fmt: skip
    """Finds a gate's threshold for a rate on every other demonstration, and checks it on the others.

    The gate is without its threshold; there are several ``rounds``, because the scores of a gate that sees executed
    actions depend on its threshold. Raises as :func:`~specact.lab.evaluation.calibrate.find_threshold`;
    :exc:`DataError` for fewer than two episodes.
    """
    if len(demonstrations) < 2:
        raise DataError("at least two held-out demonstrations are needed; give the recipe a larger held_out")
    numbers = np.arange(len(demonstrations))
    parts = demonstrations.select(numbers[::2]), demonstrations.select(numbers[1::2])

    def roll(settings: GateSettings, number: int) -> Table:
        progress(f"calibrating {gate.name}", number, rounds + 2)
        return run_open_loop(pair, method, settings, parts[number > rounds], pool, seed).steps

    search = find_threshold(gate, rate, rounds, roll, threshold)
    progress(f"calibrating {gate.name}", rounds + 2, rounds + 2)
    provenance = {"along": "demonstrations", "episodes": len(demonstrations), "rounds": rounds, "seed": seed,
                  "threshold": threshold}  # fmt: skip
    return search.calibration(pair, rate, len(parts[1]), provenance, pair.source.decoding)


@validated
def evaluate_offline(
    pair: Pair[Any], methods: Sequence[str | Method], demonstrations: Episodes, rate: InsideUnit, out: Path, pool: Pool,
    progress: Progress, *, gate_options: tuple[str, ...] = (), seed: Seed = 0, command: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Evaluates methods open loop on the same demonstrations, writes ``summary.json`` and returns it.

    Gates are calibrated for the rate on a third of the episodes, which were held out in the training of both policies;
    methods are compared on the rest, by ``error``, the mean squared error to the demonstrated actions, normalised, with
    a 95 % interval over episodes, and by paired ``contrasts`` of it with Holm's correction over all of them.

    Raises:
        ConfigError: for a method that this pair does not have, or a folder that is locked or holds another run.
        DataError: if there are too few episodes.
    """
    ran = [*map(load_method, methods)]
    for method in ran:
        rollout_of(pair, method)
    if len(demonstrations) < 6:
        raise DataError(
            f"there are {len(demonstrations)} held-out demonstrations; at least 6 are needed to calibrate and compare"
        )
    if (out / "summary.json").exists():
        raise ConfigError(f"{out} holds a finished run; choose another --out")
    numbers = np.arange(len(demonstrations))
    kept, judged = (demonstrations.select(numbers[chosen]) for chosen in (numbers % 3 == 0, numbers % 3 != 0))
    results, settings = dict[str, OpenLoopResult](), dict[str, GateSettings]()
    with locked(out):
        for done, method in enumerate(sorted(ran, key=lambda method: method.rate_of is not None)):
            progress("methods", done, len(ran))

            def calibrated(gate: GateSettings, method: Method = method) -> GateSettings:
                return calibrate_offline(pair, gate, rate, kept, pool, progress, method=method, seed=seed).settings

            steps, name = {name: result.steps for name, result in results.items()}, method.name
            settings[name] = gate_of_method(method, pair, rate, calibrated, options=gate_options, steps=steps)
            results[name] = run_open_loop(pair, method, settings[name], judged, pool, seed)
        progress("methods", len(ran), len(ran))
        summary = {
            "kind": "offline", "command": command, "bundle": pair.name, "episodes": len(judged),
            "calibrated_on": len(kept), "rate": rate, "seed": seed,
            "methods": {
                method.name: {
                    "error": asdict(mean_interval(results[method.name].error)),
                    "raw": float(results[method.name].raw.mean()),
                    **step_metrics(results[method.name].steps, sends=not method.on_device),
                }
                for method in ran
            },
            "gates": {method.name: asdict(settings[method.name]) for method in ran},
            "contrasts": contrasts(ran, {name: {"error": entry.error} for name, entry in results.items()}, ("error",)),
        }  # fmt: skip
        write_json(out / "summary.json", summary)
    return summary


def run_open_loop(
    pair: Pair[Any], method: Method, gate: GateSettings, demonstrations: Episodes, pool: Pool, seed: int
) -> OpenLoopResult:
    """Runs a method, with its calibrated gate, along demonstrations: it observes their states, whatever its actions.

    Chunks are executed as on the robot. The workers share the episodes; results do not depend on their number.
    """
    parts = np.array_split(np.arange(len(demonstrations)), min(pool.workers, len(demonstrations)))
    work = [(int(part[0]), demonstrations.select(part)) for part in parts]
    run = partial(_run_part, pair.source, method, gate, seed)
    by_first = {first: result for (first, _), result in pool.each(run, work)}
    results = [by_first[first] for first in sorted(by_first)]
    return OpenLoopResult(
        np.concatenate([result.error for result in results]),
        np.concatenate([result.raw for result in results]),
        concatenated([result.steps for result in results]),
    )


def _run_part(
    source: PairSource, method: Method, gate: GateSettings, seed: int, part: tuple[int, Episodes]
) -> OpenLoopResult:
    """Runs some of the episodes; the number of the first one is a part of the random streams' addresses."""
    first, episodes = part
    family = rollout_of(load_pair(source), method)
    pair = family.pair
    policy = family.policy(gate.build(pair), seed)
    normalised, raw, audit = [], [], Audit(family)
    # Unused frames are not read: that would cost time, and they may be missing.
    seen = {name: values for name, values in episodes.observation.items() if name in pair.observation.fields}
    for number, span in enumerate(episodes.slices(), first):
        policy.reset(number)
        replay = _Replay(seen, range(span.start, span.stop))
        run_together([Robot(policy, replay)], family, audit)
        error = np.stack(replay.acted) - episodes.action[span]
        raw.append(float(np.square(error).sum(axis=1).mean()))
        normalised.append(float(np.square(error / pair.units.scale).sum(axis=1).mean()))
    return OpenLoopResult(np.array(normalised), np.array(raw), audit.table())
