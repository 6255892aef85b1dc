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
from specact.families.codes.pair import CodeParts
from specact.files import file_stem, write_json, write_whole
from specact.gates.calibration import Calibration, read_calibration
from specact.gates.calibration import file_name as calibration_file
from specact.gates.settings import GateSettings, load_gate
from specact.lab.data.fit import check_fit
from specact.lab.data.locks import locked
from specact.lab.envs import env_of, load_task
from specact.lab.evaluation.calibrate import CalibrationRun, calibrate
from specact.lab.evaluation.chance import gate_at_rate_of_rival, uncalibrated_gate
from specact.lab.evaluation.cost import method_cost, read_timing, timed
from specact.lab.evaluation.evaluation import Evaluation
from specact.lab.evaluation.imitation import OpenLoopJob, demonstration_files, held_out_demonstrations, imitation_error
from specact.lab.evaluation.manifest import claim
from specact.lab.evaluation.metrics import SUCCESS_AT, Table, add_gate_efficiency, contrasts, method_metrics
from specact.lab.rollout.families import depends_on_content, rollout_of
from specact.lab.rollout.methods import Method
from specact.lab.rollout.pool import Pool
from specact.lab.rollout.realtime import RealTime
from specact.lab.rollout.rollout import Outcome, Shard
from specact.load import load_pair
from specact.pair import Pair, PairSource

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
    bundle = load_pair(evaluation.source)
    env = evaluation.env or env_of(bundle, None)
    task = load_task(env)
    ran = evaluation.resolved
    initial_gates = {method.name: uncalibrated_gate(method, evaluation.gates, bundle) for method in ran}
    for settings in initial_gates.values():
        settings.check_rate(evaluation.rate)
    for method in ran:
        rollout_of(bundle, method, evaluation.offset)
    check_fit(bundle, task)
    if evaluation.mse:
        env_of(bundle, evaluation.env)
        if not isinstance(bundle.parts, CodeParts):
            raise ConfigError(f"nobody knows what {bundle.name!r} was trained on; leave out --mse")
        demonstration_files(bundle.parts, None if evaluation.data is None else Path(evaluation.data))
    manifest = claim(out, evaluation, bundle, env, command)
    started = time.perf_counter()
    outcomes: dict[str, Table] = {}
    steps: dict[str, Table] = {}
    calibrations: dict[str, Calibration] = {}
    gates: dict[str, GateSettings] = {}
    with ExitStack() as stack:
        runner: Pool | RealTime = pool
        if evaluation.realtime:
            runner = stack.enter_context(RealTime(bundle, evaluation.link, evaluation.deadline_ms, evaluation.seed))
        # Random gates run last, at the rate that their rival achieved.
        for method in sorted(ran, key=lambda method: method.rate_of is not None):
            name, settings = method.name, initial_gates[method.name]
            if load_gate(method.gate).calibrated:
                # By the gate, and by the method's composition where it has one: the score depends on what is proposed.
                key = "-".join(filter(None, (method.gate, method.decoding)))
                if key not in calibrations:
                    calibrations[key] = _calibration(bundle, env, method, evaluation, out, pool, progress)
                settings = calibrations[key].settings
            elif method.rate_of is not None:
                settings = gate_at_rate_of_rival(method, settings, evaluation.rate, steps)
            gates[name] = settings
            outcomes[name], steps[name] = _run_method(
                method, settings, evaluation, env, manifest, bundle, out, runner, progress
            )
        imitation_errors = {}
        if evaluation.mse and isinstance(bundle.parts, CodeParts):
            imitation_errors = _imitation_errors(evaluation, bundle.parts, gates, out, pool, progress)
    timing, success_at = read_timing(manifest), SUCCESS_AT.get(env, ())
    methods = {
        method.name: {
            **method_metrics(
                outcomes[method.name], steps[method.name], sends=not method.on_device, success_at=success_at
            ),
            "cost": method_cost(method, bundle, timing),
        }
        for method in ran
    }
    add_gate_efficiency(ran, methods, steps.get("oracle"))
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
        "gates": {method.name: dataclasses.asdict(gates[method.name]) for method in ran},
        "contrasts": contrasts(ran, outcomes),
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
    bundle = load_pair(evaluation.source)
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
    method: Method,
    settings: GateSettings,
    evaluation: Evaluation,
    env: str,
    manifest: dict[str, Any],
    bundle: Pair[Any],
    out: Path,
    runner: Pool | RealTime,
    progress: Progress,
) -> tuple[Table, Table]:
    folders = [out / kind / file_stem(method.name) for kind in ("episodes", "steps")]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    whole = timed(
        Shard.of(bundle, env, method, settings, range(evaluation.episodes), evaluation.seed), read_timing(manifest),
        link=evaluation.link, offset=evaluation.offset,
    )  # fmt: skip
    starts = range(0, evaluation.episodes, evaluation.shard)
    shards = [dataclasses.replace(whole, episodes=whole.episodes[i : i + evaluation.shard]) for i in starts]
    missing = [shard for shard in shards if not (folders[0] / _file(shard)).exists()]
    done = evaluation.episodes - sum(len(shard.episodes) for shard in missing)
    progress(method.name, done, evaluation.episodes)
    for shard, (episodes, table) in runner.run(missing):
        write_shard(out, shard, episodes, table)
        done += len(shard.episodes)
        progress(method.name, done, evaluation.episodes)
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
        write_whole(out / kind / file_stem(shard.method.name) / _file(shard), sink.getvalue().to_pybytes())


