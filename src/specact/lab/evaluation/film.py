"""Episodes of an evaluation as short films: simulated again from the run folder by the same robots, and drawn."""

from __future__ import annotations

import io
import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps

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

RATE_HZ = 10.0  # frames of simulated time shown per second
MOST_FRAMES = 120
MOST_METHODS = 3
# Of each method a picture in a frame, and above it a text and a bar with its steps.
SIZE_PX, BORDER_PX, BAR_PX, TEXT_PX, PAD_PX = 256, 4, 12, 26, 8
FRAME_PX = SIZE_PX + 2 * BORDER_PX
ABOVE_PX = TEXT_PX + BAR_PX + 4
WIDTH_PX, HEIGHT_PX = PAD_PX + MOST_METHODS * (FRAME_PX + PAD_PX), ABOVE_PX + FRAME_PX + 2 * PAD_PX
GROUND, INK, SENT, OWN = "#191f26", "#e4e9ee", "#6db1f2", "#3b5069"
LAST_S = 1.0  # for which the last picture stays
# Constant quality; one in 30 frames is whole, so that a film can be searched.
VP9 = {"crf": "40", "b": "0", "g": "30", "deadline": "realtime", "cpu-used": "5"}


@dataclass(frozen=True)
class Screen:
    """How the episode went under one method, this time.

    Attributes:
        method: its name.
        success, steps: of the episode.
        sent: share of the control steps whose inference went to the target.
        seconds: simulated time.
    """

    method: str
    success: bool
    steps: int
    sent: float
    seconds: float

    def __str__(self) -> str:
        return f"{'success' if self.success else 'failure'} after {self.seconds:.1f} s, {self.sent:.0%} sent"


@dataclass(frozen=True)
class Film:
    """One episode under several methods, side by side.

    Attributes:
        episode: its number.
        screens: from left to right.
        speed: simulated seconds per second.
        video: WebM with VP9, of ``WIDTH_PX`` by ``HEIGHT_PX``.
        poster: four moments of each method, from the first to the last, as one WebP of the same size.
    """

    episode: int
    screens: tuple[Screen, ...]
    speed: float
    video: bytes
    poster: bytes


def load_film(folder: Path, manifest: dict[str, Any], episode: int, methods: Sequence[str], longest: int) -> Film:
    """The film of an episode, from the run folder's ``films/``; if it is not there yet, it is made and kept there.

    The episode runs alone and not in a batch with others, so it can differ from the evaluation's in the last bits of
    a float, and then in how it goes on: compare :attr:`Screen.success`.

    Args:
        folder: run folder.
        manifest: of the run.
        episode: its number.
        methods: at most three names; of those whose gate is calibrated, the run folder holds the calibration.
        longest: control steps of the longest of these episodes, which decides how many steps pass between two frames.

    Raises:
        ConfigError: if this machine cannot draw the environment; the message says why.
        BundleError: if the bundle is no longer the one that was evaluated.
    """
    film = _read(folder, episode, methods)
    if film is None:
        _check_bundle(manifest["evaluation"])
        film = _make(_Order(folder, manifest, episode, tuple(methods), longest))
        # A run folder that cannot be written to can still be shown.
        with suppress(ConfigError):
            _write(folder, film)
    return film


def _check_bundle(what: dict[str, Any]) -> None:
    found = load_pair(what["bundle"], draft=what["draft"], target=what["target"]).fingerprint
    if found != what["fingerprint"]:
        raise BundleError(
            f"the bundle {what['bundle']!r} has fingerprint {found}, but {what['fingerprint']} was evaluated; "
            "run the evaluation again to film it"
        )


@dataclass(frozen=True)
class _Order:
    """What a process that draws has to know; see :func:`load_film`."""

    folder: Path
    manifest: dict[str, Any]
    episode: int
    methods: tuple[str, ...]
    longest: int


def _make(order: _Order) -> Film:
    """In a process of its own: MuJoCo chooses how to draw when it is imported, and some ways end the process."""
    reasons = []
    for renderer in _renderers():
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            try:
                found = process.submit(_shoot, order, renderer).result()
            except BrokenProcessPool:
                found = "the process that drew ended"
        if isinstance(found, Film):
            return found
        reasons.append(f"{renderer or 'default'}: {found}")
    raise ConfigError(
        f"this machine cannot draw the environment ({'; '.join(reasons)}); install EGL or OSMesa, or add --no-films"
    )


def _renderers() -> tuple[str, ...]:
    """Values of MUJOCO_GL to try: the one that is set, else what draws without a display."""
    chosen = os.environ.get("MUJOCO_GL", "")
    return (chosen,) if chosen or sys.platform != "linux" else ("egl", "osmesa")


def _shoot(order: _Order, renderer: str) -> Film | str:
    """The film of an order; a sentence where drawing failed."""
    if renderer:
        os.environ["MUJOCO_GL"] = renderer
    try:
        return _film(order, [_take(order, method) for method in order.methods])
    except RenderError as error:
        return str(error)
    except SpecactError:
        raise
    except Exception as error:  # noqa: BLE001 - each renderer fails in a way of its own
        return f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class _Take:
    """What was seen of one method.

    Attributes:
        screen: how it went.
        frames, steps: pictures, and control steps done before each.
        sent: per control step, whether the inference behind it went to the target.
    """

    screen: Screen
    frames: list[Image.Image]
    steps: list[int]
    sent: list[bool]


