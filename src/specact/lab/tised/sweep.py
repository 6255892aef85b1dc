"""A sweep: levers x strengths x paces x hardware x links x episodes, with results in a resumable folder."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from specact.errors import ConfigError, ObservationError, unknown_name
from specact.gates.settings import GateSettings
from specact.lab.data.folder import JsonLines, Row, RunFolder, locked
from specact.lab.envs import load_task
from specact.lab.envs.robot import MovingWorld
from specact.lab.envs.task import Idle
from specact.lab.evaluation.calibrate import calibration_episodes, decision_table, find_threshold
from specact.lab.evaluation.cost import median_ms
from specact.lab.rollout.episode import TimedRobot
from specact.lab.rollout.pool import Pool
from specact.lab.rollout.rollout import check_weights
from specact.lab.tised.drivers import ON_BOARD, Driver, OnDecision, PolicyDriver, Setting, SplitDriver, Trial
from specact.links.link import load_link
from specact.observation import ObservationSpec
from specact.records import Count, NotNegative, Positive, Record, Seed, check_fields, read_record, read_toml
from specact.types import Decision

Progress = Callable[[str, int, int], None]
Item = TypeVar("Item")
Key = tuple[object, ...]
# The columns that identify a setting at one place of a sweep.
PLACE = ("lever", "strength", "pace", "idle", "hardware", "link")
ROUNDS = 3
CALIBRATIONS, EPISODES = "calibrations.jsonl", "episodes.jsonl"


class HardwareProfile(Record, frozen=True, kw_only=True):
    """An emulated platform: how long inferences take, whatever the load of the machine that runs the sweep.

    Attributes:
        about: description, and whether the times are measured, derived or chosen.
        kappa: factor on a bundle's stored times, see :func:`stored_ms`.
        base_ms, step_ms: in its place, an inference of k Euler steps takes ``base_ms + k step_ms``; k = 0 without any.
    """

    about: str
    kappa: Positive | None = None
    base_ms: Positive | None = None
    step_ms: NotNegative = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.kappa is None) == (self.base_ms is None) or (self.step_ms and self.base_ms is None):
            raise ConfigError(
                "a hardware profile needs either kappa, or base_ms and, if that depends on steps, step_ms"
            )

    @property
    def times(self) -> str:
        """In words."""
        if self.kappa is not None:
            return f"kappa {self.kappa:g}"
        return f"{self.base_ms:g} ms" + (f" + {self.step_ms:g} ms for each step" if self.step_ms else "")

    def absolute_s(self, driver: Driver) -> float:
        """The absolute time of one inference [s].

        Raises:
            ConfigError: if the profile cannot know it: it knows plain inferences of one policy alone.
        """
        assert self.base_ms is not None, "checked by its callers"
        whole = isinstance(driver, PolicyDriver) and not isinstance(driver, SplitDriver) and not driver.files
        if not whole or not isinstance(driver, PolicyDriver) or driver.execution.kind == "rtc":
            raise ConfigError(
                "hardware with absolute times knows how long an inference of one policy takes, and not the parts of a "
                "pair, of rounds, of guidance or of smaller networks; choose hardware with kappa for this lever"
            )
        return 1e-3 * (self.base_ms + self.step_ms * (driver.steps if driver.role == "flow" else 0))


def load_hardware(name: str) -> tuple[str, HardwareProfile]:
    """A profile with its name.

    That is one of :func:`named_hardware`; ``PATH.toml:NAME`` for one in a file; or the time of every inference, such as
    ``480ms``.

    Raises:
        ConfigError: for an unknown name, or a file that cannot be used.
    """
    if re.fullmatch(r"\d+(\.\d+)?ms", name):
        return name, read_record(
            {"about": "chosen: every inference", "base_ms": float(name[:-2])}, HardwareProfile, name
        )
    path, _, chosen = (f"{name}:" if name.endswith(".toml") else name).rpartition(":")
    profiles = _read_hardware(Path(path)) if path else named_hardware()
    if chosen not in profiles:
        raise unknown_name("hardware", chosen or f"{path}:NAME", profiles)
    return chosen, profiles[chosen]


def named_hardware() -> dict[str, HardwareProfile]:
    """The built-in profiles by name."""
    return _read_hardware(Path(__file__).with_name("hardware.toml"))


def _read_hardware(path: Path) -> dict[str, HardwareProfile]:
    profiles = read_toml(path, dict[str, HardwareProfile], "hardware profiles")
    if not profiles:
        raise ConfigError(f"{path} has no hardware profile; a profile is a table [NAME] with about and kappa")
    return profiles


@dataclass(frozen=True)
class Sweep:
    """The settings of a sweep: every setting at every place, on the same episodes."""

    fingerprint: str  # of the drivers' bundle
    settings: tuple[Setting, ...]  # every lever at every strength
    task: str
    paces: tuple[NotNegative, ...]  # the world's rates of change
    hardware: tuple[str, ...]  # profiles, see load_hardware
    links: tuple[str, ...]  # to the server, see load_link
    episodes: Count
    seed: Seed = 0
    idles: tuple[Idle, ...] = ("hold",)  # the robot's behaviour while it waits, see MovingWorld
    calibration: Count = 40  # episodes per round of a gate's calibration, and for its held-out check
    # Accounted time of the server's inference, independent of the robot's hardware; None for the measured time on it.
    target_ms: NotNegative | None = None

    def __post_init__(self) -> None:
        if not (self.settings and self.paces and self.idles and self.hardware and self.links):
            raise ConfigError("a sweep needs at least one lever, pace, way to idle, hardware and link")
        check_fields(self)
        if not all(map(math.isfinite, self.paces)):
            raise ConfigError(f"paces must be finite, got {', '.join(map(str, self.paces))}")
        task = load_task(self.task)
        if any(self.paces) and task.pace is None:
            raise ConfigError(f"nothing in task {self.task!r} moves by itself, so its pace must be 0; got {self.paces}")
        for name in self.hardware:
            if (profile := load_hardware(name)[1]).kappa is None:
                for setting in self.settings:
                    profile.absolute_s(setting.driver)
        for name in self.links:
            if name != ON_BOARD:
                load_link(name)
        offloads = any(setting.driver.offloads for setting in self.settings)
        if not offloads and (self.target_ms is not None or self.links != (ON_BOARD,)):
            raise ConfigError("links and target_ms are for a server, and no lever queries one; leave them out")
        if offloads and ON_BOARD in self.links:
            raise ConfigError("levers that query a server need links; name at least one, such as loopback+delay=20")


def sweep_folder(path: Path) -> RunFolder:
    """The folder of a sweep."""
    return RunFolder(path, "sweep")


def run_trial(trial: Trial, *, on_decision: OnDecision | None = None) -> Row:
    """Runs the episode; returns a row of the setting and the :class:`~specact.lab.rollout.episode.Episode`.

    Args:
        trial: which episode.
        on_decision: called with a gate's decisions, see :func:`~specact.lab.rollout.episode.run_pair`.
    """
    driver = trial.setting.driver
    check_weights(driver.bundle, driver.fingerprint, trial.fingerprint)
    world = _world(trial.task, trial.pace, trial.idle, driver.observation)
    return trial.row | {"static": world.static} | asdict(driver.run(world, trial, on_decision))


@cache
def _world(task: str, pace: float, idle: Idle, sees: ObservationSpec) -> MovingWorld:
    """A world, cached across episodes because some take a second to build."""
    return MovingWorld(load_task(task, sees), idle=idle, pace=pace)


def run_sweep(sweep: Sweep, out: Path, progress: Progress, pool: Pool, *, command: str = "") -> None:
    """Runs a sweep and writes ``manifest.json``, ``calibrations.jsonl``, and ``episodes.jsonl``, a line per episode.

    Gates with a rate are calibrated first, at every place. A stopped sweep resumes; a kill loses only the running
    episodes. ``progress`` is called with (stage, done, total); ``command`` is recorded in the manifest.

    Raises:
        ConfigError: if ``out`` holds another sweep, is locked by another process, or a policy does not fit an execution
            mode or the task.
    """
    _check(sweep)
    with locked(out):
        manifest = sweep_folder(out).claim(_request(sweep), command, partial(_measured, sweep), free=("episodes",))
        trials = list(_trials(sweep, manifest["latency_ms"]))
        gated = [trial for trial in trials if trial.setting.driver.rate is not None]
        searches = {_key(trial.row): (trial, sweep.calibration) for trial in gated}
        rows = _finish(searches, calibrate_gate, PLACE, out / CALIBRATIONS, pool, partial(progress, "calibrations"))
        gates = {_key(row): gate_of(row) for row in rows}
        by_key = {_key(trial.row, "episode"): trial for trial in trials}
        by_key |= {_key(trial.row, "episode"): with_gate(trial, gates[_key(trial.row)]) for trial in gated}
        update = partial(progress, f"{sweep.task}, episodes")
        _finish(by_key, run_trial, (*PLACE, "episode"), out / EPISODES, pool, update)


def _key(row: Row, *more: str) -> Key:
    """What identifies a row at its place, or with more columns."""
    return tuple(row[name] for name in (*PLACE, *more))


def _finish(
    items: Mapping[Key, Item], work: Callable[[Item], Row], names: Sequence[str], file: Path, pool: Pool,
    progress: Callable[[int, int], None],
) -> list[Row]:  # fmt: skip
    """Processes the items, by the columns ``names`` of their rows, that have no row in the file; returns all rows."""
    lines = JsonLines(file)
    rows = lines.read()
    present = {tuple(row[name] for name in names) for row in rows}
    missing = [item for key, item in items.items() if key not in present]
    done = len(items) - len(missing)
    if items:
        progress(done, len(items))
    with lines.adding() as add:
        for _, row in pool.each(work, missing):
            add(row)
            rows.append(row)
            done += 1
            progress(done, len(items))
    return rows


def with_gate(trial: Trial, gate: GateSettings) -> Trial:
    """The trial with another gate."""
    driver: Any = trial.setting.driver
    return replace(trial, setting=replace(trial.setting, driver=replace(driver, gate=gate)))


def calibrate_gate(search: tuple[Trial, int]) -> Row:
    """Finds a gate's threshold on states of the gated policy in the moving world, with the link's delays.

    The calibrated rate is that of the gate's decisions. With late verdicts a step is not sent while another request is
    in flight, so over a long link less is sent than the gate wants: ``held_out_sent``.

    ``search`` is any episode at the gate's place, and episodes per round and again for the held-out check; the result a
    row with the place, the gate, and the rates on held-out episodes.
    """
    trial, episodes = search
    driver: Any = trial.setting.driver
    sent: list[bool] = []

    def roll(settings: GateSettings, number: int) -> dict[str, np.ndarray]:
        steps: list[tuple[Decision, bool]] = []
        tried = with_gate(trial, settings)
        for episode in calibration_episodes(number, ROUNDS, episodes):
            run_trial(replace(tried, episode=episode), on_decision=lambda *decided: steps.append(decided))
        table = decision_table([decision for decision, _ in steps])
        sent[:] = table["transmitted"].tolist()
        return table | {"transmitted": np.array([wanted for _, wanted in steps])}

    result = find_threshold(driver.gate, driver.rate, ROUNDS, roll)
    return {name: trial.row[name] for name in PLACE} | {
        "rate": driver.rate, "held_out_rate": float(result.checked["transmitted"].mean()),
        "held_out_sent": float(np.mean(sent)), "episodes": episodes, "inferences": len(sent),
        "rounds": [{"threshold": attempt.settings.threshold, "rate": attempt.rate} for attempt in result.rounds],
        "gate": asdict(result.settings),
    }  # fmt: skip


def gate_of(row: Row) -> GateSettings:
    """The calibrated gate of a row."""
    return msgspec.convert(row["gate"], GateSettings)


def _trials(sweep: Sweep, latency_ms: Mapping[str, list[float]]) -> Iterator[Trial]:
    """All trials, episode by episode, so that a stopped sweep covers all settings."""
    profiles = [load_hardware(name) for name in sweep.hardware]
    every = product(range(sweep.episodes), sweep.paces, sweep.idles, profiles, sweep.settings)
    for episode, pace, idle, (hardware, profile), setting in every:
        latencies_s = _latencies_s(sweep, setting, latency_ms.get(setting.label, []), profile)
        for link in sweep.links if setting.driver.offloads else (ON_BOARD,):
            yield Trial(
                setting, sweep.task, pace, idle, hardware, profile.kappa or 0.0, link, latencies_s, episode, sweep.seed,
                sweep.fingerprint,
            )  # fmt: skip


def _latencies_s(
    sweep: Sweep, setting: Setting, parts_ms: list[float], profile: HardwareProfile
) -> tuple[float, ...]:  # fmt: skip
    """The times of a setting's parts on the robot's hardware; ``target_ms`` replaces the server's time."""
    if profile.kappa is None:
        scaled = [profile.absolute_s(setting.driver)]
    else:
        scaled = [1e-3 * profile.kappa * value for value in parts_ms]
    if setting.driver.offloads and sweep.target_ms is not None:
        # The server runs only a part of a split target.
        part = parts_ms[-1] / sum(parts_ms) if isinstance(setting.driver, SplitDriver) else 1.0
        scaled[-1] = 1e-3 * sweep.target_ms * part
    return tuple(scaled)


