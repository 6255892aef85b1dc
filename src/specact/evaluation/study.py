"""The paper's study as a list of runs: tables, sweeps over the rate, rejection over deviation, real time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specact.errors import ConfigError
from specact.evaluation.evaluation import Evaluation
from specact.evaluation.methods import METHODS
from specact.policies.bundle import find_bundle, load_bundle
from specact.policies.head import HEAD

# As in the paper (kitchen, ball, swarm), human demonstrations (PushT), a hand (relocate), and an arm (Meta-World).
PAIRS = ("ball", "swarm", "kitchen", "pusht", "relocate", "peg")

_LEARNED = ("learned", "learned_action")
_TABLE = tuple(METHODS)
_UNDERTRAINED = ("draft", "target", "hybrid", "random", "adahi", "uncertainty", "oracle")
_SWEEP = ("hybrid", "random", "adahi", "uncertainty", *_LEARNED, "oracle")
_REAL = ("draft", "target", "hybrid", "random", "adahi", "learned")


@dataclass(frozen=True)
class Size:
    """How much of one pair is run.

    Attributes:
        table: paired episodes per method in tables.
        sweep, rates: episodes per method and rate beside .6, and those rates.
        rejection: episodes of ADAHI for rejection over deviation.
        real: episodes per method over real sockets.
        calibration: episodes per round, where a threshold has to be found.
    """

    table: int
    sweep: int
    rates: tuple[float, ...]
    rejection: int
    real: int
    calibration: int = 40


_TENTHS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.8, 0.9)
_SIZES = {
    "ball": Size(500, 500, _TENTHS, 2500, 30),
    "swarm": Size(500, 500, _TENTHS, 2500, 30),
    "pusht": Size(200, 200, (0.2, 0.4, 0.8), 900, 10),
    "kitchen": Size(100, 100, (0.2, 0.4), 130, 4, calibration=20),
}
_OTHERS = Size(200, 200, (0.2, 0.4), 300, 6)
_QUICK = Size(10, 5, (0.4,), 20, 1, calibration=4)
_QUICK_LONG = Size(2, 2, (0.4,), 2, 1, calibration=2)


@dataclass(frozen=True)
class Chapter:
    """One run of the study: its folder below the study's, and what to evaluate."""

    folder: str
    what: Evaluation


def plan(pairs: Sequence[str], *, seed: int, quick: bool, data: Path | None) -> list[Chapter]:
    """All runs of the study, those that say most first.

    Every pair comes with its properly trained draft, its under-trained one and its distilled one, as far as there are
    such bundles; learned gates take part where they were trained.

    Args:
        pairs: names or paths of bundles.
        seed: of everything random.
        quick: a few episodes of each, to see the whole page in minutes.
        data: folder with the demonstrations, for the errors along them; without it, only for pairs whose
            demonstrations a scripted expert makes.

    Raises:
        ConfigError: for a bundle that does not exist.
    """
    by_pair = [list(_chapters(pair, seed, quick, data)) for pair in pairs]
    # First everybody's table, then everybody's next chapter, so that a stopped study is broad before it is deep.
    longest = max(map(len, by_pair))
    return [chapters[i] for i in range(longest) for chapters in by_pair if i < len(chapters)]


def _chapters(pair: str, seed: int, quick: bool, data: Path | None) -> Iterator[Chapter]:
    size, name = _size(pair, quick), Path(pair).name

    def run(bundle: str, methods: Sequence[str], episodes: int, rate: float = 0.6) -> Evaluation:
        path = find_bundle(bundle)
        learned = (path / HEAD).is_file()
        kept = tuple(name for name in methods if learned or name not in _LEARNED)
        return Evaluation(bundle, None, kept, episodes, seed=seed, rate=rate, calibration_episodes=size.calibration)

    table = run(pair, _TABLE, size.table)
    yield Chapter(f"{name}/table", dataclasses.replace(table, **_imitation(pair, data)))
    distilled, undertrained = (_sibling(f"{pair}{suffix}") for suffix in ("-distilled", "-undertrained"))
    if distilled:
        yield Chapter(f"{name}-distilled/table", run(distilled, _TABLE, size.table))
    real = run(pair, _REAL, size.real)
    yield Chapter(f"{name}/real-time", dataclasses.replace(real, realtime=True, deadline_ms=500.0))
    yield Chapter(f"{name}/rejection", run(pair, ("adahi",), size.rejection))
    for rate in sorted(size.rates, key=lambda rate: abs(rate - 0.4)):
        yield Chapter(f"{name}/rate-{rate:g}", run(pair, _SWEEP, size.sweep, rate))
        if distilled and rate in (0.2, 0.4):
            yield Chapter(f"{name}-distilled/rate-{rate:g}", run(distilled, _SWEEP, size.sweep, rate))
    if undertrained:
        yield Chapter(f"{name}-undertrained/table", run(undertrained, _UNDERTRAINED, size.table))


def _size(pair: str, quick: bool) -> Size:
    if quick:
        return _QUICK_LONG if pair == "kitchen" else _QUICK
    return _SIZES.get(pair, _OTHERS)


def _sibling(name: str) -> str | None:
    try:
        find_bundle(name)
    except ConfigError:
        return None
    return name


def _imitation(pair: str, data: Path | None) -> dict[str, Any]:
    """Settings that measure the error along demonstrations, where they can be had."""
    files = load_bundle(pair).manifest["recipe"]["data"]
    if files and data is None:
        return {}
    return {"mse": True, "data": str(data) if files else None}
