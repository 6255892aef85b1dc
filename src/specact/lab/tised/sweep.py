"""A sweep: levers x strengths x paces x hardware x links x episodes, with results in a resumable folder."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import onnxruntime

from specact import __version__
from specact.errors import ConfigError, ObservationError
from specact.files import write_json
from specact.gates.settings import GateSettings
from specact.lab.data.locks import locked
from specact.lab.envs import load_task
from specact.lab.envs.moving import MovingWorld
from specact.lab.envs.task import Idle
from specact.lab.rollout.history import ObservationSampler
from specact.lab.rollout.pool import Pool
from specact.lab.tised.calibration import GateSearch, calibrate_gate, gate_of
from specact.lab.tised.costs import measure_settings
from specact.lab.tised.curves import ON_BOARD
from specact.lab.tised.drivers import CodesDriver, FlowDriver, PairDriver, SplitDriver, observation_spec_of
from specact.lab.tised.records import CALIBRATIONS, EPISODES, MANIFEST, cut_torn_line, read_rows, to_line
from specact.lab.tised.settings import Setting
from specact.lab.tised.trial import PLACE, Row, Trial, run_trial
from specact.links.link import load_link
from specact.observation import ObservationSpec
from specact.ranges import COUNT, NOT_NEGATIVE, SEED, check_ranges
from specact.tised.hardware import load_hardware

Progress = Callable[[str, int, int], None]
Item = TypeVar("Item")
Key = tuple[object, ...]
_EPISODE = (*PLACE, "episode")


@dataclass(frozen=True)
class Sweep:
    """The settings of a sweep.

    Attributes:
        fingerprint: of the drivers' bundle.
        settings: every lever at every strength.
        task, paces: the world, and its rates of change.
        hardware: profiles, see :func:`~specact.tised.hardware.load_hardware`.
        links: to the server; see :func:`~specact.links.link.load_link`.
        episodes: paired, of every setting at every place.
        seed: random seed.
        idles: idle modes of the robot, see :class:`~specact.lab.envs.moving.MovingWorld`.
        calibration: episodes per round of a gate's calibration, and for its held-out check.
        target_ms: accounted time of the server's inference, independent of the robot's hardware; None for the measured
            time on the robot's hardware.
    """

    fingerprint: str
    settings: tuple[Setting, ...]
    task: str
    paces: tuple[float, ...]
    hardware: tuple[str, ...]
    links: tuple[str, ...]
    episodes: int
    seed: int = 0
    idles: tuple[Idle, ...] = ("hold",)
    calibration: int = 40
    target_ms: float | None = None

    def __post_init__(self) -> None:
        if not (self.settings and self.paces and self.idles and self.hardware and self.links):
            raise ConfigError("a sweep needs at least one lever, pace, way to idle, hardware and link")
        check_ranges(self, {"episodes": COUNT, "calibration": COUNT, "seed": SEED, "target_ms": NOT_NEGATIVE})
        if not all(0.0 <= pace < math.inf for pace in self.paces):
            raise ConfigError(f"paces must be at least 0 and finite, got {', '.join(map(str, self.paces))}")
        task = load_task(self.task)
        if any(self.paces) and task.pace is None:
            raise ConfigError(f"nothing in task {self.task!r} moves by itself, so its pace must be 0; got {self.paces}")
        for name in self.hardware:
            load_hardware(name)
        for name in self.links:
            if name != ON_BOARD:
                load_link(name)
        if any(map(offloads, self.settings)) and ON_BOARD in self.links:
            raise ConfigError("levers that query a server need links; name at least one, such as loopback+delay=20")


def run_sweep(sweep: Sweep, out: Path, progress: Progress, pool: Pool, *, command: str = "") -> None:
    """Runs a sweep and writes ``manifest.json``, ``calibrations.jsonl``, and ``episodes.jsonl``, a line per episode.

    Gates with a rate are calibrated first, at every place. A stopped sweep resumes; a kill loses only the running
    episodes.

    Args:
        sweep: its settings.
        out: its folder.
        progress: called with (stage, done, total).
        pool: worker pool.
        command: recorded in the manifest.

    Raises:
        ConfigError: if ``out`` holds another sweep, is locked by another process, or a policy does not fit an execution
            mode or the task.
    """
    _check(sweep)
    with locked(out):
        _run(sweep, out, progress, pool, command)


def _run(sweep: Sweep, out: Path, progress: Progress, pool: Pool, command: str) -> None:
    manifest = _claim(sweep, out, command)
    trials = list(_trials(sweep, manifest["latency_ms"]))
    searches = {_key(trial.row, PLACE): GateSearch(trial, sweep.calibration) for trial in trials if _holds_rate(trial)}
    calibrations = _finish(searches, calibrate_gate, PLACE, out / CALIBRATIONS, pool, partial(progress, "calibrations"))
    gates = {_key(row, PLACE): gate_of(row) for row in calibrations}
    trials_by_key = {_key(trial.row, _EPISODE): _with_gate(trial, gates) for trial in trials}
    _finish(trials_by_key, run_trial, _EPISODE, out / EPISODES, pool, partial(progress, f"{sweep.task}, episodes"))


def _finish(
    items: Mapping[Key, Item],
    work: Callable[[Item], Row],
    names: tuple[str, ...],
    file: Path,
    pool: Pool,
    progress: Callable[[int, int], None],
) -> list[Row]:
    """Processes the items without a row in the file, and appends a line for each; returns all rows of the file.

    Args:
        items: by the columns ``names`` of their rows.
    """
    cut_torn_line(file)
    rows = read_rows(file)
    present = {_key(row, names) for row in rows}
    missing = [item for key, item in items.items() if key not in present]
    done = len(items) - len(missing)
    if items:
        progress(done, len(items))
    with file.open("a") as lines:
        for _, row in pool.each(work, missing):
            lines.write(to_line(row))
            lines.flush()
            rows.append(row)
            done += 1
            progress(done, len(items))
    return rows


def _holds_rate(trial: Trial) -> bool:
    return isinstance(trial.driver, PairDriver) and trial.driver.rate is not None


def _with_gate(trial: Trial, gates: Mapping[Key, GateSettings]) -> Trial:
    """The trial with the calibrated gate of its place, if it needs one."""
    if not isinstance(trial.driver, PairDriver) or trial.driver.rate is None:
        return trial
    return replace(trial, driver=replace(trial.driver, gate=gates[_key(trial.row, PLACE)]))


def _trials(sweep: Sweep, latency_ms: Mapping[str, list[float]]) -> Iterator[Trial]:
    """All trials, episode by episode, so that a stopped sweep covers all settings."""
    for episode in range(sweep.episodes):
        for pace in sweep.paces:
            for idle, name, setting in product(sweep.idles, sweep.hardware, sweep.settings):
                profile = load_hardware(name)
                for link in sweep.links if offloads(setting) else (ON_BOARD,):
                    yield Trial(
                        lever=setting.lever, strength=setting.strength, driver=setting.driver,
                        execution=setting.execution, task=sweep.task, pace=pace, idle=idle, hardware=profile.name,
                        kappa=profile.kappa, link=link,
                        latencies_s=_latencies_s(sweep, setting, latency_ms[setting.label], profile.kappa),
                        episode=episode, seed=sweep.seed, fingerprint=sweep.fingerprint,
                    )  # fmt: skip


def _latencies_s(sweep: Sweep, setting: Setting, measured_ms: list[float], kappa: float) -> tuple[float, ...]:
    """The measured times scaled to the robot's hardware; ``target_ms`` replaces the server's time."""
    scaled = [1e-3 * kappa * value for value in measured_ms]
    if offloads(setting) and sweep.target_ms is not None:
        # The server runs only a part of a split target.
        part = measured_ms[-1] / sum(measured_ms) if isinstance(setting.driver, SplitDriver) else 1.0
        scaled[-1] = 1e-3 * sweep.target_ms * part
    return tuple(scaled)


def offloads(setting: Setting) -> bool:
    """Whether a setting queries a server."""
    return setting.remote or isinstance(setting.driver, PairDriver)


def _check(sweep: Sweep) -> None:
    """Checks, before anything is written, that all policies run in the task."""
    task = load_task(sweep.task)
    for idle in sweep.idles:
        MovingWorld(task, idle=idle).close()
    worlds: dict[ObservationSpec, MovingWorld] = {}
    for setting in sweep.settings:
        observation = observation_spec_of(setting.driver)
        if isinstance(setting.driver, FlowDriver | CodesDriver) and setting.execution is not None:
            policy, rolls_forward = setting.driver.build(), task.roll_forward is not None
            setting.execution.check(policy.spec, inpaints=policy.inpaints, rolls_forward=rolls_forward)
        if observation not in worlds:
            worlds[observation] = MovingWorld(load_task(sweep.task, observation), idle=sweep.idles[0])
            worlds[observation].reset(0)
        try:
            ObservationSampler(worlds[observation], observation).window()
        except ObservationError as error:
            name = Path(setting.driver.bundle).name
            raise ConfigError(f"{name!r} cannot act in task {sweep.task!r}: {error}; leave out --task") from None
    for world in worlds.values():
        world.close()


def _claim(sweep: Sweep, out: Path, command: str) -> dict[str, Any]:
    """Creates the folder's manifest, with measured latencies, or reads that of the same sweep to resume it."""
    request, path = _request(sweep), out / MANIFEST
    if path.exists():
        try:
            manifest = dict(json.loads(path.read_text()))
            stored = manifest["sweep"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is damaged ({error}); choose another --out, or remove that folder") from None
        # Episodes may be added.
        if stored | {"episodes": 0} != request | {"episodes": 0}:
            raise ConfigError(f"{out} holds another sweep ({manifest.get('command')}); choose another --out")
        return manifest
    manifest = {
        "command": command,
        "specact": __version__,
        "sweep": request,
        "baselines": {setting.lever: setting.strength for setting in reversed(sweep.settings)},
        "latency_ms": measure_settings(sweep.settings),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "onnxruntime": onnxruntime.__version__,
        },
    }
    write_json(path, manifest)
    return manifest


def _request(sweep: Sweep) -> dict[str, Any]:
    """The sweep as plain values; without the bundle's path, because the fingerprint identifies it."""
    request: dict[str, Any] = json.loads(json.dumps(asdict(sweep)))
    for setting in request["settings"]:
        driver = setting["driver"]
        driver["bundle"] = Path(driver["bundle"]).name
        for key in ("file", "parts", "stages"):
            driver.pop(key, None)  # derived from bundle, lever and strength
    return request


def _key(row: Row, names: tuple[str, ...]) -> Key:
    return tuple(row[name] for name in names)
