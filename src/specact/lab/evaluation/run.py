"""An evaluation: methods side by side on the same episodes, in a run folder that resumes and explains itself."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from specact.errors import ConfigError
from specact.families.codes.bundle import Bundle
from specact.families.flash.rounds import ROUNDS
from specact.families.load import AnyPair, load_pair, named_again
from specact.files import file_stem, write_json, write_whole
from specact.gates.calibration import Calibration, find_calibration, read_calibration
from specact.gates.calibration import file_name as calibration_file
from specact.gates.settings import GateSettings, load_gate
from specact.lab.data.fit import check_fit
from specact.lab.envs import env_of, load_task
from specact.lab.evaluation.calibrate import CalibrationRun, calibrate
from specact.lab.evaluation.chance import asked_gate, at_rate
from specact.lab.evaluation.cost import method_cost, read_timing
from specact.lab.evaluation.evaluation import Evaluation
from specact.lab.evaluation.imitation import Imitation, demonstration_files, held_out_demonstrations, imitation_error
from specact.lab.evaluation.manifest import claim
from specact.lab.evaluation.metrics import SUCCESS_AT, Table, add_gate_efficiency, contrasts, method_metrics
from specact.lab.rollout.families import depends_on_content, rollout_of
from specact.lab.rollout.methods import load_method
from specact.lab.rollout.pool import Pool
from specact.lab.rollout.realtime import RealTime
from specact.lab.rollout.rollout import Outcome, Shard
from specact.locks import locked

Progress = Callable[[str, int, int], None]


def evaluate(what: Evaluation, out: Path, progress: Progress, pool: Pool, *, command: str = "") -> dict[str, Any]:
    """Runs an evaluation and writes ``manifest.json``, ``summary.json``, ``episodes/``, ``steps/`` (Parquet).

    Run again after a stop, it goes on with the shards that are missing.

    Args:
        what: the evaluation.
        out: run folder.
        progress: told (what is going on, done, in all).
        pool: where.
        command: recorded in the manifest.

    Returns:
        The summary.

    Raises:
        ConfigError: if ``out`` holds another run, another process is at work there, its folder cannot be written, a
            method is unknown, or a gate cannot hold the rate.
        BundleError: if the bundle, or a calibration in it, does not fit.
    """
    with locked(out):
        return _evaluate(what, out, progress, pool, command)


def _evaluate(what: Evaluation, out: Path, progress: Progress, pool: Pool, command: str) -> dict[str, Any]:
    bundle = load_pair(what.bundle, draft=what.draft, target=what.target)
    env = what.env or env_of(bundle, None)
    task = load_task(env)
    asked = {name: asked_gate(name, what.gates, bundle) for name in what.methods}
    for settings in asked.values():
        settings.check_rate(what.rate)
    for name in what.methods:
        rollout_of(bundle, load_method(name), what.offset, what.decoding)
    check_fit(bundle, task)
    if what.mse:
        env_of(bundle, what.env)
        if not isinstance(bundle, Bundle):
            raise ConfigError(f"nobody knows what {bundle.name!r} was trained on; leave out --mse")
        demonstration_files(bundle, None if what.data is None else Path(what.data))
    manifest = claim(out, what, bundle, env, command)
    started = time.perf_counter()
    outcomes: dict[str, Table] = {}
    steps: dict[str, Table] = {}
    calibrations: dict[str, Calibration] = {}
    gates: dict[str, GateSettings] = {}
    with ExitStack() as stack:
        runner: Pool | RealTime = pool
        if what.realtime:
            runner = stack.enter_context(RealTime(bundle.source, what.link, what.deadline_ms, what.wire, what.seed))
        # Chance comes last: it runs at the rate that its rival achieved.
        for name in sorted(what.methods, key=lambda method: load_method(method).rate_of is not None):
            method, settings = load_method(name), asked[name]
            if load_gate(method.gate).calibrated:
                if method.gate not in calibrations:
                    calibrations[method.gate] = _calibration(bundle, env, method.gate, what, out, pool, progress)
                settings = calibrations[method.gate].settings
            elif method.rate_of is not None:
                asks_full = method.decoding in ROUNDS and ROUNDS[method.decoding].full
                sent = "full" if asks_full else "transmitted"
                settings = at_rate(settings, what.rate, steps.get(method.rate_of), sent)
            gates[name] = settings
            outcomes[name], steps[name] = _run_method(
                name, settings, what, env, manifest, bundle, out, runner, progress
            )
        along = {}
        if what.mse and isinstance(bundle, Bundle):
            along = _imitation(what, bundle, gates, out, pool, progress)
    timing, success_at = read_timing(manifest), SUCCESS_AT.get(env, ())
    methods = {
        name: {
            **method_metrics(
                outcomes[name],
                steps[name],
                binary_score=np.array_equal(outcomes[name]["score"], outcomes[name]["success"].astype(np.float64)),
                sends=not load_method(name).on_device,
                success_at=success_at,
            ),
            "cost": method_cost(name, bundle, timing),
        }
        for name in what.methods
    }
    add_gate_efficiency(methods, steps.get("oracle"))
    for name, error in along.items():
        methods[name]["mse"] = error
    summary = {
        "env": env,
        "episodes": what.episodes,
        "seed": what.seed,
        "bundle": bundle.name,
        "rate": what.rate,
        # A token or flow policy is evaluated without one, see :func:`~specact.lab.rollout.rollout.measured`.
        "link": "none" if depends_on_content(bundle) and not what.realtime else what.link,
        "realtime": what.realtime,
        "score": task.score,
        "methods": methods,
        "gates": {name: dataclasses.asdict(gates[name]) for name in what.methods},
        "contrasts": contrasts(outcomes),
        "calibration": {name: _brief(calibration) for name, calibration in calibrations.items()},
        "seconds": round(time.perf_counter() - started, 1),
    }
    write_json(out / "summary.json", summary)
    return summary


def finished(what: Evaluation, out: Path) -> bool:
    """Whether ``out`` holds this evaluation to its end.

    Raises:
        ConfigError: if it holds another one.
    """
    if not (out / "summary.json").exists():
        return False
    bundle = load_pair(what.bundle, draft=what.draft, target=what.target)
    claim(out, what, bundle, what.env or bundle.env, "")
    return True


def read_gates(folder: Path) -> dict[str, GateSettings]:
    """The gates that the methods of a finished run folder ran with, thresholds included."""
    stored: dict[str, dict[str, Any]] = json.loads((folder / "summary.json").read_text())["gates"]
    return {
        name: GateSettings(**gate | {"options": tuple((key, value) for key, value in gate["options"])})
        for name, gate in stored.items()
    }


def read_table(folder: Path) -> Table:
    """The Parquet files of a folder, in order, as one array per column."""
    table = pa.concat_tables([pq.read_table(path) for path in sorted(folder.glob("*.parquet"))])
    return {name: table.column(name).to_numpy() for name in table.column_names}


def _run_method(
    name: str,
    settings: GateSettings,
    what: Evaluation,
    env: str,
    manifest: dict[str, Any],
    bundle: AnyPair,
    out: Path,
    runner: Pool | RealTime,
    progress: Progress,
) -> tuple[Table, Table]:
    folders = [out / kind / file_stem(name) for kind in ("episodes", "steps")]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    timing = read_timing(manifest)
    shards = []
    for first in range(0, what.episodes, what.shard):
        numbers = tuple(range(first, min(first + what.shard, what.episodes)))
        shards.append(
            Shard(
                bundle.source,
                bundle.fingerprint,
                env,
                name,
                settings,
                numbers,
                what.seed,
                what.link,
                timing.draft_s(name),
                timing.target_s(name),
                what.offset,
                what.overlap,
                timing.gate_s(name),
                named=named_again(bundle),
                decoding=what.decoding,
            )
        )
    missing = [shard for shard in shards if not (folders[0] / _file(shard)).exists()]
    done = what.episodes - sum(len(shard.episodes) for shard in missing)
    progress(name, done, what.episodes)
    for shard, (episodes, table) in runner.run(missing):
        write_shard(out, shard, episodes, table)
        done += len(shard.episodes)
        progress(name, done, what.episodes)
    return read_table(folders[0]), read_table(folders[1])


def write_shard(out: Path, shard: Shard, outcomes: list[Outcome], steps: Table) -> None:
    """Writes a shard's tables into a run folder."""
    columns = {field.name: [getattr(o, field.name) for o in outcomes] for field in dataclasses.fields(Outcome)}
    if not any(columns["task"]):
        del columns["task"]  # only of a suite
    # The outcomes are written last: they are what marks a shard as finished.
    for kind, table in (("steps", steps), ("episodes", {name: np.array(values) for name, values in columns.items()})):
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table(table), sink)
        write_whole(out / kind / file_stem(shard.method) / _file(shard), sink.getvalue().to_pybytes())


