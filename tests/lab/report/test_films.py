"""What a film shows, frame by frame, and that it is made once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import ImageColor

from specact.cli import demo
from specact.errors import ConfigError
from specact.lab.evaluation import film as films
from specact.lab.evaluation.film import Film, load_film
from specact.lab.report.films import FILMED
from specact.lab.report.report import Report

Frame = NDArray[np.uint8]


@pytest.fixture
def folder(filmed: Report, tmp_path: Path) -> Path:
    """A copy of the run folder, its film included."""
    return Path(shutil.copytree(filmed.page.parent / "table", tmp_path / "run"))


def load(folder: Path, methods: Sequence[str] = FILMED) -> Film:
    (kept,) = (folder / "films").glob("*.json")
    manifest = json.loads((folder / "manifest.json").read_text())
    return load_film(folder, manifest, int(kept.stem), methods, longest=160)


def is_bright(pixels: Frame) -> NDArray[np.bool_]:
    """Whether pixels look more like a step that was sent than like one that was not."""
    sent, own = (
        np.abs(pixels - np.array(ImageColor.getrgb(colour))).sum(axis=-1) for colour in (films.SENT, films.OWN)
    )
    return np.asarray(sent < own)


def left_of(place: int) -> int:
    return films.PAD_PX + place * (films.FRAME_PX + films.PAD_PX)


def frame_is_bright(frame: Frame, place: int) -> bool:
    """The lower edge of a picture's frame."""
    y = films.HEIGHT_PX - films.PAD_PX - films.BORDER_PX // 2
    edge = frame[y, left_of(place) + 8 : left_of(place) + films.FRAME_PX - 8].astype(int)
    return bool(is_bright(edge).mean() > 0.5)


def bright_share_of_the_bar(frame: Frame, place: int, share_of_the_longest: float) -> float:
    y = films.PAD_PX + films.TEXT_PX + films.BAR_PX // 2
    bar = frame[y, left_of(place) : left_of(place) + round(films.FRAME_PX * share_of_the_longest)].astype(int)
    return float(is_bright(bar).mean())


def test_every_frame_says_what_was_sent(folder: Path) -> None:
    film = load(folder)
    assert [screen.method for screen in film.screens] == list(FILMED)
    path = next((folder / "films").glob("*.webm"))
    with av.open(path) as video:
        assert video.streams.video[0].codec_context.name in ("vp9", "libvpx-vp9")
        frames: list[Frame] = [
            np.asarray(frame.to_ndarray(format="rgb24"), np.uint8) for frame in video.decode(video=0)
        ]
    longest = max(screen.seconds for screen in film.screens)
    moving = len(frames) - round(films.LAST_S * films.RATE_HZ)
    assert moving == round(longest * films.RATE_HZ / film.speed) + 1, "from before the first step to after the last"
    ends = [round(screen.seconds * films.RATE_HZ / film.speed) for screen in film.screens]
    shown = [[frame_is_bright(frame, place) for frame in frames] for place in range(3)]
    draft, adahi, target = shown
    assert not any(draft)
    assert all(target[: ends[2]]) and not any(target[ends[2] + 1 : moving])
    assert any(adahi) and not all(adahi[: ends[1]])
    for place, screen in enumerate(film.screens):
        found = bright_share_of_the_bar(frames[0], place, screen.seconds / longest)
        assert found == pytest.approx(screen.sent, abs=0.1)


def test_a_film_is_made_once_and_again_for_other_methods(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = load(folder)
    (path,) = (folder / "films").glob("*.webm")
    assert kept.video == path.read_bytes()
    monkeypatch.setenv("MUJOCO_GL", "nothing")
    assert load(folder) == kept, "nothing is drawn"
    monkeypatch.undo()
    alone = load(folder, ("draft",))
    assert alone.screens == kept.screens[:1]
    assert path.read_bytes() == alone.video != kept.video
    path.unlink()
    monkeypatch.setenv("MUJOCO_GL", "nothing")
    with pytest.raises(ConfigError, match="cannot draw the environment"):
        load(folder, ("draft",))


def test_the_demo_films_draft_adahi_and_hybrid(folder: Path) -> None:
    shown = demo._film(folder)
    assert shown is not None
    path, why = shown
    assert "episode" in why
    assert path == folder / "film.webm"
    said = [json.loads(file.read_text()) for file in (folder / "films").glob("*.json")]
    methods = [[screen["method"] for screen in film["screens"]] for film in said]
    assert ["draft", "adahi", "hybrid"] in methods
    with av.open(path) as video:
        assert next(video.decode(video=0)).width == films.WIDTH_PX