def _measured(sweep: Sweep) -> dict[str, Any]:
    baselines = {setting.lever: setting.strength for setting in reversed(sweep.settings)}
    if all(load_hardware(name)[1].kappa is None for name in sweep.hardware):
        return {"baselines": baselines, "latency_ms": {}, "latency": "absolute"}
    stored = stored_ms(sweep.settings, sweep.fingerprint)
    latency_ms = measure_settings(sweep.settings) if stored is None else stored
    return {"baselines": baselines, "latency_ms": latency_ms, "latency": "stored" if stored else "measured"}


class StoredTimes(Record, frozen=True):
    """How long the parts of a bundle's settings take, by their drivers' keys, at batch 1 on one core [ms]."""

    about: str
    ms: dict[str, NotNegative]


def stored_ms(settings: Sequence[Setting], fingerprint: str) -> dict[str, list[float]] | None:
    """The stored times of all parts of each setting [ms], by the setting's label; None if some are not stored.

    What a sweep measures depends on the load of its machine, so that a second run would be another experiment.
    """
    times = read_toml(Path(__file__).with_name("latency.toml"), dict[str, StoredTimes], "stored times")
    if (entry := times.get(fingerprint)) is None:
        return None
    keys = {setting.label: [driver.key(name) for driver, name in setting.driver.parts] for setting in settings}
    if not all(key in entry.ms for parts in keys.values() for key in parts):
        return None
    return {label: [entry.ms[key] for key in parts] for label, parts in keys.items()}


