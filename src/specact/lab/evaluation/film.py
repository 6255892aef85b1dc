"""Videos of an evaluation's episodes: simulated again from the run folder, and rendered."""

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
from specact.files import write_json, write_whole
from specact.lab.envs import load_task
from specact.lab.envs.robot import SimulatedRobot
from specact.lab.evaluation.cost import Timing, timed
from specact.lab.evaluation.run import read_gates
from specact.lab.rollout.families import rollout_of
from specact.lab.rollout.methods import load_method
from specact.lab.rollout.rollout import Shard, begin, control_step
from specact.load import load_pair
from specact.pair import Pair

RATE_HZ = 10.0  # frames of simulated time shown per second
MOST_FRAMES = 120
MOST_METHODS = 3
# Of each method a picture in a frame, and above it a text and a bar with its steps.
SIZE_PX, BORDER_PX, BAR_PX, TEXT_PX, PAD_PX = 256, 4, 12, 26, 8
FRAME_PX = SIZE_PX + 2 * BORDER_PX
ABOVE_PX = TEXT_PX + BAR_PX + 4
WIDTH_PX, HEIGHT_PX = PAD_PX + MOST_METHODS * (FRAME_PX + PAD_PX), ABOVE_PX + FRAME_PX + 2 * PAD_PX
GROUND, INK, SENT, OWN = "#191f26", "#e4e9ee", "#6db1f2", "#3b5069"
LAST_S = 1.0  # for which the last frame is held
# Constant quality; one keyframe in 30 frames, so that a player can seek.
VP9 = {"crf": "40", "b": "0", "g": "30", "deadline": "realtime", "cpu-used": "5"}


@dataclass(frozen=True)
class Screen:
    """The outcome of the simulated episode under one method.

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
        poster: its frame in the middle, as WebP.
    """

    episode: int
    screens: tuple[Screen, ...]
    speed: float
    video: bytes
    poster: bytes


def load_film(folder: Path, manifest: dict[str, Any], episode: int, methods: Sequence[str], longest: int) -> Film:
    """Reads the film of an episode from the run folder's ``films/``, or renders it and stores it there.

    The episode runs alone and not in a batch, so floats can differ from the evaluation's in the last bits, and the
    rollout with them: compare :attr:`Screen.success`.

    Args:
        folder: run folder.
        manifest: of the run.
        episode: its number.
        methods: at most three names; the run folder holds the calibrations of their gates.
        longest: control steps of the longest of these episodes, which decides how many steps pass between two frames.

    Raises:
        ConfigError: if this machine cannot draw the environment; the message says why.
        BundleError: if the bundle is no longer the one that was evaluated.
    """
    film = _read(folder, episode, methods)
    if film is None:
        film = _Filming(folder, manifest, episode, tuple(methods), longest).render()
        # A run folder that cannot be written to can still be shown.
        with suppress(ConfigError):
            _write(folder, film)
    return film


