"""Runs an evaluation: methods on the same episodes, with results in a resumable run folder."""

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

from specact.errors import ConfigError, DataError
from specact.families.codes.bundle import Bundle
from specact.families.load import AnyPair, load_named
from specact.files import file_stem, write_json, write_whole
from specact.gates.calibration import Calibration, find_calibration, read_calibration
from specact.gates.calibration import file_name as calibration_file
from specact.gates.settings import GateSettings, load_gate
from specact.lab.data.fit import check_fit
from specact.lab.envs import env_of, load_task
from specact.lab.evaluation.calibrate import CalibrationRun, calibrate
from specact.lab.evaluation.chance import gate_at_rate_of_rival, uncalibrated_gate
from specact.lab.evaluation.cost import method_cost, read_timing
from specact.lab.evaluation.evaluation import Evaluation
from specact.lab.evaluation.imitation import OpenLoopJob, demonstration_files, held_out_demonstrations, imitation_error
from specact.lab.evaluation.manifest import claim
from specact.lab.evaluation.metrics import SUCCESS_AT, Table, add_gate_efficiency, contrasts, method_metrics
from specact.lab.rollout.families import decoded_by, depends_on_content, rollout_of
from specact.lab.rollout.methods import load_method
from specact.lab.rollout.pool import Pool
from specact.lab.rollout.realtime import RealTime
from specact.lab.rollout.rollout import Outcome, Shard
from specact.locks import locked
from specact.pair import Named

Progress = Callable[[str, int, int], None]


def evaluate(evaluation: Evaluation, out: Path, progress: Progress, pool: Pool, *, command: str = "") -> dict[str, Any]:
    """Runs an evaluation and writes ``manifest.json``, ``summary.json``, ``episodes/``, ``steps/`` (Parquet).

    A run that was stopped resumes with the missing shards.

    Args:
        evaluation: its settings.
        out: run folder.
        progress: called with (stage, done, total).
        pool: worker pool.
        command: recorded in the manifest.

    Returns:
        The summary.

    Raises:
        ConfigError: if ``out`` holds another run, is locked by another process, or cannot be written, a method is
            unknown, or a gate cannot hold the rate.
        BundleError: if the bundle, or a calibration in it, does not fit.
    """
    with locked(out):
        return _evaluate(evaluation, out, progress, pool, command)


