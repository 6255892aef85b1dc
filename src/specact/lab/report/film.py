"""The film of a report: one episode under up to three methods, side by side, simulated again from the run folder."""

from __future__ import annotations

import io
import math
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import av
import msgspec
import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFont, ImageOps

from specact.errors import BundleError, ConfigError, DataError, RenderError, SpecactError
from specact.files import write_whole
from specact.lab.envs import evaluated, load_task
from specact.lab.envs.robot import SimulatedRobot
from specact.lab.evaluation.cost import Timing, timed
from specact.lab.evaluation.run import read_gates
from specact.lab.evaluation.runs import Run
from specact.lab.rollout.families import rollout_of
from specact.lab.rollout.methods import load_method
from specact.lab.rollout.rollout import Shard, begin, control_step
from specact.load import load_pair
from specact.pair import Pair

FILMED = ("draft", "adahi", "target")
RATE_HZ = 10.0  # frames of simulated time shown per second
MOST_FRAMES = 150
# Of each method a picture in a frame, and above it a text and a bar with its steps.
SIZE_PX, BORDER_PX, BAR_PX, TEXT_PX, PAD_PX = 256, 4, 12, 26, 8
FRAME_PX = SIZE_PX + 2 * BORDER_PX
ABOVE_PX = TEXT_PX + BAR_PX + 4
WIDTH_PX, HEIGHT_PX = PAD_PX + len(FILMED) * (FRAME_PX + PAD_PX), ABOVE_PX + FRAME_PX + 2 * PAD_PX
GROUND, INK, SENT, OWN = "#191f26", "#e4e9ee", "#6db1f2", "#3b5069"
LAST_S = 1.0  # for which the last frame is held
# Constant quality; one keyframe in 30 frames, so that a player can seek.
VP9 = {"crf": "40", "b": "0", "g": "30", "deadline": "realtime", "cpu-used": "5"}


@dataclass(frozen=True)
class Screen:
    """The outcome of the simulated episode under one method."""

    method: str
    success: bool
    sent: float  # share of the control steps whose inference went to the target
    seconds: float  # simulated time

    def __str__(self) -> str:
        return f"{'success' if self.success else 'failure'} after {self.seconds:.1f} s, {self.sent:.0%} sent"


@dataclass(frozen=True)
class Film:
    """One episode under several methods, side by side.

    Attributes:
        episode: its number; why: the reason for its choice.
        screens: from left to right.
        speed: simulated seconds per second.
        video: WebM with VP9, of ``WIDTH_PX`` by ``HEIGHT_PX``.
    """

    episode: int
    screens: tuple[Screen, ...]
    speed: float
    video: bytes
    why: str = ""


def show_film(run: Run, filmed: Sequence[str] = FILMED) -> Film:
    """The film of one episode of this run, preferably one where the second method succeeds and the first fails.

    ``filmed`` are up to three methods; where the run has none of them, its first three. Raises as :func:`load_film`,
    and :exc:`DataError` if the table of episodes cannot be read.
    """
    methods = [method for method in filmed if method in run.methods] or list(run.methods)[:3]
    if not methods:
        raise DataError(f"{run.folder} has no methods")
    outcomes = {method: run.outcomes(method) for method in methods}
    won = {method: dict(zip(o["episode"], o["success"], strict=True)) for method, o in outcomes.items()}
    episode, why = _choose(won)
    film = load_film(run, episode, methods)
    others = [screen.method for screen in film.screens if screen.success != won[screen.method][episode]]
    if others:
        why += (
            f" Simulated again, alone instead of in a batch, {', '.join(others)} ended otherwise than in the tables: "
            "the last bits of a float differ."
        )
    return replace(film, why=why)


