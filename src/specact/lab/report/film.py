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
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from typing import Any

import av
import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps

from specact.errors import BundleError, ConfigError, DataError, RenderError, SpecactError
from specact.files import write_json, write_whole
from specact.lab.envs import load_task
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
MOST_FRAMES = 120
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
    steps: int
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
    video: bytes = b""
    why: str = ""


def show_film(run: Run, filmed: tuple[str, str, str] = FILMED) -> Film:
    """The film of one episode of this run, preferably one where the second method succeeds and the first fails.

    ``filmed`` are a baseline, the method to compare, and an upper bound; where the run has none of them, its first
    three methods. Raises as :func:`load_film`, and :exc:`DataError` if the table of episodes cannot be read.
    """
    methods = [method for method in filmed if method in run.methods] or list(run.methods)[:3]
    if not methods:
        raise DataError(f"{run.folder} has no methods")
    outcomes = {method: run.outcomes(method) for method in methods}
    won = {method: dict(zip(o["episode"], o["success"], strict=True)) for method, o in outcomes.items()}
    episode, why = _choose(won, *(filmed if filmed[0] in won or filmed[1] in won else [*methods, "", ""])[:2])
    longest = max(int(o["steps"][o["episode"] == episode].max()) for o in outcomes.values())
    film = load_film(run, episode, methods, longest)
    others = [screen.method for screen in film.screens if screen.success != won[screen.method][episode]]
    if others:
        why += (
            f" Simulated again, alone instead of in a batch, {', '.join(others)} ended otherwise than in the tables: "
            "the last bits of a float differ."
        )
    return replace(film, why=why)


def _choose(won: dict[str, dict[int, bool]], baseline: str, method: str) -> tuple[int, str]:
    """The episode to show, and the reason: the first that the method wins and the baseline loses, if there is one."""
    episodes = sorted(set.intersection(*map(set, won.values())))
    first, second = won.get(baseline, {}), won.get(method, {})
    gained = [episode for episode in episodes if not first.get(episode, True) and second.get(episode)]
    lost = sum(bool(first.get(episode)) and not second.get(episode, True) for episode in episodes)
    if not gained:
        return int(episodes[0]), f"The first episode: in none did {baseline} fail and {method} succeed."
    # Preferably one that all others win.
    won_by_others = (e for e in gained if all(result[e] for name, result in won.items() if name != baseline))
    return int(next(won_by_others, gained[0])), (
        f"One of {len(gained)} episodes, out of {len(episodes)}, in which {baseline} failed and {method} succeeded; "
        f"in {lost} it is the other way round."
    )


def load_film(run: Run, episode: int, methods: Sequence[str], longest: int) -> Film:
    """Reads the film of an episode from the run folder's ``films/``, or renders it and stores it there.

    The episode runs alone and not in a batch, so floats can differ from the evaluation's in the last bits, and the
    rollout with them: compare :attr:`Screen.success`. At most three methods; ``longest``, the control steps of the
    longest of these episodes, decides how many steps pass between two frames.

    Raises:
        ConfigError: if this machine cannot draw the environment; the message says why.
        BundleError: if the bundle is no longer the one that was evaluated.
    """
    stem = run.folder / "films" / f"{episode:06d}"
    with suppress(OSError, ValueError):  # no readable film is there
        film = msgspec.json.decode(stem.with_suffix(".json").read_bytes(), type=Film)
        if [screen.method for screen in film.screens] == [*methods]:
            return replace(film, video=stem.with_suffix(".webm").read_bytes())
    film = _Filming(run, episode, tuple(methods), longest).render()
    with suppress(ConfigError):  # a run folder that cannot be written to can still be shown
        write_whole(stem.with_suffix(".webm"), film.video)
        # Written last: it marks the film as complete.
        write_json(stem.with_suffix(".json"), asdict(replace(film, video=b"")) | {"video": ""})
    return film


@dataclass(frozen=True)
class _Filming:
    """What is filmed, see :func:`load_film`."""

    run: Run
    episode: int
    methods: tuple[str, ...]
    longest: int

    def render(self) -> Film:
        """In a new process: MuJoCo chooses its renderer on import, and some renderers crash the process."""
        pair, evaluated = self.pair(), self.run.evaluation["fingerprint"]
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
        evaluation = self.run.evaluation
        return load_pair(evaluation["bundle"], **{part: evaluation[part] for part in ("draft", "target", "decoding")})

    def stride(self, rate_hz: float) -> int:
        """Control steps between two frames."""
        return max(1, round(rate_hz / RATE_HZ), math.ceil(self.longest / MOST_FRAMES))

    def simulate(self, name: str) -> _Rollout:
        """The episode under one method."""
        evaluation, method, pair = self.run.evaluation, load_method(name), self.pair()
        gate = read_gates(self.run.folder)[name]
        shard = timed(
            Shard.of(pair, evaluation["env"], method, gate, (self.episode,), evaluation["seed"]),
            Timing(**self.run.manifest["timing"]), link=evaluation["link"],
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
        images = (_side_by_side([_tile(rollout, last, moment) for rollout in rollouts]) for moment in moments)
        rate_hz = load_task(self.run.evaluation["env"]).rate_hz
        screens, speed = tuple(rollout.screen for rollout in rollouts), RATE_HZ * self.stride(rate_hz) / rate_hz
        return Film(self.episode, screens, speed, _video(images))


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
    """One method's rollout: images, control steps done before each, and per step whether its inference was sent."""

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
