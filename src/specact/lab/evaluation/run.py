"""Runs an evaluation: methods on the same episodes, with results in a resumable run folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from specact.errors import ConfigError, DataError
from specact.families.codes.pair import CodeParts
from specact.files import file_stem, write_json, write_whole
from specact.gates.calibration import Calibration, read_calibration
from specact.gates.calibration import file_name as calibration_file
from specact.gates.learned import head_fingerprint
from specact.gates.settings import ORACLES, GateSettings, gate_settings
from specact.lab.data.checks import check_fit
from specact.lab.data.folder import RunFolder, locked
from specact.lab.envs import BENCHMARK, env_of, evaluated, load_task
from specact.lab.evaluation.calibrate import calibrate, gate_of_method, uncalibrated_gate
from specact.lab.evaluation.cost import Timing, decision, median_ms, method_cost, timed
from specact.lab.evaluation.metrics import SUCCESS_AT, add_gate_efficiency, contrasts, method_metrics
from specact.lab.rollout.families import decoded_by, family_of, rollout_of
from specact.lab.rollout.methods import HYBRID, Method, load_method
from specact.lab.rollout.pool import Pool, Runner, real_time
from specact.lab.rollout.rollout import Outcome, Shard
from specact.lab.rollout.steps import Table
from specact.links.link import load_link
from specact.load import load_pair
from specact.pair import Pair, PairSource
from specact.records import Count, InsideUnit, NotNegative, Positive, Seed, WholeNumber, check_fields

Progress = Callable[[str, int, int], None]

# Gates without a decision, and oracles, which query the target: their time is not meaningful.
_WITHOUT_TIME = ("never", "always", "oracle", "oracle_action")
_MEASURED = "every time is measured over real sockets; the simulated world waits"
_ALONE = "every time is measured, with draft and target in one process and no link; the simulated world waits"
_ACCOUNTED = "times are accounted in virtual time as draft + gate + link + target, one after the other as in the paper"


@dataclass(frozen=True)
class Evaluation:
    """The settings of an evaluation, kept in its run folder's manifest; times are measured if not given."""

    bundle: str  # path or name of a bundle, or MODULE:NAME for a pair of your own
    env: str | None = None  # environment, a name or MODULE:TASK; the bundle's own if not given
    methods: tuple[str | Method, ...] = ("draft", "target", "hybrid", "random", "adahi")  # or names of load_method
    episodes: Count = 100  # per method; episode k starts the same for all of them
    seed: Seed = 0
    # For which gates are calibrated; random runs at the rate ADAHI achieved and with ADAHI's forced steps,
    # random_METHOD at another's.
    rate: InsideUnit = 0.6
    link: str = "wifi-paper"  # see load_link
    gate_options: tuple[str, ...] = ()  # parameters that the papers do not specify, see gate_settings
    draft_ms: NotNegative | None = None  # accounted time of a draft inference
    gate_ms: NotNegative | None = None  # accounted time of a gate's decision
    head_ms: NotNegative | None = None  # accounted time of the learned gate's head where it is the draft
    target_ms: NotNegative | None = None  # accounted time of a target inference
    kappa: Positive = 1.0  # factor on the computation times of the device, to model a slower one
    first: WholeNumber = 0  # episode, to go on where another run ended
    shard: Count = 20  # episodes that run in one batch; part of what makes a result reproducible to the last bit
    calibration_episodes: Count = 40  # per round, where a calibration has to be made first
    realtime: bool = False  # over real sockets: a server process of its own, behind a relay that behaves like the link
    deadline_ms: Positive = 200.0  # in real time: how long a step waits for the target
    # Of a pair of chunk policies, where the pair does not name them: MODULE:NAME or a .toml file; the draft of a token
    # or flow policy is any bundle of a policy.
    draft: str | None = None
    target: str | None = None
    # Of a token or flow policy: how draft, hybrid, random, adahi, random_learned, learned and gates of your own propose
    # and verify; any method of such a policy.
    decoding: str = ""

    @property
    def resolved(self) -> tuple[Method, ...]:
        """The methods, with those that are given by name loaded."""
        return tuple(map(load_method, self.methods))

    @property
    def source(self) -> PairSource:
        """How the pair is loaded."""
        return PairSource(self.bundle, self.draft, self.target, self.decoding)

    def __post_init__(self) -> None:
        check_fields(self)
        load_link(self.link)
        names = [method.name for method in self.resolved]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"methods must be named once each, got {', '.join(names) or 'none'}")
        times = self.draft_ms, self.gate_ms, self.head_ms, self.target_ms
        if self.realtime and (times != (None,) * 4 or self.kappa != 1.0):
            raise ConfigError("in real time every time is measured; leave out the accounted ones and kappa")
        if self.realtime and any(method.gate in ORACLES for method in self.resolved):
            raise ConfigError(
                "the latency of an oracle gate is not meaningful, because it queries the target before it decides; "
                "remove it from --methods"
            )