def _calibration(
    bundle: AnyPair, env: str, gate: str, what: Evaluation, out: Path, pool: Pool, progress: Progress
) -> Calibration:
    """The run folder's calibration; else the bundle's or a new one, kept there for when the run is resumed."""
    path = out / "calibration" / calibration_file(gate, what.rate)
    if path.exists():
        return read_calibration(path, bundle)
    wanted = what.gates.settings(gate, bundle)
    stored = find_calibration(bundle, gate, what.rate)
    # A bundle's own are of no other decoding.
    if not what.decoding and stored is not None and env == bundle.env and wanted == stored.settings.without_threshold():
        stored.save(path.parent)
        return stored
    run = CalibrationRun(what.rate, what.calibration_episodes, seed=what.seed)
    total = run.episodes * (run.rounds + 2)
    made = calibrate(
        bundle, wanted, run, env=env, pool=pool, decoding=what.decoding,
        advance=lambda done: progress(f"calibrating {gate}", done, total),
    )  # fmt: skip
    made.save(path.parent)
    return made


def _imitation(
    what: Evaluation, bundle: Bundle, gates: dict[str, GateSettings], out: Path, pool: Pool, progress: Progress
) -> dict[str, dict[str, float]]:
    """Every method's error along held-out demonstrations; what a stopped run has measured is kept."""
    path = out / "imitation.json"
    found: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.exists() else {}
    missing = [name for name in what.methods if name not in found]
    if missing:
        shown = held_out_demonstrations(bundle, None if what.data is None else Path(what.data), what.env)
        if what.demonstrations is not None:
            shown = shown.select(np.arange(min(what.demonstrations, len(shown))))
        work = [Imitation(str(bundle.path), shown, name, gates[name], what.seed) for name in missing]
        progress("along demonstrations", len(found), len(what.methods))
        for item, error in pool.each(imitation_error, work):
            found[item.method] = error
            write_json(path, found)
            progress("along demonstrations", len(found), len(what.methods))
    return found


def _file(shard: Shard) -> str:
    return f"{shard.episodes[0]:06d}.parquet"


def _brief(calibration: Calibration) -> dict[str, Any]:
    told = ("auroc", "spearman", "linear", "logarithmic")
    model = calibration.model
    # Bundles hold calibrations that were made before the primary code had a model of its own.
    primary = model.get("primary")
    return {
        "threshold": calibration.settings.threshold,
        "held_out_rate": calibration.held_out["rate"],
        "held_out_episodes": calibration.held_out["episodes"],
        **{key: model[key] for key in told if key in model},
        "primary": None if primary is None else {key: primary[key] for key in told},
    }