@dataclass(frozen=True)
class _Filming:
    """What is filmed, see :func:`load_film`."""

    folder: Path
    manifest: dict[str, Any]
    episode: int
    methods: tuple[str, ...]
    longest: int

    def render(self) -> Film:
        """In a new process: MuJoCo chooses its renderer on import, and some renderers crash the process."""
        pair, evaluated = self.pair(), self.manifest["evaluation"]["fingerprint"]
        if pair.fingerprint != evaluated:
            raise BundleError(
                f"the bundle {pair.name!r} has fingerprint {pair.fingerprint}, but {evaluated} was evaluated; run the "
                "evaluation again to film it"
            )
        # The renderer that is set, else the headless ones.
        chosen, reasons = os.environ.get("MUJOCO_GL", ""), []
        for renderer in (chosen,) if chosen or sys.platform != "linux" else ("egl", "osmesa"):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                try:
                    film = process.submit(_render_with, self, renderer).result()
                except BrokenProcessPool:
                    film = "the process that drew ended"
            if isinstance(film, Film):
                return film
            reasons.append(f"{renderer or 'default'}: {film}")
        raise ConfigError(
            f"this machine cannot draw the environment ({'; '.join(reasons)}); install EGL or OSMesa, or add --no-films"
        )

    def pair(self) -> Pair[Any]:
        """The evaluated pair."""
        evaluation = self.manifest["evaluation"]
        return load_pair(evaluation["bundle"], **{part: evaluation[part] for part in ("draft", "target", "decoding")})

    def stride(self, rate_hz: float) -> int:
        """Control steps between two frames."""
        return max(1, round(rate_hz / RATE_HZ), math.ceil(self.longest / MOST_FRAMES))

    def simulate(self, name: str) -> _Rollout:
        """The episode under one method."""
        evaluation, method, pair = self.manifest["evaluation"], load_method(name), self.pair()
        gate = read_gates(self.folder)[name]
        shard = timed(
            Shard.of(pair, evaluation["env"], method, gate, (self.episode,), evaluation["seed"]),
            Timing(**self.manifest["timing"]), link=evaluation["link"],
        )  # fmt: skip
        family = rollout_of(pair, method)
        task = load_task(evaluation["env"], family.pair.observation)
        world = SimulatedRobot(task, render_mode="rgb_array")
        robot = begin(shard, family, world, self.episode)
        every = self.stride(task.rate_hz)
        frames, steps, sent = [_frame(world.env)], [0], []
        while not world.done:
            control_step([robot], family)
            record = robot.policy.record
            sent.append(record is not None and record.decision.transmit)
            if world.steps % every == 0 or world.done:
                frames.append(_frame(world.env))
                steps.append(world.steps)
        world.close()
        screen = Screen(name, world.success, world.steps, sum(sent) / len(sent), world.steps / task.rate_hz)
        return _Rollout(screen, frames, steps, sent)

    def film(self) -> Film:
        """The episode under all methods."""
        rollouts = [self.simulate(method) for method in self.methods]
        last = max(rollout.screen.steps for rollout in rollouts)
        count = max(len(rollout.frames) for rollout in rollouts)
        moments = [*range(count), *[count - 1] * round(LAST_S * RATE_HZ)]
        images = [_side_by_side([_tile(rollout, last, moment) for rollout in rollouts]) for moment in moments]
        poster = io.BytesIO()
        images[count // 2].save(poster, "WEBP", quality=70, method=4)
        rate_hz = load_task(self.manifest["evaluation"]["env"]).rate_hz
        screens, speed = tuple(rollout.screen for rollout in rollouts), RATE_HZ * self.stride(rate_hz) / rate_hz
        return Film(self.episode, screens, speed, _video(images), poster.getvalue())


def _render_with(filming: _Filming, renderer: str) -> Film | str:
    """The film; the reason where rendering failed."""
    if renderer:
        os.environ["MUJOCO_GL"] = renderer
    try:
        return filming.film()
    except RenderError as error:
        return str(error)
    except SpecactError:
        raise
    except Exception as error:  # noqa: BLE001 - each renderer raises its own errors
        return f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class _Rollout:
    """The frames of one method's rollout.

    Attributes:
        screen: its outcome.
        frames, steps: images, and control steps done before each.
        sent: per control step, whether the inference behind it went to the target.
    """

    screen: Screen
    frames: list[Image.Image]
    steps: list[int]
    sent: list[bool]


def _frame(env: Any) -> Image.Image:
    pixels: NDArray[np.uint8] = env.render()
    return ImageOps.pad(Image.fromarray(pixels), (SIZE_PX, SIZE_PX), Image.Resampling.BOX)


def _tile(rollout: _Rollout, last: int, moment: int) -> Image.Image:
    """A frame of one rollout, the last one once it is over; above it method, text and a bar of all steps."""
    number = min(moment, len(rollout.frames) - 1)
    over, sent = moment > number, rollout.sent[max(0, rollout.steps[number] - 1)]
    text = "over" if over else "sent" if sent else "the draft's own"
    tile = Image.new("RGB", (FRAME_PX, ABOVE_PX + FRAME_PX), GROUND)
    draw = ImageDraw.Draw(tile)
    draw.text((0, 0), f"{rollout.screen.method}: {text}", INK, ImageFont.load_default(20))
    for place, sent_there in enumerate(rollout.sent):
        left, right = (round(FRAME_PX * at / last) for at in (place, place + 1))
        draw.rectangle((left, TEXT_PX, max(left, right - 1), TEXT_PX + BAR_PX - 1), SENT if sent_there else OWN)
    at = min(round(FRAME_PX * rollout.steps[number] / last), FRAME_PX - 2)
    draw.rectangle((at, TEXT_PX - 2, at + 1, TEXT_PX + BAR_PX + 1), INK)
    draw.rectangle((0, ABOVE_PX, FRAME_PX, ABOVE_PX + FRAME_PX), SENT if sent and not over else OWN)
    tile.paste(rollout.frames[number], (BORDER_PX, ABOVE_PX + BORDER_PX))
    return tile


def _side_by_side(tiles: Sequence[Image.Image]) -> Image.Image:
    row = Image.new("RGB", (WIDTH_PX, HEIGHT_PX), GROUND)
    for place, tile in enumerate(tiles):
        row.paste(tile, (PAD_PX + place * (FRAME_PX + PAD_PX), PAD_PX))
    return row


def _video(frames: Iterable[Image.Image]) -> bytes:
    file = io.BytesIO()
    # Bit-exact: no date and no machine in the file.
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
    # Written last: it marks the film as complete.
    write_json(metadata, asdict(replace(film, video=b"", poster=b"")) | {"video": video.name, "poster": poster.name})


def _read(folder: Path, episode: int, methods: Sequence[str]) -> Film | None:
    """The stored film; None if there is no readable one of these methods."""
    metadata, video, poster = _paths(folder, episode)
    try:
        stored = json.loads(metadata.read_text())
        screens = tuple(Screen(**screen) for screen in stored["screens"])
        film = Film(**stored | {"screens": screens, "video": video.read_bytes(), "poster": poster.read_bytes()})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return film if [screen.method for screen in film.screens] == [*methods] else None