def _choose(won: dict[str, dict[int, bool]]) -> tuple[int, str]:
    """The episode to show, and the reason: the first that the second method wins and the first loses."""
    episodes = sorted(set.intersection(*map(set, won.values())))
    baseline, method = [*won, *won][:2]
    gained = [episode for episode in episodes if won[method][episode] and not won[baseline][episode]]
    lost = sum(bool(won[baseline][episode]) and not won[method][episode] for episode in episodes)
    if not gained:
        return int(episodes[0]), f"The first episode: in none did {baseline} fail and {method} succeed."
    # Preferably one that all others win.
    best = max(gained, key=lambda episode: sum(bool(outcomes[episode]) for outcomes in won.values()))
    return int(best), (
        f"One of {len(gained)} episodes, out of {len(episodes)}, in which {baseline} failed and {method} succeeded; "
        f"in {lost} it is the other way round."
    )


def load_film(run: Run, episode: int, methods: Sequence[str]) -> Film:
    """Reads the film of an episode from the run folder's ``films/``, or renders it and stores it there.

    The episode runs alone and not in a batch, so floats can differ from the evaluation's in the last bits, and the
    rollout with them: compare :attr:`Screen.success`. At most three methods.

    Raises:
        ConfigError: if this machine cannot draw the environment; the message says why.
        BundleError: if the bundle is no longer the one that was evaluated.
    """
    path = run.folder / "films" / f"{episode:06d}.json"
    with suppress(OSError, ValueError):  # no readable film is there
        film = msgspec.json.decode(path.read_bytes(), type=Film)
        if film.video and [screen.method for screen in film.screens] == [*methods]:
            return film
    pair, evaluated = _pair(run), run.evaluation["fingerprint"]
    if pair.fingerprint != evaluated:
        raise BundleError(
            f"the bundle {pair.name!r} has fingerprint {pair.fingerprint}, but {evaluated} was evaluated; run the "
            "evaluation again to film it"
        )
    film = _rendered(run, episode, tuple(methods))
    with suppress(ConfigError):  # a run folder that cannot be written to can still be shown
        write_whole(path, msgspec.json.encode(film))
    return film


def _pair(run: Run) -> Pair[Any]:
    """The evaluated pair."""
    return load_pair(
        run.evaluation["bundle"], **{part: run.evaluation[part] for part in ("draft", "target", "decoding")}
    )


def _rendered(*what: Any) -> Film:
    """The film, from a new process: MuJoCo chooses its renderer on import, and some renderers crash the process."""
    # The renderer that is set, else the headless ones.
    chosen, reasons = os.environ.get("MUJOCO_GL", ""), []
    for renderer in (chosen,) if chosen or sys.platform != "linux" else ("egl", "osmesa"):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            try:
                film = process.submit(_film, renderer, *what).result()
            except BrokenProcessPool:
                film = "the process that drew ended"
        if isinstance(film, Film):
            return film
        reasons.append(f"{renderer or 'default'}: {film}")
    raise ConfigError(
        f"this machine cannot draw the environment ({'; '.join(reasons)}); install EGL or OSMesa, or add --no-films"
    )


def _film(renderer: str, run: Run, episode: int, methods: tuple[str, ...]) -> Film | str:
    """The film, drawn with this renderer; the reason where it cannot draw."""
    if renderer:
        os.environ["MUJOCO_GL"] = renderer
    try:
        rollouts = [_simulated(run, episode, method) for method in methods]
    except RenderError as error:
        return str(error)
    except SpecactError:
        raise
    except Exception as error:  # noqa: BLE001 - each renderer raises its own errors
        return f"{type(error).__name__}: {error}"
    last = max(len(rollout.sent) for rollout in rollouts)
    count = max(len(rollout.frames) for rollout in rollouts)
    moments = [*range(count), *[count - 1] * round(LAST_S * RATE_HZ)]
    images = (side_by_side([_tile(rollout, last, moment) for rollout in rollouts]) for moment in moments)
    speed = rollouts[0].every * RATE_HZ / load_task(run.evaluation["env"]).rate_hz
    return Film(episode, tuple(rollout.screen for rollout in rollouts), speed, video(images))


@dataclass(frozen=True)
class _Rollout:
    """One method's rollout: images ``every`` so many control steps, and per step whether its inference was sent."""

    screen: Screen
    every: int
    frames: list[Image.Image]
    sent: list[bool]


