"""Episodes of an evaluation as short films: simulated again from the run folder, by the same robots, and drawn."""

from __future__ import annotations

import io
import json
import math
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from specact.errors import BundleError, ConfigError, RenderError, SpecactError
from specact.families.load import AnyPair, load_pair
from specact.files import write_json, write_whole
from specact.lab.envs import load_task
from specact.lab.envs.robot import SimulatedRobot
from specact.lab.evaluation.cost import read_timing
from specact.lab.evaluation.run import read_gates
from specact.lab.rollout.families import rollout_of
from specact.lab.rollout.methods import load_method
from specact.lab.rollout.rollout import Shard, control_step, simulated

SIZE_PX = 256
COLUMNS = 10  # frames in a row of a sheet
RATE_HZ = 10.0  # frames of simulated time shown per second
MOST_FRAMES = 120
MOST_BYTES = 360_000  # of one sheet
QUALITIES = (70, 55, 40, 25, 10)


@dataclass(frozen=True)
class Film:
    """One episode of one method.

    Attributes:
        method, episode: which.
        success, score, steps: how it went, this time.
        sent: per control step, whether the inference behind it went to the target.
        frame_steps: control steps done before each frame.
        rate_hz: control steps per second of simulated time.
        size_px: width and height of a frame.
        columns: frames in a row of the sheet.
        sheet: all frames, row by row, as WebP.
        poster: four moments, from the first to the last, as one WebP of a frame's size.
    """

    method: str
    episode: int
    success: bool
    score: float
    steps: int
    sent: tuple[bool, ...]
    frame_steps: tuple[int, ...]
    rate_hz: float
    size_px: int
    columns: int
    sheet: bytes
    poster: bytes


def load_films(
    folder: Path, manifest: dict[str, Any], episode: int, methods: Sequence[str], longest: int
) -> list[Film]:
    """The films of an episode, from the run folder's ``films/``; those that are not there yet are made and kept there.

    The episode runs alone and not in a batch with others, so it can differ from the evaluation's in the last bits of
    a float, and then in how it goes on: compare :attr:`Film.success`.

    Args:
        folder: run folder.
        manifest: of the run.
        episode: its number.
        methods: names; of those whose gate is calibrated, the run folder holds the calibration.
        longest: control steps of the longest of these episodes, which decides how many steps pass between two frames.

    Raises:
        ConfigError: if this machine cannot draw the environment; the message says why.
        BundleError: if the bundle is no longer the one that was evaluated.
    """
    films = {method: _read(folder, episode, method) for method in methods}
    missing = tuple(method for method, film in films.items() if film is None)
    if missing:
        _check_bundle(manifest["evaluation"])
    for film in _make(_Order(folder, manifest, episode, missing, longest)) if missing else ():
        films[film.method] = film
        # A run folder that cannot be written to can still be shown.
        with suppress(ConfigError):
            _write(folder, film)
    return [film for film in films.values() if film is not None]


def _check_bundle(what: dict[str, Any]) -> None:
    found = load_pair(what["bundle"], draft=what["draft"], target=what["target"]).fingerprint
    if found != what["fingerprint"]:
        raise BundleError(
            f"the bundle {what['bundle']!r} has fingerprint {found}, but {what['fingerprint']} was evaluated; "
            "run the evaluation again to film it"
        )


@dataclass(frozen=True)
class _Order:
    """What a process that draws has to know; see :func:`load_films`."""

    folder: Path
    manifest: dict[str, Any]
    episode: int
    methods: tuple[str, ...]
    longest: int


def _make(order: _Order) -> list[Film]:
    """In a process of its own: MuJoCo chooses how to draw when it is imported, and some ways end the process."""
    reasons = []
    for renderer in _renderers():
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            try:
                found = process.submit(_shoot_all, order, renderer).result()
            except BrokenProcessPool:
                found = "the process that drew ended"
        if isinstance(found, list):
            return found
        reasons.append(f"{renderer or 'default'}: {found}")
    raise ConfigError(
        f"this machine cannot draw the environment ({'; '.join(reasons)}); install EGL or OSMesa, or add --no-films"
    )


def _renderers() -> tuple[str, ...]:
    """Values of MUJOCO_GL to try: the one that is set, else what draws without a display."""
    chosen = os.environ.get("MUJOCO_GL", "")
    return (chosen,) if chosen or sys.platform != "linux" else ("egl", "osmesa")


