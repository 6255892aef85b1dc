"""A sweep: levers x strengths x paces x hardware x links x episodes, in a folder that resumes."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from specact import __version__
from specact.envs import load_task
from specact.envs.moving import Idle
from specact.errors import ConfigError, DataError
from specact.evaluation.metrics import Table
from specact.evaluation.pool import Pool
from specact.evaluation.tised.curves import ON_BOARD
from specact.evaluation.tised.drivers import CodesDriver, PairDriver, inference
from specact.evaluation.tised.levers import Setting
from specact.evaluation.tised.trial import Row, Trial, run_trial
from specact.files import write_json, write_whole
from specact.links.link import load_link
from specact.tised.hardware import load_hardware

MANIFEST, EPISODES = "manifest.json", "episodes.jsonl"
_TIMED = 60
Progress = Callable[[str, int, int], None]


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
        seed: of everything random.
        idle: see :class:`~specact.envs.moving.MovingWorld`.
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
    idle: Idle = "hold"
    target_ms: float | None = None

    def __post_init__(self) -> None:
        if not (self.settings and self.paces and self.hardware and self.links):
            raise ConfigError("a sweep needs at least one lever, pace, hardware and link")
        if self.episodes < 1 or self.seed < 0:
            raise ConfigError(f"a sweep has at least 1 episode and a seed >= 0, got {self.episodes} and {self.seed}")
        task = load_task(self.task)
        if any(self.paces) and task.pace is None:
            raise ConfigError(f"nothing in task {self.task!r} moves by itself, so its pace must be 0; got {self.paces}")
        for name in self.hardware:
            load_hardware(name)
        for name in self.links:
            if name != ON_BOARD:
                load_link(name)
        if any(map(_offloads, self.settings)) and ON_BOARD in self.links:
            raise ConfigError("levers that ask a server need links; name at least one, such as loopback+delay=20")


def run_sweep(what: Sweep, out: Path, progress: Progress, *, workers: int | None = None, command: str = "") -> None:
    """Runs a sweep and writes ``manifest.json`` and ``episodes.jsonl``, a line per episode as it is finished.

    Run again after a stop, it goes on with what is missing; what a kill costs are the episodes under way.

    Args:
        what: the sweep.
        out: its folder.
        progress: told (what is going on, done, in all).
        workers: processes; None for one per core.
        command: recorded in the manifest.

    Raises:
        ConfigError: if ``out`` holds another sweep, or a policy does not go with an execution or the task.
    """
    _check(what)
    manifest, file = _claim(what, out, command), out / EPISODES
    trials = list(_trials(what, manifest["latency_ms"]))
    _cut_torn_line(file)
    kept = {_key(row) for row in _rows(file)}
    missing = [trial for trial in trials if _key(trial.row) not in kept]
    done, name = len(trials) - len(missing), f"{what.task}, episodes"
    progress(name, done, len(trials))
    with file.open("a") as lines, Pool(workers) as pool:
        for _, row in pool.each(run_trial, missing):
            known = {name: None if value != value else value for name, value in row.items()}  # JSON has no NaN
            lines.write(json.dumps(known, allow_nan=False) + "\n")
            lines.flush()
            done += 1
            progress(name, done, len(trials))


def read_sweeps(folders: Sequence[Path]) -> tuple[Table, dict[str, float], list[dict[str, Any]]]:
    """The episodes of one or more sweeps as one table, the baseline of every lever, and the manifests.

    Raises:
        DataError: if a folder holds no sweep, or two sweeps have different baselines of one lever.
    """
    rows: list[Row] = []
    baselines: dict[str, float] = {}
    manifests = []
    for folder in folders:
        if not (folder / MANIFEST).is_file():
            raise DataError(f"{folder} holds no sweep; make one with: specact tised sweep --out {folder}")
        manifest = json.loads((folder / MANIFEST).read_text())
        rows += _rows(folder / EPISODES)
        manifests.append(manifest)
        for lever, baseline in manifest["baselines"].items():
            if baselines.setdefault(lever, baseline) != baseline:
                raise DataError(
                    f"{folder}: the baseline of {lever!r} is {baseline:g}, that of another sweep {baselines[lever]:g}; "
                    "analyse them apart"
                )
    if not rows:
        raise DataError(f"no episode is finished in {', '.join(map(str, folders))}; run the sweep again")
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}, baselines, manifests


def _trials(what: Sweep, latency_ms: Mapping[str, list[float]]) -> Iterator[Trial]:
    """Episode by episode, so that a stopped sweep has a little of everything."""
    for episode in range(what.episodes):
        for pace in what.paces:
            for name in what.hardware:
                profile = load_hardware(name)
                for setting in what.settings:
                    for link in what.links if _offloads(setting) else (ON_BOARD,):
                        yield Trial(
                            lever=setting.lever, strength=setting.strength, driver=setting.driver,
                            execution=setting.execution, task=what.task, pace=pace, hardware=profile.name,
                            kappa=profile.kappa, link=link,
                            latencies_s=_latencies_s(what, setting, latency_ms[_label(setting)], profile.kappa),
                            idle=what.idle, episode=episode, seed=what.seed,
                        )  # fmt: skip


def _latencies_s(what: Sweep, setting: Setting, measured_ms: list[float], kappa: float) -> tuple[float, ...]:
    """What the robot's hardware makes of the measured times; a server has a time of its own where one is given."""
    scaled = [1e-3 * kappa * value for value in measured_ms]
    if _offloads(setting) and what.target_ms is not None:
        scaled[-1] = 1e-3 * what.target_ms
    return tuple(scaled)