def _simulated(run: Run, episode: int, name: str) -> _Rollout:
    """The episode under one method."""
    evaluation, method, pair = run.evaluation, load_method(name), _pair(run)
    env, gate = evaluated(evaluation["env"]), read_gates(run.folder)[name]
    shard = timed(
        Shard.of(pair, env, method, gate, (episode,), evaluation["seed"]),
        Timing(**run.manifest["timing"]), link=evaluation["link"],
    )  # fmt: skip
    family = rollout_of(pair, method)
    task = load_task(evaluation["env"], family.pair.observation)
    world = SimulatedRobot(task, render_mode="rgb_array")
    robot = begin(shard, family, world, episode)
    every = max(1, round(task.rate_hz / RATE_HZ), math.ceil(task.max_steps / MOST_FRAMES))
    frames, sent = [_frame(world.env)], list[bool]()
    while not world.done:
        control_step([robot], family)
        record = robot.policy.record
        sent.append(record is not None and record.decision.transmit)
        if world.steps % every == 0 or world.done:
            frames.append(_frame(world.env))
    world.close()
    screen = Screen(name, world.success, sum(sent) / len(sent), world.steps / task.rate_hz)
    return _Rollout(screen, every, frames, sent)


def _frame(env: Any) -> Image.Image:
    return ImageOps.pad(Image.fromarray(env.render()), (SIZE_PX, SIZE_PX), Image.Resampling.BOX)


def _tile(rollout: _Rollout, last: int, moment: int) -> Image.Image:
    """A frame of one rollout, the last one once it is over; above it method, text and a bar of all steps."""
    number = min(moment, len(rollout.frames) - 1)
    step = min(number * rollout.every, len(rollout.sent))
    over, sent = moment > number, rollout.sent[max(0, step - 1)]
    text = "over" if over else "sent" if sent else "the draft's own"
    tile = Image.new("RGB", (FRAME_PX, ABOVE_PX + FRAME_PX), GROUND)
    draw = ImageDraw.Draw(tile)
    draw.text((0, 0), f"{rollout.screen.method}: {text}", INK, ImageFont.load_default(20))
    colours = np.array([ImageColor.getrgb(OWN), ImageColor.getrgb(SENT)], np.uint8)
    bar = Image.fromarray(colours[np.array(rollout.sent, int)][None])
    size = (round(FRAME_PX * len(rollout.sent) / last), BAR_PX)
    tile.paste(bar.resize(size, Image.Resampling.NEAREST), (0, TEXT_PX))
    at = min(round(FRAME_PX * step / last), FRAME_PX - 2)
    draw.rectangle((at, TEXT_PX - 2, at + 1, TEXT_PX + BAR_PX + 1), INK)
    draw.rectangle((0, ABOVE_PX, FRAME_PX, ABOVE_PX + FRAME_PX), SENT if sent and not over else OWN)
    tile.paste(rollout.frames[number], (BORDER_PX, ABOVE_PX + BORDER_PX))
    return tile


def side_by_side(tiles: Sequence[Image.Image]) -> Image.Image:
    """A frame of a film, of at most three pictures."""
    row = Image.new("RGB", (WIDTH_PX, HEIGHT_PX), GROUND)
    for place, tile in enumerate(tiles):
        row.paste(tile, (PAD_PX + place * (FRAME_PX + PAD_PX), PAD_PX))
    return row


def video(frames: Iterable[Image.Image]) -> bytes:
    """Frames as a WebM file, at :data:`RATE_HZ`; of the same frames always the same bytes."""
    file = io.BytesIO()
    # Bit-exact: no date and no machine in the file.
    with av.open(file, "w", "webm", options={"fflags": "+bitexact"}) as container:
        stream = container.add_stream("libvpx-vp9", round(RATE_HZ), VP9)
        stream.width, stream.height, stream.pix_fmt = WIDTH_PX, HEIGHT_PX, "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(frame), "rgb24")))
        container.mux(stream.encode())
    return file.getvalue()