def evaluate(evaluation: Evaluation, out: Path, progress: Progress, pool: Pool, *, command: str = "") -> dict[str, Any]:
    """Runs an evaluation; writes ``manifest.json``, ``summary.json``, which it returns, ``episodes/`` and ``steps/``.

    A run that was stopped resumes with the missing shards. ``progress`` is called with (stage, done, total);
    ``command`` is recorded in the manifest.

    Raises:
        ConfigError: if ``out`` holds another run, is locked by another process, or cannot be written, a method is
            unknown, or a gate cannot hold the rate.
        BundleError: if the pair, or a calibration in it, does not fit.
    """
    with locked(out):
        return _evaluate(evaluation, load_pair(evaluation.source), out, progress, pool, command)


def _evaluate(
    evaluation: Evaluation, pair: Pair[Any], out: Path, progress: Progress, pool: Pool, command: str
) -> dict[str, Any]:
    judged, ran = evaluated(evaluation.env or env_of(pair.env)), evaluation.resolved
    # Gates are calibrated in states that the environment draws, not in those that they are judged in.
    env, task = judged.replace(BENCHMARK, ""), load_task(judged)
    for method in ran:
        uncalibrated_gate(method, evaluation.gate_options, pair).check_rate(evaluation.rate)
        rollout_of(pair, method)
    check_fit(pair, task)
    manifest = _claim(out, evaluation, pair, env, command)
    started, timing = time.perf_counter(), Timing(**manifest["timing"])
    numbers = range(evaluation.first, evaluation.first + evaluation.episodes)
    outcomes, steps = dict[str, Table](), dict[str, Table]()
    calibrations, gates = dict[str, Calibration](), dict[str, GateSettings]()
    with ExitStack() as stack:
        runner: Runner = pool.run
        if evaluation.realtime:
            runner = stack.enter_context(real_time(pair, evaluation.link, evaluation.deadline_ms, evaluation.seed))
        # Random gates run last, at the rate that their rival achieved.
        for method in sorted(ran, key=lambda method: method.rate_of is not None):

            def calibrated(wanted: GateSettings, method: Method = method) -> GateSettings:
                # By the gate, and by the method's composition where it has one: the score depends on what is proposed.
                key = "-".join(filter(None, (method.gate, method.decoding)))
                if key not in calibrations:
                    calibrations[key] = _calibration(pair, env, method, wanted, evaluation, out, pool, progress)
                return calibrations[key].settings

            name, options = method.name, evaluation.gate_options
            gates[name] = gate_of_method(method, pair, evaluation.rate, calibrated, options=options, steps=steps)
            shard = Shard.of(pair, judged, method, gates[name], numbers, evaluation.seed)
            whole = timed(shard, timing, link=evaluation.link)
            outcomes[name], steps[name] = _run_method(whole, evaluation.shard, out, runner, progress)
    methods: dict[str, dict[str, Any]] = {}
    for method in ran:
        tables = outcomes[method.name], steps[method.name]
        methods[method.name] = method_metrics(*tables, sends=not method.on_device, success_at=SUCCESS_AT.get(env, ()))
        methods[method.name]["cost"] = method_cost(method, pair, timing)
    add_gate_efficiency(ran, methods, steps.get("oracle"))
    summary = {
        "env": judged, "episodes": evaluation.episodes, "seed": evaluation.seed, "bundle": pair.name,
        "rate": evaluation.rate,
        # Token and flow policies are evaluated without a link, see ``FamilyRollout.measured``.
        "link": "none" if family_of(pair).measured and not evaluation.realtime else evaluation.link,
        "realtime": evaluation.realtime, "score": task.score, "methods": methods,
        "gates": {method.name: asdict(gates[method.name]) for method in ran}, "contrasts": contrasts(ran, outcomes),
        "calibration": {name: _calibration_summary(calibration) for name, calibration in calibrations.items()},
        "seconds": round(time.perf_counter() - started, 1),
    }  # fmt: skip
    write_json(out / "summary.json", summary)
    return summary


def read_gates(folder: Path) -> dict[str, GateSettings]:
    """The gates that the methods of a finished run folder ran with, thresholds included."""
    return msgspec.convert(json.loads((folder / "summary.json").read_text())["gates"], dict[str, GateSettings])


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


def _measured(evaluation: Evaluation, pair: Pair[Any]) -> Timing:
    """The times of an evaluation: those that its settings give, and measured ones for the others."""
    methods, kappa, family = evaluation.resolved, evaluation.kappa, rollout_of(pair, HYBRID)

    def of_part(part: Literal["draft", "target", "head"], given_ms: float | None) -> float:
        return median_ms({part: family.call(part)})[part] if given_ms is None else given_ms

    draft_ms, target_ms = of_part("draft", evaluation.draft_ms), of_part("target", evaluation.target_ms)
    head_ms = of_part("head", evaluation.head_ms) if any(method.uses_head for method in methods) else 0.0
    gate_ms = {}
    for gate, method in sorted({method.gate: method for method in methods}.items()):
        if gate in _WITHOUT_TIME:
            gate_ms[gate] = 0.0
        elif evaluation.gate_ms is not None:
            gate_ms[gate] = kappa * evaluation.gate_ms
        else:
            decoded = decoded_by(method, pair)
            decide = decision(gate_settings(gate, decoded, evaluation.gate_options).build(decoded), decoded)
            gate_ms[gate] = kappa * median_ms({gate: decide})[gate]
    return Timing(kappa * draft_ms, kappa * head_ms, target_ms, kappa * target_ms, gate_ms)


