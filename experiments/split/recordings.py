"""Recorded links of the study of split targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specact.errors import ConfigError
from specact.files import write_whole
from specact.links.link import load_link
from specact.links.model import Link, round_trip
from specact.rng import Role, stream
from specact.systems.roboecc import StagedFolder, measured
from specact.types import Floats

# Time between two inferences: four actions at 20 Hz.
PERIOD_S = 0.2


@dataclass(frozen=True)
class StudyLink:
    """A link of the study.

    Attributes:
        name: in tables.
        link: see :func:`~specact.links.link.load_link`, without its start.
        seconds: length of the recording, which is then repeated.
    """

    name: str
    link: str
    seconds: float

    @property
    def trained_s(self) -> float:
        """Length of the part that forecasts are trained on; methods are measured on the rest."""
        return 0.6 * self.seconds

    def at(self, start_s: float) -> str:
        """The link from a moment of the recording on."""
        base, *more = self.link.split("+")
        return "+".join([base, f"start={start_s:g}", *more])


def study_links(data: Path, out: Path) -> list[StudyLink]:
    """The recorded links.

    Args:
        data: folder with ``mahimahi/`` and ``telerobot_rtt/``.
        out: folder for derived recordings: the LTE recording with ten packets for each original one.

    Raises:
        ConfigError: if a recording is missing.
    """
    lte = [data / "mahimahi" / f"TMobile-LTE-short.{way}" for way in ("up", "down")]
    car = [data / "mahimahi" / f"ATT-LTE-driving.{way}" for way in ("up", "down")]
    radio = data / "telerobot_rtt" / "tyrell_roundtrip035.csv"
    missing = [file for file in (*lte, *car, radio) if not file.is_file()]
    if missing:
        raise ConfigError(f"there is no {missing[0]}; --data is the folder with mahimahi/ and telerobot_rtt/")
    fast = [out / f"fast.{file.suffix[1:]}" for file in lte]
    for file, slow in zip(fast, lte, strict=True):
        write_whole(file, b"".join(10 * (line + b"\n") for line in slow.read_bytes().split()))

    def pair(files: Sequence[Path]) -> str:
        return "mahimahi:" + ",".join(map(str, files))

    return [
        StudyLink("5g-like", f"{pair(fast)}+delay=20", _duration_s(lte)),
        StudyLink("lte", f"{pair(lte)}+delay=40", _duration_s(lte)),
        StudyLink("lte-driving", f"{pair(car)}+delay=40", _duration_s(car)),
        StudyLink("wifi", f"rtt:{radio}+rate=50", sum(map(float, radio.read_bytes().split())) / 1e3),
    ]


def _duration_s(deliveries: Sequence[Path]) -> float:
    return min(float(file.read_bytes().split()[-1]) for file in deliveries) / 1e3


def bandwidths_of(link: StudyLink, folder: StagedFolder) -> tuple[np.ndarray, np.ndarray]:
    """The bandwidth that a device measures at every inference: in the training part, and in the rest."""
    up, down = folder.spec.observation.nbytes, folder.spec.reply_bytes(folder.spec.stages, "float16")
    counts = int(link.trained_s / PERIOD_S), int((link.seconds - link.trained_s) / PERIOD_S)
    first, second = (
        series(load_link(link.link), up, down, PERIOD_S, count, start_s=start)
        for count, start in zip(counts, (0.0, link.trained_s), strict=True)
    )
    return first, second


def series(
    link: Link, up_bytes: int, down_bytes: int, period_s: float, count: int, *, start_s: float = 0.0, seed: int = 0
) -> Floats:
    """Simulates measurements of a device with one exchange per period, ``[count]`` [bytes/s].

    Exchanges do not queue: each has the link to itself.

    Args:
        link: the link.
        up_bytes, down_bytes: sizes of request and reply.
        period_s: time between two exchanges [s].
        count: number of exchanges.
        start_s: time of the first one on the link [s].
        seed: of the link's random draws.
    """
    rng = stream(seed, Role.LINK)
    moments = (start_s + period_s * np.arange(count)).tolist()
    taken = [round_trip(link, up_bytes, down_bytes, at, rng) for at in moments]
    return np.array([measured(up_bytes + down_bytes, seconds) for seconds in taken])
