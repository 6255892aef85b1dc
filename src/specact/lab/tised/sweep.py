"""A sweep: levers x strengths x paces x hardware x links x episodes, in a folder that resumes."""

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
from specact.lab.envs import load_task
from specact.lab.envs.moving import MovingWorld
from specact.lab.envs.task import Idle
from specact.lab.rollout.history import ObservationSampler
from specact.lab.rollout.pool import Pool
from specact.lab.tised.calibration import GateSearch, calibrate_gate, gate_of
from specact.lab.tised.costs import measure_settings
from specact.lab.tised.curves import ON_BOARD
from specact.lab.tised.drivers import CodesDriver, FlowDriver, PairDriver, SplitDriver, looks_at
from specact.lab.tised.records import CALIBRATIONS, EPISODES, MANIFEST, cut_torn_line, read_rows, to_line
from specact.lab.tised.settings import Setting
from specact.lab.tised.trial import PLACE, Row, Trial, run_trial
from specact.links.link import load_link
from specact.locks import locked
from specact.observation import ObservationSpec
from specact.ranges import COUNT, NOT_NEGATIVE, SEED, check_ranges
from specact.tised.hardware import load_hardware

Progress = Callable[[str, int, int], None]
Item = TypeVar("Item")
Key = tuple[object, ...]
_EPISODE = (*PLACE, "episode")


@dataclass(frozen=True)
class Sweep:
    """What is to be swept.

    Attributes:
        fingerprint: of the bundle that the settings' drivers are made of.
        settings: every lever at every strength.
        task, paces: the world, and how fast it changes.
        hardware: profiles, see :func:`~specact.tised.hardware.load_hardware`.
        links: for what is at the far end; see :func:`~specact.links.link.load_link`.
        episodes: paired, of every setting at every place.
        seed: random seed.
        idles: what the robot does while it waits, each in turn, see :class:`~specact.lab.envs.moving.MovingWorld`.
        calibration: episodes per round of a gate's calibration, and again for its held-out check.
        target_ms: accounted time of a server's inference, whatever the robot's hardware; None for the measured time on
            the robot's hardware.
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
        if any(map(_offloads, self.settings)) and ON_BOARD in self.links:
            raise ConfigError("levers that query a server need links; name at least one, such as loopback+delay=20")


def run_sweep(what: Sweep, out: Path, progress: Progress, pool: Pool, *, command: str = "") -> None:
    """Runs a sweep and writes ``manifest.json``, ``calibrations.jsonl``, and ``episodes.jsonl``, a line per episode.

    Gates that hold a rate are calibrated first, at every place where they run. Run again after a stop, it goes on with
    what is missing; what a kill costs is what was under way.

    Args:
        what: the sweep.
        out: its folder.
        progress: called with (stage, done, total).
        pool: where.
        command: recorded in the manifest.

    Raises:
        ConfigError: if ``out`` holds another sweep, another process is at work there, or a policy does not go with an
            execution or the task.
    """
    _check(what)
    with locked(out):
        _run(what, out, progress, pool, command)


def _run(what: Sweep, out: Path, progress: Progress, pool: Pool, command: str) -> None:
    manifest = _claim(what, out, command)
    trials = list(_trials(what, manifest["latency_ms"]))
    searches = {_key(trial.row, PLACE): GateSearch(trial, what.calibration) for trial in trials if _holds_rate(trial)}
    found = _finish(searches, calibrate_gate, PLACE, out / CALIBRATIONS, pool, partial(progress, "calibrations"))
    gates = {_key(row, PLACE): gate_of(row) for row in found}
    ready = {_key(trial.row, _EPISODE): _with_gate(trial, gates) for trial in trials}
    _finish(ready, run_trial, _EPISODE, out / EPISODES, pool, partial(progress, f"{what.task}, episodes"))


def _finish(
    items: Mapping[Key, Item],
    work: Callable[[Item], Row],
    names: tuple[str, ...],
    file: Path,
    pool: Pool,
    progress: Callable[[int, int], None],
) -> list[Row]:
    """Works on the items whose row is not in the file yet, a line each; returns all rows of the file.

    Args:
        items: by the columns ``names`` of their rows.
    """
    cut_torn_line(file)
    rows = read_rows(file)
    kept = {_key(row, names) for row in rows}
    missing = [item for key, item in items.items() if key not in kept]
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
    """The trial with the gate that was calibrated for its place, if it needs one."""
    if not isinstance(trial.driver, PairDriver) or trial.driver.rate is None:
        return trial
    return replace(trial, driver=replace(trial.driver, gate=gates[_key(trial.row, PLACE)]))


def _trials(what: Sweep, latency_ms: Mapping[str, list[float]]) -> Iterator[Trial]:
    """Episode by episode, so that a stopped sweep has a little of everything."""
    for episode in range(what.episodes):
        for pace in what.paces:
            for idle, name, setting in product(what.idles, what.hardware, what.settings):
                profile = load_hardware(name)
                for link in what.links if _offloads(setting) else (ON_BOARD,):
                    yield Trial(
                        lever=setting.lever, strength=setting.strength, driver=setting.driver,
                        execution=setting.execution, task=what.task, pace=pace, idle=idle, hardware=profile.name,
                        kappa=profile.kappa, link=link,
                        latencies_s=_latencies_s(what, setting, latency_ms[setting.label], profile.kappa),
                        episode=episode, seed=what.seed, fingerprint=what.fingerprint,
                    )  # fmt: skip


def _latencies_s(what: Sweep, setting: Setting, measured_ms: list[float], kappa: float) -> tuple[float, ...]:
    """What the robot's hardware makes of the measured times; a server has a time of its own where one is given."""
    scaled = [1e-3 * kappa * value for value in measured_ms]
    if _offloads(setting) and what.target_ms is not None:
        # Of a split target the server runs a part.
        part = measured_ms[-1] / sum(measured_ms) if isinstance(setting.driver, SplitDriver) else 1.0
        scaled[-1] = 1e-3 * what.target_ms * part
    return tuple(scaled)


