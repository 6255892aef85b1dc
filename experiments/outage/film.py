"""The film: the plain client and specact side by side, and below them when the link was down and who stood still."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import matplotlib as mpl
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from experiments.measure import to_digits
from experiments.outage.robots import FILM_S, OUTAGE_S, PERIOD_S, PULLED_S
from specact.lab.envs.pusht import ARENA_PX, GOAL_ANGLE_RAD, GOAL_XY_PX
from specact.lab.report.figures import GROUND, INK, MUTED, RULE, style_of

# From left to right, and what each is called.
FILMED = {"target": "plain client", "adahi": "specact"}
_ABOUT = {"target": "task: grey T onto green T", "adahi": "same server, same start"}
SIZE, PANEL, TOP, LEFT, PAD = (720, 600), 340, 124, 156, 13
ALARM, BLOCK, GOAL = "#c1272d", "#8b95a1", "#cfe8d2"
# The two bars of gym-pusht's T in its own frame [px]. Below, the agent's radius [px], how many times finer than shown a
# scene is drawn, how many control periods its trail has, and from how many on a stall is named.
_T = (np.array([[-60, 0], [60, 0], [60, 30], [-60, 30]]), np.array([[-15, 30], [15, 30], [15, 120], [-15, 120]]))
_RADIUS, _FINER, _TRAIL, _WORDS = 15.0, 2, 12, 24


@dataclass(frozen=True)
class Film:
    """One episode of each of :data:`FILMED` in real time, as a GIF; saved as a figure is."""

    episodes: Mapping[str, Mapping[str, Any]]

    def savefig(self, file: Path | BinaryIO, **options: Any) -> None:
        frames = [self.frame(step) for step in range(round(FILM_S / PERIOD_S))]
        # One palette for all: neither colours nor the background flicker.
        samples = [np.asarray(frames[number]) for number in (0, len(frames) // 2, -1)]
        palette = Image.fromarray(np.concatenate(samples)).quantize(64)
        first, *others = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
        times = [round(1e3 * PERIOD_S)] * len(others) + [1500]
        first.save(file, "GIF", save_all=True, append_images=others, duration=times, loop=0, optimize=True)

    def frame(self, step: int) -> Image.Image:
        image = Image.new("RGB", SIZE, GROUND)
        draw, now = ImageDraw.Draw(image), step * PERIOD_S
        down = PULLED_S <= now < PULLED_S + OUTAGE_S
        text, ground, ink = ("pulled", ALARM, GROUND) if down else ("up", "#eef1f4", INK)
        draw.rectangle((0, 0, SIZE[0], 44), ground)
        draw.text((PAD, 22), f"link to the server: {text}", ink, font(26, bold=True), "lm")
        draw.text((SIZE[0] - PAD, 22), f"{now:.1f} s", ink, font(26), "rm")
        for number, (method, name) in enumerate(FILMED.items()):
            self._panel(image, (PAD + number * (PANEL + 14), TOP), method, name, step)
        self._timeline(draw, step)
        return image

    def _panel(self, image: Image.Image, at: tuple[int, int], method: str, name: str, step: int) -> None:
        episode, colour, draw = self.episodes[method], style_of(method).colour, ImageDraw.Draw(image)
        still = episode["still"][step] == "1"
        stood = len(episode["still"][: step + 1]) - len(episode["still"][: step + 1].rstrip("1"))
        draw.text((at[0], at[1] - 56), name, colour, font(25, bold=True), "lm")
        alone = episode["whom"][step] in "05"
        doing = f"stands still: {stood * PERIOD_S:.1f} s" if still else "moves, by its draft" if alone else "moves"
        draw.text((at[0], at[1] - 22), doing, ALARM if still else INK, font(22, bold=still), "lm")
        image.paste(scene(episode["path"][max(0, step - _TRAIL) : step + 1], MUTED if still else colour), at)
        draw.text((at[0] + PAD, at[1] + 22), _ABOUT[method], MUTED, font(17), "lm")
        draw.rectangle((at[0], at[1], at[0] + PANEL - 1, at[1] + PANEL - 1), outline=ALARM if still else RULE, width=5)

    def _timeline(self, draw: ImageDraw.ImageDraw, step: int) -> None:
        top, high, gap = TOP + PANEL + 14, 28, 8
        x = [LEFT + (SIZE[0] - PAD - LEFT) * number * PERIOD_S / FILM_S for number in range(step + 2)]
        down = to_digits(PULLED_S <= period * PERIOD_S < PULLED_S + OUTAGE_S for period in range(step + 1))
        rows = [("link", down, "#a9c3d9")]
        rows += [(name, self.episodes[key]["still"][: step + 1], style_of(key).colour) for key, name in FILMED.items()]
        for number, (name, bad, colour) in enumerate(rows):
            y = top + number * (high + gap)
            draw.text((PAD, y + high / 2), name, colour if number else INK, font(20, bold=True), "lm")
            draw.rectangle((LEFT, y, SIZE[0] - PAD, y + high), "#eef1f4")
            for period, stands in enumerate(bad):
                fill = colour if stands == "0" else ALARM if not number else GROUND
                draw.rectangle((x[period], y, x[period + 1], y + high), fill)
            longest = max(re.finditer("1+", bad), key=lambda run: run.end() - run.start(), default=None)
            if longest and longest.end() - longest.start() >= _WORDS:
                middle = (x[longest.start()] + x[longest.end()]) / 2, y + high / 2
                draw.text(middle, "stands still" if number else "pulled", ALARM if number else GROUND, font(20), "mm")


def font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    """Matplotlib's own font, which is the same everywhere."""
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(str(Path(mpl.get_data_path(), "fonts", "ttf", name)), size)


def scene(path: Sequence[Sequence[float]], colour: str) -> Image.Image:
    """The last pose of a path seen from above, with the way that the agent has come."""
    scale = PANEL * _FINER / ARENA_PX
    image = Image.new("RGB", (PANEL * _FINER, PANEL * _FINER), "#fbfbfc")
    draw = ImageDraw.Draw(image)
    poses = [(GOAL_XY_PX, GOAL_ANGLE_RAD, GOAL), (np.array(path[-1][2:4]), path[-1][4], BLOCK)]
    for at, angle, fill in poses:
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        for part in _T:
            draw.polygon([tuple(point) for point in (scale * (part @ turn.T + at)).tolist()], fill)
    way = [(scale * x, scale * y) for x, y, *_ in path]
    draw.line(way, colour, round(4 * scale), "curve")
    (x, y), r = way[-1], _RADIUS * scale
    draw.ellipse((x - r, y - r, x + r, y + r), colour)
    return image.resize((PANEL, PANEL), Image.Resampling.LANCZOS)