def _shoot_all(order: _Order, renderer: str) -> list[Film] | str:
    """All films of an order; a sentence where drawing failed."""
    if renderer:
        os.environ["MUJOCO_GL"] = renderer
    try:
        return [_shoot(order, method) for method in order.methods]
    except RenderError as error:
        return str(error)
    except SpecactError:
        raise
    except Exception as error:  # noqa: BLE001 - each renderer fails in a way of its own
        return f"{type(error).__name__}: {error}"


def _shoot(order: _Order, method: str) -> Film:
    what = order.manifest["evaluation"]
    pair, task = load_pair(what["bundle"], draft=what["draft"], target=what["target"]), load_task(what["env"])
    family = rollout_of(pair, load_method(method), what["offset"])
    world = SimulatedRobot(task, render_mode="rgb_array")
    robot = simulated(_shard(order, method, pair), pair, family, world, order.episode)
    every = max(1, round(task.rate_hz / RATE_HZ), math.ceil(order.longest / MOST_FRAMES))
    frames, frame_steps, sent = [_frame(world.env)], [0], []
    while not world.done:
        control_step([robot], family)
        record = robot.policy.record
        sent.append(record is not None and record.decision.transmit)
        if world.steps % every == 0 or world.done:
            frames.append(_frame(world.env))
            frame_steps.append(world.steps)
    world.close()
    return Film(
        method, order.episode, world.success, world.score, world.steps, tuple(sent), tuple(frame_steps),
        task.rate_hz, SIZE_PX, COLUMNS, _sheet(frames), _poster(frames),
    )  # fmt: skip


def _shard(order: _Order, method: str, bundle: AnyPair) -> Shard:
    what, timing = order.manifest["evaluation"], read_timing(order.manifest)
    gate = read_gates(order.folder)[method]
    return Shard(
        bundle.source, bundle.fingerprint, what["env"], method, gate, (order.episode,), what["seed"],
        what["link"], timing.draft_s(method), timing.target_s(method), what["offset"], what["overlap"],
        timing.gate_s(method),
    )  # fmt: skip


def _frame(env: Any) -> Image.Image:
    pixels: NDArray[np.uint8] = env.render()
    return ImageOps.pad(Image.fromarray(pixels), (SIZE_PX, SIZE_PX), Image.Resampling.BOX)


def _sheet(frames: Sequence[Image.Image]) -> bytes:
    """All frames in one picture, at the best quality that keeps it small enough."""
    rows = math.ceil(len(frames) / COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * SIZE_PX, rows * SIZE_PX))
    for place, frame in enumerate(frames):
        row, column = divmod(place, COLUMNS)
        sheet.paste(frame, (column * SIZE_PX, row * SIZE_PX))
    for quality in QUALITIES:
        packed = _webp(sheet, quality)
        if len(packed) <= MOST_BYTES:
            break
    return packed


def _poster(frames: Sequence[Image.Image]) -> bytes:
    half = SIZE_PX // 2
    poster = Image.new("RGB", (SIZE_PX, SIZE_PX))
    for place in range(4):
        moment = frames[round(place * (len(frames) - 1) / 3)]
        row, column = divmod(place, 2)
        poster.paste(moment.resize((half, half), Image.Resampling.BOX), (column * half, row * half))
    return _webp(poster, QUALITIES[0])


def _webp(image: Image.Image, quality: int) -> bytes:
    file = io.BytesIO()
    image.save(file, "WEBP", quality=quality, method=4)
    return file.getvalue()


def _paths(folder: Path, episode: int, method: str) -> tuple[Path, Path, Path]:
    stem = folder / "films" / f"{episode:06d}-{method}"
    return stem.with_suffix(".json"), stem.with_suffix(".webp"), stem.with_suffix(".poster.webp")


def _write(folder: Path, film: Film) -> None:
    metadata, sheet, poster = _paths(folder, film.episode, film.method)
    write_whole(sheet, film.sheet)
    write_whole(poster, film.poster)
    # Written last: it says that the pictures are there.
    write_json(metadata, asdict(replace(film, sheet=b"", poster=b"")) | {"sheet": sheet.name, "poster": poster.name})


def _read(folder: Path, episode: int, method: str) -> Film | None:
    """The film that is kept; None if there is none that can be read."""
    metadata, sheet, poster = _paths(folder, episode, method)
    try:
        kept = json.loads(metadata.read_text())
        pictures = {"sheet": sheet.read_bytes(), "poster": poster.read_bytes()}
        lists = {name: tuple(kept[name]) for name in ("sent", "frame_steps")}
        return Film(**kept | lists | pictures)
    except (OSError, ValueError, KeyError, TypeError):
        return None