def _evaluate(evaluation: Evaluation, out: Path, progress: Progress, pool: Pool, command: str) -> dict[str, Any]:
    bundle = load_named(evaluation.bundle, evaluation.named)
    env = evaluation.env or env_of(bundle, None)
    task = load_task(env)
    initial_gates = {name: uncalibrated_gate(name, evaluation.gates, bundle) for name in evaluation.methods}
    for settings in initial_gates.values():
        settings.check_rate(evaluation.rate)
    for name in evaluation.methods:
        rollout_of(bundle, load_method(name), evaluation.offset)
    check_fit(bundle, task)
    if evaluation.mse:
        env_of(bundle, evaluation.env)
        if not isinstance(bundle, Bundle):
            raise ConfigError(f"nobody knows what {bundle.name!r} was trained on; leave out --mse")
        demonstration_files(bundle, None if evaluation.data is None else Path(evaluation.data))
    manifest = claim(out, evaluation, bundle, env, command)
    started = time.perf_counter()
    outcomes: dict[str, Table] = {}
    steps: dict[str, Table] = {}
    calibrations: dict[str, Calibration] = {}
    gates: dict[str, GateSettings] = {}
    with ExitStack() as stack:
        runner: Pool | RealTime = pool
        if evaluation.realtime:
            runner = stack.enter_context(
                RealTime(bundle, evaluation.link, evaluation.deadline_ms, evaluation.wire, evaluation.seed)
            )
        # Random gates run last, at the rate that their rival achieved.
        for name in sorted(evaluation.methods, key=lambda method: load_method(method).rate_of is not None):
            method, settings = load_method(name), initial_gates[name]
            if load_gate(method.gate).calibrated:
                # By the gate, and by the method's decoding where it fixes one: the score depends on what is proposed.
                key = "-".join(filter(None, (method.gate, method.decoding)))
                if key not in calibrations:
                    pair = decoded_by(method, bundle)
                    calibrations[key] = _calibration(pair, env, method.gate, evaluation, out, pool, progress)
                settings = calibrations[key].settings
            elif method.rate_of is not None:
                settings = gate_at_rate_of_rival(name, settings, evaluation.rate, steps)
            gates[name] = settings
            outcomes[name], steps[name] = _run_method(
                name, settings, evaluation, env, manifest, bundle, out, runner, progress
            )
        imitation_errors = {}
        if evaluation.mse and isinstance(bundle, Bundle):
            imitation_errors = _imitation_errors(evaluation, bundle, gates, out, pool, progress)
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
        for name in evaluation.methods
    }
    add_gate_efficiency(methods, steps.get("oracle"))
    for name, error in imitation_errors.items():
        methods[name]["mse"] = error
    summary = {
        "env": env,
        "episodes": evaluation.episodes,
        "seed": evaluation.seed,
        "bundle": bundle.name,
        "rate": evaluation.rate,
        # Token and flow policies are evaluated without a link, see :func:`~specact.lab.rollout.rollout.measured`.
        "link": "none" if depends_on_content(bundle) and not evaluation.realtime else evaluation.link,
        "realtime": evaluation.realtime,
        "score": task.score,
        "methods": methods,
        "gates": {name: dataclasses.asdict(gates[name]) for name in evaluation.methods},
        "contrasts": contrasts(outcomes),
        "calibration": {name: _calibration_summary(calibration) for name, calibration in calibrations.items()},
        "seconds": round(time.perf_counter() - started, 1),
    }
    write_json(out / "summary.json", summary)
    return summary


def finished(evaluation: Evaluation, out: Path) -> bool:
    """Whether ``out`` holds this evaluation, completed.

    Raises:
        ConfigError: if it holds another one.
    """
    if not (out / "summary.json").exists():
        return False
    bundle = load_named(evaluation.bundle, evaluation.named)
    claim(out, evaluation, bundle, evaluation.env or bundle.env, "")
    return True


def read_gates(folder: Path) -> dict[str, GateSettings]:
    """The gates that the methods of a finished run folder ran with, thresholds included."""
    stored: dict[str, dict[str, Any]] = json.loads((folder / "summary.json").read_text())["gates"]
    return {
        name: GateSettings(**gate | {"options": tuple((key, value) for key, value in gate["options"])})
        for name, gate in stored.items()
    }


def read_table(folder: Path) -> Table:
    """The Parquet files of a folder, in order, as one array per column.

    Raises:
        DataError: for files with other columns, as other versions wrote them.
    """
    parts = [pq.read_table(path) for path in sorted(folder.glob("*.parquet"))]
    if len({tuple(part.schema.names) for part in parts}) > 1:
        raise DataError(f"the files of {folder} have different columns, of several versions; run it again elsewhere")
    table = pa.concat_tables(parts)
    return {name: table.column(name).to_numpy() for name in table.column_names}