def _calibration(
    bundle: Pair[Any], env: str, method: Method, evaluation: Evaluation, out: Path, pool: Pool, progress: Progress
) -> Calibration:
    """The run folder's calibration; else the bundle's or a new one, stored there so that the run can resume."""
    gate, decoding = method.gate, method.decoding or bundle.source.decoding
    path = out / "calibration" / calibration_file(gate, evaluation.rate, decoding)
    if path.exists():
        return read_calibration(path, bundle)
    wanted = evaluation.gates.settings(gate, bundle)
    in_bundle = None if bundle.path is None else bundle.path / "calibration" / path.name
    stored = read_calibration(in_bundle, bundle) if in_bundle is not None and in_bundle.is_file() else None
    if env == bundle.env and stored is not None and wanted == stored.settings.without_threshold():
        stored.save(path.parent)
        return stored
    run = CalibrationRun(evaluation.rate, evaluation.calibration_episodes, seed=evaluation.seed)
    total = run.episodes * (run.rounds + 2)
    calibration = calibrate(
        bundle,
        wanted,
        run,
        method=method,
        env=env,
        pool=pool,
        advance=lambda done: progress(f"calibrating {gate}", done, total),
    )
    calibration.save(path.parent)
    return calibration


def _imitation_errors(
    evaluation: Evaluation, bundle: CodeParts, gates: dict[str, GateSettings], out: Path, pool: Pool, progress: Progress
) -> dict[str, dict[str, float]]:
    """Every method's error on held-out demonstrations; resumes from ``imitation.json``."""
    path = out / "imitation.json"
    errors: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.exists() else {}
    missing = [method for method in evaluation.resolved if method.name not in errors]
    if missing:
        demonstrations = held_out_demonstrations(
            bundle, None if evaluation.data is None else Path(evaluation.data), evaluation.env
        )
        if evaluation.demonstrations is not None:
            demonstrations = demonstrations.select(np.arange(min(evaluation.demonstrations, len(demonstrations))))
        jobs = [
            OpenLoopJob(PairSource(str(bundle.path)), demonstrations, method, gates[method.name], evaluation.seed)
            for method in missing
        ]
        progress("along demonstrations", len(errors), len(evaluation.methods))
        for job, error in pool.each(imitation_error, jobs):
            errors[job.method.name] = error
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