def _offloads(setting: Setting) -> bool:
    return setting.remote or isinstance(setting.driver, PairDriver)


def _label(setting: Setting) -> str:
    return f"{setting.lever} {setting.strength:g}"


def _check(what: Sweep) -> None:
    task = load_task(what.task)
    for setting in what.settings:
        if setting.execution is not None and not isinstance(setting.driver, PairDriver):
            setting.execution.check(setting.driver.build(), task)


def _claim(what: Sweep, out: Path, command: str) -> dict[str, Any]:
    """The folder's manifest: a new one with latencies measured now, or that of the same sweep that was stopped."""
    request = json.loads(json.dumps(asdict(what)))
    path = out / MANIFEST
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
        "latency_ms": measure(what.settings),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "onnxruntime": onnxruntime.__version__,
        },
    }
    write_json(path, manifest)
    return manifest


def measure(settings: Sequence[Setting]) -> dict[str, list[float]]:
    """Median time of each setting's inferences at batch 1 on this machine [ms], measured in turn and in rounds."""
    runs: dict[str, list[Callable[[], object]]] = {}
    for setting in settings:
        if isinstance(setting.driver, PairDriver):
            drivers = [CodesDriver(setting.driver.bundle, role) for role in ("draft", "target")]
            runs[_label(setting)] = [inference(driver) for driver in drivers]
        else:
            guided = setting.execution is not None and setting.execution.kind == "inpainting"
            runs[_label(setting)] = [inference(setting.driver, inpainting=guided)]
    taken: dict[str, list[list[float]]] = {label: [[] for _ in calls] for label, calls in runs.items()}
    for _ in range(_TIMED):
        for label, calls in runs.items():
            for call, times in zip(calls, taken[label], strict=True):
                started = time.perf_counter()
                call()
                times.append(1e3 * (time.perf_counter() - started))
    # The first rounds warm up.
    return {label: [float(np.median(times[10:])) for times in parts] for label, parts in taken.items()}


def _cut_torn_line(file: Path) -> None:
    """A kill may have cut the last line short; the next one must begin a line of its own."""
    if file.exists() and not (text := file.read_text()).endswith("\n"):
        write_whole(file, text[: text.rfind("\n") + 1].encode())


def _rows(file: Path) -> list[Row]:
    """The whole lines of a file."""
    if not file.exists():
        return []
    text = file.read_text()
    try:
        rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    except ValueError as error:
        raise DataError(f"{file} is damaged ({error}); remove the damaged lines, or the folder") from None
    return [{name: float("nan") if value is None else value for name, value in row.items()} for row in rows]


def _key(row: Row) -> tuple[object, ...]:
    return tuple(row[name] for name in ("lever", "strength", "pace", "hardware", "link", "episode"))