def _run_method(
    name: str,
    settings: GateSettings,
    evaluation: Evaluation,
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
    for first in range(0, evaluation.episodes, evaluation.shard):
        numbers = tuple(range(first, min(first + evaluation.shard, evaluation.episodes)))
        shards.append(
            Shard(
                bundle.source,
                bundle.fingerprint,
                env,
                name,
                settings,
                numbers,
                evaluation.seed,
                evaluation.link,
                timing.draft_s(name),
                timing.target_s(name),
                evaluation.offset,
                timing.gate_s(name),
                named=Named.of(bundle),
            )
        )
    missing = [shard for shard in shards if not (folders[0] / _file(shard)).exists()]
    done = evaluation.episodes - sum(len(shard.episodes) for shard in missing)
    progress(name, done, evaluation.episodes)
    for shard, (episodes, table) in runner.run(missing):
        write_shard(out, shard, episodes, table)
        done += len(shard.episodes)
        progress(name, done, evaluation.episodes)
    return read_table(folders[0]), read_table(folders[1])


def write_shard(out: Path, shard: Shard, outcomes: list[Outcome], steps: Table) -> None:
    """Writes a shard's tables into a run folder."""
    columns = {field.name: [getattr(o, field.name) for o in outcomes] for field in dataclasses.fields(Outcome)}
    if not any(columns["task"]):
        del columns["task"]  # only suites have tasks
    # The outcomes are written last: they mark the shard as finished.
    for kind, table in (("steps", steps), ("episodes", {name: np.array(values) for name, values in columns.items()})):
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table(table), sink)
        write_whole(out / kind / file_stem(shard.method) / _file(shard), sink.getvalue().to_pybytes())


def _calibration(
    bundle: AnyPair, env: str, gate: str, evaluation: Evaluation, out: Path, pool: Pool, progress: Progress
) -> Calibration:
    """The run folder's calibration; else the bundle's or a new one, stored there so that the run can resume."""
    path = out / "calibration" / calibration_file(gate, evaluation.rate, Named.of(bundle).decoding)
    if path.exists():
        return read_calibration(path, bundle)
    wanted = evaluation.gates.settings(gate, bundle)
    stored = find_calibration(bundle, gate, evaluation.rate)
    if env == bundle.env and stored is not None and wanted == stored.settings.without_threshold():
        stored.save(path.parent)
        return stored
    run = CalibrationRun(evaluation.rate, evaluation.calibration_episodes, seed=evaluation.seed)
    total = run.episodes * (run.rounds + 2)
    calibration = calibrate(
        bundle, wanted, run, env=env, pool=pool, advance=lambda done: progress(f"calibrating {gate}", done, total)
    )
    calibration.save(path.parent)
    return calibration


def _imitation_errors(
    evaluation: Evaluation, bundle: Bundle, gates: dict[str, GateSettings], out: Path, pool: Pool, progress: Progress
) -> dict[str, dict[str, float]]:
    """Every method's error on held-out demonstrations; resumes from ``imitation.json``."""
    path = out / "imitation.json"
    errors: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.exists() else {}
    missing = [name for name in evaluation.methods if name not in errors]
    if missing:
        demonstrations = held_out_demonstrations(
            bundle, None if evaluation.data is None else Path(evaluation.data), evaluation.env
        )
        if evaluation.demonstrations is not None:
            demonstrations = demonstrations.select(np.arange(min(evaluation.demonstrations, len(demonstrations))))
        jobs = [OpenLoopJob(str(bundle.path), demonstrations, name, gates[name], evaluation.seed) for name in missing]
        progress("along demonstrations", len(errors), len(evaluation.methods))
        for job, error in pool.each(imitation_error, jobs):
            errors[job.method] = error
            write_json(path, errors)
            progress("along demonstrations", len(errors), len(evaluation.methods))
    return errors


def _file(shard: Shard) -> str:
    return f"{shard.episodes[0]:06d}.parquet"


def _calibration_summary(calibration: Calibration) -> dict[str, Any]:
    keys = ("auroc", "spearman", "linear", "logarithmic")
    model = calibration.model
    # Older calibrations in bundles have no model of the primary code.
    primary = model.get("primary")
    return {
        "threshold": calibration.settings.threshold,
        "held_out_rate": calibration.held_out["rate"],
        "held_out_episodes": calibration.held_out["episodes"],
        **{key: model[key] for key in keys if key in model},
        "primary": None if primary is None else {key: primary[key] for key in keys},
    }
