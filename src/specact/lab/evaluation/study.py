"""ADAHI's study as a list of runs: tables, sweeps over the rate, rejection over deviation, real time."""

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

# The paper's (kitchen, ball, swarm), human demonstrations (PushT), a hand (relocate), and an arm (Meta-World).
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
    """Episodes of each part of one pair's study; 0 leaves a part out.

    Attributes:
        table: paired episodes per method in the table, at a rate of .6.
        rates, at_rate: the other rates with a table of their own, and their episodes.
        curve, on_curve: the rates between, and their episodes.
        rejection: episodes of ADAHI for rejection over deviation, where the table has too few.
        real: episodes per method over real sockets.
        undertrained: episodes per method with the under-trained draft.
        distilled: episodes per method with the distilled draft, at the first of the other rates.
        left_out: methods that are left out because they take too long.
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
    # An episode has 450 inferences, so a few are enough for a threshold, and takes two seconds each: parts that other
    # pairs show as well are left out, and the table's episodes are enough for rejection over deviation.
    "kitchen": Size(
        30, (0.4,), 20, (), 0, rejection=0, real=0, undertrained=0,
        left_out=("plain_random", "gated_target", "learned_action", "oracle_action"), calibration=3,
    ),
}  # fmt: skip
_OTHERS = Size(100, (0.4,), 100, (), 0, rejection=200, real=4, undertrained=50, distilled=60, calibration=20)
_QUICK = Size(10, (), 0, (), 0, rejection=20, real=1, undertrained=0, calibration=4, demonstrations=4)
# Ball fills every section of the page. The others leave out what takes longest: other drafts and other rates,
# kitchen over real sockets, and demonstrations that an expert would first have to generate.
_QUICK_SIZES = {
    "ball": replace(_QUICK, rates=(0.4,), at_rate=5, undertrained=5, distilled=5),
    "swarm": replace(_QUICK, demonstrations=0),
    "kitchen": replace(_QUICK, table=2, rejection=2, real=0, calibration=2, demonstrations=2),
    "peg": replace(_QUICK, demonstrations=0),
}


@dataclass(frozen=True)
class StudyRun:
    """One run of the study: its folder below the study's, and its evaluation."""

    folder: str
    evaluation: Evaluation


def plan(pairs: Sequence[str], *, seed: int, quick: bool, data: Path | None) -> list[StudyRun]:
    """All runs of the study, the most informative ones first.

    Every pair is run with its own draft, and with its under-trained and its distilled one where such bundles exist;
    learned gates and heads where they were trained. Rates below the one that the limit on skips forces are run
    without ADAHI, the only gate with that limit.

    Args:
        pairs: names or paths of bundles.
        seed: random seed.
        quick: a few episodes of each, for the whole page in minutes.
        data: folder with the demonstrations, for the errors on them; without it, only for pairs whose demonstrations
            come from a scripted expert.

    Raises:
        ConfigError: for a bundle that does not exist.
    """
    by_pair = [list(_runs(pair, seed, quick, data)) for pair in pairs]
    # Interleaved: first the table of every pair, then the next run of every pair, so that a stopped study covers all.
    most = max(map(len, by_pair))
    return [runs[i] for i in range(most) for runs in by_pair if i < len(runs)]


def _runs(pair: str, seed: int, quick: bool, data: Path | None) -> Iterator[StudyRun]:
    size, name = _size(pair, quick), Path(pair).name

    def evaluation(
        bundle: str, methods: Sequence[str], episodes: int, rate: float = 0.6, **settings: Any
    ) -> Evaluation:
        headless = not (find_bundle(bundle) / HEAD).is_file()
        kept = tuple(
            name for name in methods if name not in size.left_out and not (headless and load_method(name).needs_head)
        )
        settings["calibration_episodes"] = size.calibration
        # Small shards keep all workers busy.
        settings["shard"] = max(1, min(20, episodes // 8))
        return Evaluation(bundle, None, kept, episodes, seed=seed, rate=rate, **settings)

    yield StudyRun(f"{name}/table", evaluation(pair, _TABLE, size.table, **_imitation(pair, data, size)))
    distilled, undertrained = (_sibling(f"{pair}{suffix}") for suffix in ("-distilled", "-undertrained"))
    lowest = GateChoices().settings("deviation", load_bundle(pair)).lowest_rate

    def at(rate: float) -> StudyRun:
        if rate > lowest:
            return StudyRun(f"{name}/rate-{rate:g}", evaluation(pair, _AT_RATE, size.at_rate, rate))
        return StudyRun(f"{name}/rate-{rate:g}-unlimited", evaluation(pair, _UNLIMITED, size.at_rate, rate))

    for rate in size.rates[:1]:
        yield at(rate)
        if distilled and size.distilled:
            yield StudyRun(f"{name}-distilled/rate-{rate:g}", evaluation(distilled, _DISTILLED, size.distilled, rate))
        elif distilled and not quick:
            yield StudyRun(f"{name}-distilled/table", evaluation(distilled, ("draft", "head_draft"), size.table))
    if size.real:
        yield StudyRun(f"{name}/real-time", evaluation(pair, _REAL, size.real, realtime=True, deadline_ms=500.0))
    if size.rejection:
        yield StudyRun(f"{name}/rejection", evaluation(pair, ("adahi",), size.rejection))
    if undertrained and size.undertrained:
        yield StudyRun(f"{name}-undertrained/table", evaluation(undertrained, _UNDERTRAINED, size.undertrained))
    for rate in size.rates[1:]:
        yield at(rate)
    for rate in filter(lambda rate: rate > lowest, size.curve):
        yield StudyRun(f"{name}/rate-{rate:g}", evaluation(pair, _CURVE, size.on_curve, rate))


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
    """Settings that measure the error on demonstrations, where these are available."""
    files = load_bundle(pair).manifest["recipe"]["data"]
    if size.demonstrations == 0 or (files and data is None):
        return {}
    return {"mse": True, "data": str(data) if files else None, "demonstrations": size.demonstrations}