def measure_settings(settings: Sequence[Setting]) -> dict[str, list[float]]:
    """Median time of the parts of each setting at batch 1 on this machine [ms], by the setting's label.

    Every part is measured once, so settings that share one have the same time; the measurements alternate.
    """
    parts = dict.fromkeys(part for setting in settings for part in setting.driver.parts)
    times_ms = median_ms({(driver, name): driver.call(name) for driver, name in parts}, repeats=50)
    return {setting.label: [times_ms[part] for part in setting.driver.parts] for setting in settings}


def _check(sweep: Sweep) -> None:
    """Checks, before anything is written, that all policies run in the task."""
    task = load_task(sweep.task)
    for idle in sweep.idles:
        MovingWorld(task, idle=idle).close()
    worlds: dict[ObservationSpec, MovingWorld] = {}
    for setting in sweep.settings:
        driver, observation = setting.driver, setting.driver.observation
        if isinstance(driver, PolicyDriver):
            policy, rolls_forward = driver.build(), task.roll_forward is not None
            driver.execution.check(policy.spec, inpaints=policy.inpaints, rolls_forward=rolls_forward)
        if observation not in worlds:
            worlds[observation] = MovingWorld(load_task(sweep.task, observation), idle=sweep.idles[0])
            worlds[observation].reset(0)
        try:
            TimedRobot(worlds[observation], observation).window()
        except ObservationError as error:
            name = Path(driver.bundle).name
            raise ConfigError(f"{name!r} cannot act in task {sweep.task!r}: {error}; leave out --task") from None
    for world in worlds.values():
        world.close()


def _request(sweep: Sweep) -> dict[str, Any]:
    """The sweep as plain values; without the bundle's path, because the fingerprint identifies it."""
    request: dict[str, Any] = json.loads(json.dumps(asdict(sweep)))
    for setting in request["settings"]:
        driver = setting["driver"]
        if (source := driver.pop("source", None)) is not None:  # of a pair
            driver |= {"bundle": source.pop("name_or_path"), "named": source}
        driver["bundle"] = Path(driver["bundle"]).name
        for key in ("files", "stages"):
            driver.pop(key, None)  # derived from bundle, lever and strength
    return request