def _offloads(setting: Setting) -> bool:
    return setting.remote or isinstance(setting.driver, PairDriver)


def _check(what: Sweep) -> None:
    """Refuses, before anything is written, what would fail in the first episode."""
    task = load_task(what.task)
    for idle in what.idles:
        MovingWorld(task, idle=idle).close()
    worlds: dict[ObservationSpec, MovingWorld] = {}
    for setting in what.settings:
        observation = looks_at(setting.driver)
        if isinstance(setting.driver, FlowDriver | CodesDriver) and setting.execution is not None:
            setting.execution.check(setting.driver.build(), rolls_forward=task.roll_forward is not None)
        if observation not in worlds:
            worlds[observation] = MovingWorld(load_task(what.task, observation), idle=what.idles[0])
            worlds[observation].reset(0)
        try:
            ObservationSampler(worlds[observation], observation).window()
        except ObservationError as error:
            name = Path(setting.driver.bundle).name
            raise ConfigError(f"{name!r} cannot act in task {what.task!r}: {error}; leave out --task") from None
    for world in worlds.values():
        world.close()


def _claim(what: Sweep, out: Path, command: str) -> dict[str, Any]:
    """The folder's manifest: a new one with latencies measured now, or that of the same sweep that was stopped."""
    request, path = _request(what), out / MANIFEST
    if path.exists():
        try:
            manifest = dict(json.loads(path.read_text()))
            found = manifest["sweep"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is damaged ({error}); choose another --out, or remove that folder") from None
        # Episodes may be added.
        if found | {"episodes": 0} != request | {"episodes": 0}:
            raise ConfigError(f"{out} holds another sweep ({manifest.get('command')}); choose another --out")
        return manifest
    manifest = {
        "command": command,
        "specact": __version__,
        "sweep": request,
        "baselines": {setting.lever: setting.strength for setting in reversed(what.settings)},
        "latency_ms": measure_settings(what.settings),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "onnxruntime": onnxruntime.__version__,
        },
    }
    write_json(path, manifest)
    return manifest


def _request(what: Sweep) -> dict[str, Any]:
    """The sweep as plain values. Where its bundle lies is not part of it, as its fingerprint says which it is."""
    request: dict[str, Any] = json.loads(json.dumps(asdict(what)))
    for setting in request["settings"]:
        driver = setting["driver"]
        driver["bundle"] = Path(driver["bundle"]).name
        for key in ("file", "parts", "stages"):
            driver.pop(key, None)  # made from the bundle, as lever and strength say
    return request


def _key(row: Row, names: tuple[str, ...]) -> Key:
    return tuple(row[name] for name in names)