def write_shard(out: Path, shard: Shard, outcomes: list[Outcome], steps: Table) -> None:
    """Writes a shard's tables into a run folder."""
    columns = {field.name: [getattr(o, field.name) for o in outcomes] for field in fields(Outcome)}
    if not any(columns["task"]):
        del columns["task"]  # only suites have tasks
    # The outcomes are written last: they mark the shard as finished.
    for kind, table in (("steps", steps), ("episodes", {name: np.array(values) for name, values in columns.items()})):
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table(table), sink)
        write_whole(_file(out, kind, shard), sink.getvalue().to_pybytes())


def _claim(out: Path, evaluation: Evaluation, pair: Pair[Any], env: str, command: str) -> dict[str, Any]:
    """The run folder's manifest: the settings, the machine, and the accounted times."""
    weights = {"fingerprint": pair.fingerprint}
    if isinstance(pair.parts, CodeParts) and any(method.proposes == "head" for method in evaluation.resolved):
        # The pair's fingerprint does not cover the head. Learned gates name it in their calibrations.
        weights["head"] = head_fingerprint(pair)
    methods: dict[str, Any] = {"methods": [method.name for method in evaluation.resolved]}
    # What determines the results of a method that has no name of its own.
    if values := [asdict(method) for method in evaluation.methods if isinstance(method, Method)]:
        methods["compositions"] = [
            {name: value for name, value in entry.items() if name not in ("about", "rivals")} for entry in values
        ]
    order = _MEASURED if evaluation.realtime else _ALONE if family_of(pair).measured else _ACCOUNTED
    return RunFolder(out, "evaluation").claim(
        asdict(evaluation) | methods | {"env": env} | weights,
        command,
        lambda: {"timing": asdict(_measured(evaluation, pair)), "order": order},
    )


def _run_method(whole: Shard, size: int, out: Path, runner: Runner, progress: Progress) -> tuple[Table, Table]:
    """The outcomes and steps of all of a method's episodes, in shards of this size."""
    name, total = whole.method.name, len(whole.episodes)
    shards = [replace(whole, episodes=whole.episodes[start : start + size]) for start in range(0, total, size)]
    missing = [shard for shard in shards if not _file(out, "episodes", shard).exists()]
    done = total - sum(len(shard.episodes) for shard in missing)
    progress(name, done, total)
    for shard, (episodes, table) in runner(missing):
        write_shard(out, shard, episodes, table)
        done += len(shard.episodes)
        progress(name, done, total)
    return read_table(out / "episodes" / file_stem(name)), read_table(out / "steps" / file_stem(name))


def _file(out: Path, kind: str, shard: Shard) -> Path:
    return out / kind / file_stem(shard.method.name) / f"{shard.episodes[0]:06d}.parquet"


def _calibration(
    pair: Pair[Any], env: str, method: Method, wanted: GateSettings, evaluation: Evaluation, out: Path, pool: Pool,
    progress: Progress,
) -> Calibration:  # fmt: skip
    """The run folder's calibration; else the pair's or a new one, stored there so that the run can resume."""
    gate, decoding = method.gate, method.decoding or pair.source.decoding
    path = out / "calibration" / calibration_file(gate, evaluation.rate, decoding)
    if path.exists():
        return read_calibration(path, pair)
    in_bundle = None if pair.path is None else pair.path / "calibration" / path.name
    stored = read_calibration(in_bundle, pair) if in_bundle is not None and in_bundle.is_file() else None
    if stored is None or env != pair.env or wanted != stored.settings.without_threshold():
        stage, rounds, episodes = f"calibrating {gate}", 4, evaluation.calibration_episodes
        stored = calibrate(
            pair, wanted, evaluation.rate, episodes=episodes, rounds=rounds, seed=evaluation.seed, method=method,
            env=env, pool=pool, advance=lambda done: progress(stage, done, episodes * (rounds + 2)),
        )  # fmt: skip
    stored.save(path.parent)
    return stored


def _calibration_summary(calibration: Calibration) -> dict[str, Any]:
    keys = ("auroc", "spearman", "linear", "logarithmic")
    model = calibration.model
    # Older calibrations in bundles have no model of the primary code.
    primary = model.get("primary")
    return {
        "threshold": calibration.settings.threshold,
        "held_out_rate": calibration.held_out["rate"],
        "held_out_episodes": int(calibration.held_out["episodes"]),
        **{key: model[key] for key in keys if key in model},
        "primary": None if primary is None else {key: primary[key] for key in keys},
    }
