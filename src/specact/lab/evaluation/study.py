"""The paper's study as a list of runs: tables, sweeps over the rate, rejection over deviation, real time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specact.errors import ConfigError
from specact.families.codes.bundle import find_bundle, load_bundle
from specact.families.head import HEAD
from specact.gates.settings import GateChoices
from specact.lab.evaluation.evaluation import Evaluation
from specact.lab.rollout.methods import METHODS, load_method

# As in the paper (kitchen, ball, swarm), human demonstrations (PushT), a hand (relocate), and an arm (Meta-World).
PAIRS = ("ball", "swarm", "kitchen", "pusht", "relocate", "peg")

_TABLE = tuple(name for name, method in METHODS.items() if not method.decoding)
_AT_RATE = (
    "hybrid", "random", "random_learned", "head_random", "adahi", "uncertainty", "learned", "learned_action", "oracle",
)  # fmt: skip
_DISTILLED = (
    "draft", "head_draft", "hybrid", "random", "random_learned", "adahi", "learned", "learned_action", "oracle",
)  # fmt: skip
_CURVE = ("random", "random_learned", "adahi", "uncertainty", "learned", "oracle")
_UNLIMITED = ("random_learned", "head_random", "learned", "learned_action", "oracle")
_UNDERTRAINED = ("draft", "target", "hybrid", "random", "plain_random", "adahi", "uncertainty", "oracle")
_REAL = ("draft", "head_draft", "target", "target_on_device", "hybrid", "random", "adahi", "learned")


@dataclass(frozen=True)
class Size:
    """How much of one pair is run; 0 episodes leave a part out.

    Attributes:
        table: paired episodes per method in the table, at a rate of .6.
        rates, at_rate: the other rates with a table of their own, and their episodes.
        curve, on_curve: the rates between, and their episodes.
        rejection: episodes of ADAHI for rejection over deviation, where the table has too few.
        real: episodes per method over real sockets.
        undertrained: episodes per method with the under-trained draft.
        distilled: episodes per method with the distilled draft, at the first of the other rates.
        left_out: methods that are left out for what they take.
        calibration: episodes per round, where a threshold has to be found.
        demonstrations: held-out ones to measure errors along, at most.
    """

    table: int
    rates: tuple[float, ...]
    at_rate: int
    curve: tuple[float, ...]
    on_curve: int
    rejection: int
    real: int
    undertrained: int
    distilled: int = 0
    left_out: tuple[str, ...] = ()
    calibration: int = 40
    demonstrations: int = 100


_CHEAP = Size(500, (0.4, 0.2), 300, (0.3, 0.8), 150, rejection=1500, real=15, undertrained=300, distilled=300)
_SIZES = {
    "ball": _CHEAP,
    "swarm": replace(_CHEAP, table=300, curve=(), on_curve=0),
    "pusht": Size(
        200, (0.4, 0.2), 150, (), 0, rejection=500, real=5, undertrained=60, distilled=100, calibration=20
    ),
    # An episode has 450 inferences, so that a few are enough for a threshold, and each takes two seconds: what other
    # pairs show as well is left out, and the table's episodes are enough for rejection over deviation.
    "kitchen": Size(
        30, (0.4,), 20, (), 0, rejection=0, real=0, undertrained=0,
        left_out=("plain_random", "gated_target", "learned_action", "oracle_action"), calibration=3,
    ),
}  # fmt: skip
_OTHERS = Size(100, (0.4,), 100, (), 0, rejection=200, real=4, undertrained=50, distilled=60, calibration=20)
_QUICK = Size(10, (), 0, (), 0, rejection=20, real=1, undertrained=0, calibration=4, demonstrations=4)
# Ball shows every section of the page. Elsewhere what takes longest is left out: other drafts and other rates,
# kitchen over real sockets, and the demonstrations that an expert would first have to give.
_QUICK_SIZES = {
    "ball": replace(_QUICK, rates=(0.4,), at_rate=5, undertrained=5, distilled=5),
    "swarm": replace(_QUICK, demonstrations=0),
    "kitchen": replace(_QUICK, table=2, rejection=2, real=0, calibration=2, demonstrations=2),
    "peg": replace(_QUICK, demonstrations=0),
}


@dataclass(frozen=True)
class Chapter:
    """One run of the study: its folder below the study's, and what to evaluate."""

    folder: str
    what: Evaluation


def plan(pairs: Sequence[str], *, seed: int, quick: bool, data: Path | None) -> list[Chapter]:
    """All runs of the study, those that say most first.

    Every pair comes with its own draft, its under-trained one and its distilled one, as far as there are
    such bundles; learned gates and heads take part where they were trained. Rates that a bundle's limit on skips makes
    by itself are run without ADAHI, for which that limit is.

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

    def run(bundle: str, methods: Sequence[str], episodes: int, rate: float = 0.6, **settings: Any) -> Evaluation:
        headless = not (find_bundle(bundle) / HEAD).is_file()
        kept = tuple(
            name for name in methods if name not in size.left_out and not (headless and load_method(name).needs_head)
        )
        settings["calibration_episodes"] = size.calibration
        # Small enough that no process is left without work for long.
        settings["shard"] = max(1, min(20, episodes // 8))
        return Evaluation(bundle, None, kept, episodes, seed=seed, rate=rate, **settings)

    yield Chapter(f"{name}/table", run(pair, _TABLE, size.table, **_imitation(pair, data, size)))
    distilled, undertrained = (_sibling(f"{pair}{suffix}") for suffix in ("-distilled", "-undertrained"))
    lowest = GateChoices().settings("deviation", load_bundle(pair)).lowest_rate

    def at(rate: float) -> Chapter:
        if rate > lowest:
            return Chapter(f"{name}/rate-{rate:g}", run(pair, _AT_RATE, size.at_rate, rate))
        return Chapter(f"{name}/rate-{rate:g}-unlimited", run(pair, _UNLIMITED, size.at_rate, rate))

    for rate in size.rates[:1]:
        yield at(rate)
        if distilled and size.distilled:
            yield Chapter(f"{name}-distilled/rate-{rate:g}", run(distilled, _DISTILLED, size.distilled, rate))
        elif distilled and not quick:
            yield Chapter(f"{name}-distilled/table", run(distilled, ("draft", "head_draft"), size.table))
    if size.real:
        yield Chapter(f"{name}/real-time", run(pair, _REAL, size.real, realtime=True, deadline_ms=500.0))
    if size.rejection:
        yield Chapter(f"{name}/rejection", run(pair, ("adahi",), size.rejection))
    if undertrained and size.undertrained:
        yield Chapter(f"{name}-undertrained/table", run(undertrained, _UNDERTRAINED, size.undertrained))
    for rate in size.rates[1:]:
        yield at(rate)
    for rate in filter(lambda rate: rate > lowest, size.curve):
        yield Chapter(f"{name}/rate-{rate:g}", run(pair, _CURVE, size.on_curve, rate))


def _size(pair: str, quick: bool) -> Size:
    if quick:
        return _QUICK_SIZES.get(pair, _QUICK)
    return _SIZES.get(pair, _OTHERS)


def _sibling(name: str) -> str | None:
    try:
        find_bundle(name)
    except ConfigError:
        return None
    return name


def _imitation(pair: str, data: Path | None, size: Size) -> dict[str, Any]:
    """Settings that measure the error along demonstrations, where they can be had."""
    files = load_bundle(pair).manifest["recipe"]["data"]
    if size.demonstrations == 0 or (files and data is None):
        return {}
    return {"mse": True, "data": str(data) if files else None, "demonstrations": size.demonstrations}
