"""What a film shows, frame by frame, and that it is made once."""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import ImageColor

from specact.errors import ConfigError
from specact.lab.evaluation.runs import find_runs
from specact.lab.report import film as films
from specact.lab.report.film import FILMED, Film, load_film

Frame = NDArray[np.uint8]


@pytest.fixture
def folder(filmed: dict[str, Any], tmp_path: Path) -> Path:
    """A copy of the run folder, its film included."""
    return Path(shutil.copytree(Path(filmed["page"]).parent / "table", tmp_path / "run"))


def load(folder: Path, methods: Sequence[str] = FILMED) -> Film:
    (kept,) = (folder / "films").glob("*.json")
    return load_film(find_runs([folder])[0][0], int(kept.stem), methods)


def bright_share(pixels: Frame) -> float:
    """Share of pixels that look more like a step that was sent than like one that was not."""
    sent, drafted = (
        np.abs(pixels.astype(int) - np.array(ImageColor.getrgb(colour))).sum(axis=-1)
        for colour in (films.SENT, films.OWN)
    )
    return float((sent < drafted).mean())


def left_of(place: int) -> int:
    return films.PAD_PX + place * (films.FRAME_PX + films.PAD_PX)


def frame_is_bright(frame: Frame, place: int) -> bool:
    """The lower edge of a picture's frame."""
    y = films.HEIGHT_PX - films.PAD_PX - films.BORDER_PX // 2
    return bright_share(frame[y, left_of(place) + 8 : left_of(place) + films.FRAME_PX - 8]) > 0.5


def test_every_frame_says_what_was_sent(folder: Path) -> None:
    film = load(folder)
    assert [screen.method for screen in film.screens] == list(FILMED)
    with av.open(io.BytesIO(film.video), "r") as video:
        frames = [np.asarray(frame.to_ndarray(format="rgb24"), np.uint8) for frame in video.decode(video=0)]
    longest = max(screen.seconds for screen in film.screens)
    moving = len(frames) - round(films.LAST_S * films.RATE_HZ)
    assert moving == round(longest * films.RATE_HZ / film.speed) + 1, "from before the first step to after the last"
    ends = [round(screen.seconds * films.RATE_HZ / film.speed) for screen in film.screens]
    draft, adahi, target = [[frame_is_bright(frame, place) for frame in frames] for place in range(3)]
    assert not any(draft)
    assert all(target[: ends[2]]) and not any(target[ends[2] + 1 : moving])
    assert any(adahi) and not all(adahi[: ends[1]])
    y = films.PAD_PX + films.TEXT_PX + films.BAR_PX // 2
    for place, screen in enumerate(film.screens):
        bar = frames[0][y, left_of(place) : left_of(place) + round(films.FRAME_PX * screen.seconds / longest)]
        assert bright_share(bar) == pytest.approx(screen.sent, abs=0.1)


def test_a_film_is_made_once_and_again_for_other_methods(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "nothing")
    kept = load(folder)  # nothing is drawn
    with pytest.raises(ConfigError, match="nothing"):
        load(folder, ("draft",))
    monkeypatch.undo()
    alone = load(folder, ("draft",))
    assert alone.screens == kept.screens[:1] and alone.video != kept.video
    assert load(folder, ("draft",)) == alone