def _take(order: _Order, method: str) -> _Take:
    what = order.manifest["evaluation"]
    pair = load_pair(what["bundle"], draft=what["draft"], target=what["target"])
    task = load_task(what["env"], pair.observation)
    family = rollout_of(pair, load_method(method), what["offset"])
    world = SimulatedRobot(task, render_mode="rgb_array")
    robot = simulated(_shard(order, method, pair), pair, family, world, order.episode)
    every = _stride(order, task.rate_hz)
    frames, steps, sent = [_frame(world.env)], [0], []
    while not world.done:
        control_step([robot], family)
        record = robot.policy.record
        sent.append(record is not None and record.decision.transmit)
        if world.steps % every == 0 or world.done:
            frames.append(_frame(world.env))
            steps.append(world.steps)
    world.close()
    screen = Screen(method, world.success, world.steps, sum(sent) / len(sent), world.steps / task.rate_hz)
    return _Take(screen, frames, steps, sent)


def _stride(order: _Order, rate_hz: float) -> int:
    """Control steps between two frames."""
    return max(1, round(rate_hz / RATE_HZ), math.ceil(order.longest / MOST_FRAMES))


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


def _film(order: _Order, takes: Sequence[_Take]) -> Film:
    last = max(take.screen.steps for take in takes)
    file = io.BytesIO()
    poster = _side_by_side([_tile(take, last, _four_moments(take.frames), "four moments") for take in takes])
    poster.save(file, "WEBP", quality=70, method=4)
    count = max(len(take.frames) for take in takes)
    moments = [*range(count), *[count - 1] * round(LAST_S * RATE_HZ)]
    video = _video(_side_by_side([_moment(take, last, moment) for take in takes]) for moment in moments)
    rate_hz = load_task(order.manifest["evaluation"]["env"]).rate_hz
    speed = RATE_HZ * _stride(order, rate_hz) / rate_hz
    return Film(order.episode, tuple(take.screen for take in takes), speed, video, file.getvalue())


def _moment(take: _Take, last: int, moment: int) -> Image.Image:
    """A picture of the film; one that is over stays at its last."""
    own = min(moment, len(take.frames) - 1)
    over, sent = moment > own, take.sent[max(0, take.steps[own] - 1)]
    text = "over" if over else "sent" if sent else "the draft's own"
    return _tile(take, last, take.frames[own], text, take.steps[own], SENT if sent and not over else OWN)


def _tile(
    take: _Take, last: int, picture: Image.Image, text: str, step: int | None = None, frame: str = OWN
) -> Image.Image:
    """A picture in its frame; above it method, text and steps, up to the last of the film, with a line at this one."""
    tile = Image.new("RGB", (FRAME_PX, ABOVE_PX + FRAME_PX), GROUND)
    draw = ImageDraw.Draw(tile)
    draw.text((0, 0), f"{take.screen.method}: {text}", INK, ImageFont.load_default(20))
    for place, sent in enumerate(take.sent):
        left, right = (round(FRAME_PX * at / last) for at in (place, place + 1))
        draw.rectangle((left, TEXT_PX, max(left, right - 1), TEXT_PX + BAR_PX - 1), SENT if sent else OWN)
    if step is not None:
        at = min(round(FRAME_PX * step / last), FRAME_PX - 2)
        draw.rectangle((at, TEXT_PX - 2, at + 1, TEXT_PX + BAR_PX + 1), INK)
    draw.rectangle((0, ABOVE_PX, FRAME_PX, ABOVE_PX + FRAME_PX), frame)
    tile.paste(picture, (BORDER_PX, ABOVE_PX + BORDER_PX))
    return tile


def _side_by_side(tiles: Sequence[Image.Image]) -> Image.Image:
    row = Image.new("RGB", (WIDTH_PX, HEIGHT_PX), GROUND)
    for place, tile in enumerate(tiles):
        row.paste(tile, (PAD_PX + place * (FRAME_PX + PAD_PX), PAD_PX))
    return row


def _four_moments(frames: Sequence[Image.Image]) -> Image.Image:
    half = SIZE_PX // 2
    picture = Image.new("RGB", (SIZE_PX, SIZE_PX))
    for place in range(4):
        moment = frames[round(place * (len(frames) - 1) / 3)]
        row, column = divmod(place, 2)
        picture.paste(moment.resize((half, half), Image.Resampling.BOX), (column * half, row * half))
    return picture


def _video(frames: Iterable[Image.Image]) -> bytes:
    file = io.BytesIO()
    # Bit-exact: nothing of the day and the machine is in the file.
    with av.open(file, "w", "webm", options={"fflags": "+bitexact"}) as container:
        stream = container.add_stream("libvpx-vp9", round(RATE_HZ), VP9)
        stream.width, stream.height, stream.pix_fmt = WIDTH_PX, HEIGHT_PX, "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(frame), "rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def _paths(folder: Path, episode: int) -> tuple[Path, Path, Path]:
    stem = folder / "films" / f"{episode:06d}"
    return stem.with_suffix(".json"), stem.with_suffix(".webm"), stem.with_suffix(".webp")


def _write(folder: Path, film: Film) -> None:
    metadata, video, poster = _paths(folder, film.episode)
    write_whole(video, film.video)
    write_whole(poster, film.poster)
    # Written last: it says that the others are there.
    write_json(metadata, asdict(replace(film, video=b"", poster=b"")) | {"video": video.name, "poster": poster.name})


def _read(folder: Path, episode: int, methods: Sequence[str]) -> Film | None:
    """The film that is kept; None if there is none of these methods that can be read."""
    metadata, video, poster = _paths(folder, episode)
    try:
        kept = json.loads(metadata.read_text())
        screens = tuple(Screen(**screen) for screen in kept["screens"])
        film = Film(**kept | {"screens": screens, "video": video.read_bytes(), "poster": poster.read_bytes()})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return film if [screen.method for screen in film.screens] == [*methods] else None
