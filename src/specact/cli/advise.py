"""``specact advise`` recommends what a device should run: the target, a draft, a gate, or only queries to a server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from specact.cli.options import Flat
from specact.cli.output import print_json, remarks, results
from specact.errors import ConfigError, SpecactError
from specact.ranges import NOT_NEGATIVE, POSITIVE, check_ranges

if TYPE_CHECKING:
    from specact.families.load import AnyPair
    from specact.lab.evaluation.budget import Way
    from specact.lab.report.runs import Run

# Methods that have to be evaluated for a recommendation, if the pair can run them.
_METHODS = ("draft", "head_draft", "target", "hybrid", "random", "adahi", "uncertainty", "random_learned", "learned")
# Likewise, of a token policy or a flow policy with a draft, with its own drafters, and alone.
_DECODED = ("ar", "full", "full_2", "full_1", "specvla", "last", "flash", "block")
_ON_DEVICE = "target_on_device"
_GATES_OF_TOKENS = {"periodic", "verify_skip", "similarity"}


@dataclass(frozen=True)
class AdviseOptions:
    """Pair, budget and measurements.

    Attributes:
        bundle: path or name of a bundle, or MODULE:NAME for a pair of your own.
        budget_ms: time of one core that is available for an inference on the device [ms].
        link: to the server; see specact proxy --help.
        runs: run folders of specact eval, or folders that contain some at any depth.
        kappa: how many times slower the device is than this machine; 1 if this is the device.
        study: a table of other policies to compare with, such as benchmarks/results/budget.json.
        draft: of a pair of chunk policies, where the pair does not name it: MODULE:NAME or a .toml file.
        target: likewise.
        json: print everything as JSON.
    """

    bundle: str
    budget_ms: float
    link: str = "wifi-paper"
    runs: tuple[Path, ...] = ()
    kappa: float = 1.0
    study: Path | None = None
    draft: str | None = None
    target: str | None = None
    json: bool = False

    def __post_init__(self) -> None:
        check_ranges(self, {"budget_ms": NOT_NEGATIVE, "kappa": POSITIVE})


def advise(options: Flat[AdviseOptions]) -> None:
    """Recommend what to run on a device with a budget for inference, from your own evaluations of a pair.

    Inferences are timed on this machine. Success and transmission rates are those of the run folders. Missing
    measurements are listed, with the commands that make them.
    """
    from specact.families.load import load_pair
    from specact.lab.evaluation.budget import measure_parts

    study = None if options.study is None else _read_study(options.study)
    pair = load_pair(options.bundle, draft=options.draft, target=options.target)
    round_trip_ms = _round_trip_ms(pair, options.link)
    runs, left_out = _runs_of(pair, options.runs)
    answer = _answer(options, pair, runs, study, measure_parts(pair), round_trip_ms, _decoded_parts(pair, runs))
    if options.json:
        print_json(answer)
        return
    for folder, reason in left_out.items():
        remarks.print(f"left out {folder}: {reason}", style="yellow", highlight=False, soft_wrap=True)
    _print(answer)


def _decoded_parts(pair: AnyPair, runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """The parts of the pair as the methods of the runs decode it, timed here, by the name of the decoding."""
    from specact.lab.evaluation.budget import measure_parts
    from specact.lab.rollout.families import decoded_by
    from specact.lab.rollout.methods import METHODS

    evaluated = [METHODS[name] for run in runs for name in METHODS.keys() & run.methods.keys()]
    by_decoding = {method.decoding: method for method in evaluated if method.decoding}
    return {
        decoding: measure_parts(decoded_by(method, pair), 50, sorted({method.gate} & _GATES_OF_TOKENS))
        for decoding, method in sorted(by_decoding.items())
    }


def _answer(
    options: AdviseOptions,
    pair: AnyPair,
    runs: Sequence[Run],
    study: Mapping[str, Any] | None,
    here_ms: Mapping[str, float],
    round_trip_ms: float,
    decoded_ms: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
) -> dict[str, Any]:
    from specact.lab.evaluation.budget import choose, describe, without_server

    device_ms = {
        decoding: {part: options.kappa * ms for part, ms in parts.items()}
        for decoding, parts in {"": here_ms, **decoded_ms}.items()
    }
    ways, target_ms = _ways(runs, device_ms), device_ms[""].get("target")
    fits = target_ms is not None and target_ms <= options.budget_ms
    found, free = choose(ways, options.budget_ms), without_server(ways)
    if fits and found is not None and not found.way.on_device and any(way.on_device for way in ways):
        advice = f"the target fits on the device, but more succeeds with {describe(found)}"
    elif fits:
        advice = "the target fits on the device: run it there, without a draft, a gate or a server"
    elif found is not None:
        advice = describe(found)
    elif ways:
        advice = "nothing that was evaluated fits; the target on a server takes the device only the time of asking"
    else:
        advice = "which draft or gate is enough cannot be said before they are evaluated"
    verified_ms = {
        decoding: round_trip_ms + parts.get("target", 0.0) for decoding, parts in {"": here_ms, **decoded_ms}.items()
    }
    answer = {
        "bundle": pair.name,
        "budget_ms": options.budget_ms,
        "control_step_ms": 1e3 / pair.rate_hz,
        "measured_here_ms": dict(here_ms),
        "kappa": options.kappa,
        "link": options.link,
        "modelled_round_trip_ms": round_trip_ms,
        "verified_ms": verified_ms[""],
        "runs": [str(run.folder) for run in runs],
        "ways": [_row(way, ways, verified_ms) for way in ways],
        "target_fits": fits if target_ms is not None else None,
        "advice": advice,
        "no_server_from_ms": min((ms for ms in (target_ms, free) if ms is not None), default=None),
        "missing": list(_missing(options, pair, ways, here_ms, verified_ms[""])),
    }
    return answer if study is None else answer | {"study": _of_study(study, pair, options.budget_ms, target_ms)}


def _row(way: Way, ways: Sequence[Way], verified_ms: Mapping[str, float]) -> dict[str, Any]:
    """A way as plain values, with its difference from the random gate with forced steps at the same rate.

    Args:
        way: the way.
        ways: all of them.
        verified_ms: time of a verified inference by decoding, the round trip included.
    """
    from specact.lab.evaluation.budget import behind
    from specact.lab.rollout.methods import METHODS

    chance = {"adahi": "random"}.get(way.method, "random_learned" if METHODS[way.method].gate != "random" else "")
    rival = next((one for one in ways if one.method == chance and one.asked == way.asked), None)
    gained = None if rival is None else behind(rival, way)
    return {
        "method": way.method,
        "on_device": way.on_device,
        "asked": way.asked,
        "rate": way.rate,
        "device_ms": way.cost,
        "mean_ms": way.cost + way.rate * verified_ms[METHODS[way.method].decoding],
        "episodes": way.episodes,
        "success": vars(way.success),
        "over_chance": None if gained is None else vars(gained),
    }


def _runs_of(pair: AnyPair, folders: Sequence[Path]) -> tuple[list[Run], dict[Path, str]]:
    """The runs of this pair that measure success, and the reasons why the others are left out."""
    from specact.lab.report.runs import find_runs

    if not folders:
        return [], {}
    runs, skipped = find_runs(folders)
    left_out = {one.folder: one.reason for one in skipped}
    for run in runs:
        if run.evaluation["fingerprint"] != pair.fingerprint:
            left_out[run.folder] = f"it is of other weights ({run.evaluation['bundle']})"
        elif run.summary["realtime"] or run.evaluation["offset"] != "target":
            left_out[run.folder] = "its success depends on a deadline or on another offset"
        elif pair.env and run.evaluation["env"] != pair.env:
            left_out[run.folder] = f"it is of another environment ({run.evaluation['env']})"
        elif run.evaluation.get("decoding"):
            left_out[run.folder] = f"its draft and gates work with the decoding {run.evaluation['decoding']}"
    return [run for run in runs if run.folder not in left_out], left_out


def _ways(runs: Sequence[Run], device_ms: Mapping[str, Mapping[str, float]]) -> list[Way]:
    """The methods that were evaluated and can be timed, with the episodes of all their runs.

    The times of the parts are given by decoding.

    The accounted times of a run are not used, because they may have been set by options.
    """
    from specact.lab.evaluation.budget import Way, device_cost
    from specact.lab.rollout.methods import METHODS

    won: dict[tuple[float, str, bool], dict[str, bool]] = {}
    rates: dict[tuple[float, str, bool], list[tuple[float, int]]] = {}
    for run in runs:
        for evaluated in METHODS.keys() & run.methods.keys():
            outcomes, seed = run.outcomes(evaluated), run.evaluation["seed"]
            episodes = zip(outcomes["episode"].tolist(), outcomes["success"].tolist(), strict=True)
            successes = {f"{seed}/{number}": success for number, success in episodes}
            for method, on_device in _where(evaluated):
                asked = 0.0 if on_device else {"never": 0.0, "always": 1.0}.get(METHODS[method].gate)
                rate = run.methods[evaluated]["transmission_rate"] if asked is None else asked
                key = run.summary["rate"] if asked is None else asked, method, on_device
                known = won.setdefault(key, {})
                if differing := [name for name, success in successes.items() if known.get(name, success) != success]:
                    raise ConfigError(
                        f"episode {differing[0]} (seed/number) of {evaluated} in {run.folder} ended otherwise in "
                        "another of these runs; name only one of them with --runs"
                    )
                known.update(successes)
                rates.setdefault(key, []).append((rate, len(successes)))
    ways = []
    for key, successes in sorted(won.items()):
        asked, method, on_device = key
        mean = sum(rate * count for rate, count in rates[key]) / sum(count for _, count in rates[key])
        try:
            cost = device_cost(method, device_ms[METHODS[method].decoding], mean, on_device=on_device)
        except KeyError:
            continue  # an oracle, or a method whose head, target or decoding is missing
        decoded_on_device = on_device and method != _ON_DEVICE
        ways.append(Way("", method, asked, mean, cost, {0: successes}, decoded_on_device))
    return ways


def _where(method: str) -> list[tuple[str, bool]]:
    """The methods that an evaluated one stands for, and whether the target is on the device.

    The target succeeds as often wherever it runs.
    """
    from specact.lab.evaluation.budget import runs_alone

    if method in ("target", _ON_DEVICE):
        return [("target", False), (_ON_DEVICE, True)]
    return [(method, False), (method, True)] if runs_alone(method) else [(method, False)]


def _round_trip_ms(pair: AnyPair, name: str) -> float:
    """Mean round trip of the link model with the arrays of a request and its reply [ms]."""
    import numpy as np

    from specact.links.link import load_link, round_trip
    from specact.wire.sizes import array_bytes

    link, (up, down), rng = load_link(name), array_bytes(pair.codec.dialect), np.random.default_rng(0)
    return float(1e3 * np.mean([round_trip(link, up, down, at, rng) for at in np.linspace(0.0, 60.0, 300).tolist()]))


def _missing(
    options: AdviseOptions, pair: AnyPair, ways: Sequence[Way], here_ms: Mapping[str, float], verified_ms: float
) -> Iterator[str]:
    """Missing measurements, each with the command that makes it."""
    from specact.families.codes.bundle import Bundle
    from specact.families.head import has_fitting_head
    from specact.families.target_pair import TargetPair
    from specact.lab.evaluation.budget import ENOUGH
    from specact.lab.rollout.families import depends_on_content
    from specact.lab.rollout.methods import METHODS
    from specact.pair import Named

    of_codes, has_head = isinstance(pair, Bundle), has_fitting_head(pair)
    source = f"{options.bundle}{Named.of(pair).words}"
    if pair.path is not None and not has_head:
        yield f"a learned gate: specact calibrate {source} --gate learned, then evaluate it"
    if "target" not in here_ms:
        yield "the time of the target, which this bundle was exported without: give the complete one"
    known = {way.method for way in ways}
    possible = [
        name
        for name in _METHODS
        if (of_codes or not (METHODS[name].needs_codes or METHODS[name].proposes == "head"))
        and (METHODS[name].verifier == "speculative" or not depends_on_content(pair))
        and (has_head or not METHODS[name].needs_head)
    ]
    if isinstance(pair, TargetPair):
        # Without a draft policy nothing acts where a gate does not ask.
        possible = [*filter(partial(_can_decode, pair), _DECODED), *(possible if pair.draft is not None else [])]
    wanted = [name for name in possible if name not in known]
    if wanted:
        yield (
            f"success of {', '.join(wanted)}: specact eval {source} --methods {','.join(wanted)} "
            f"--rate 0.4 --out runs/{pair.name}-advice, then --runs runs/{pair.name}-advice"
        )
    most = max((way.episodes for way in ways), default=0)
    if few := sorted({way.method for way in ways if way.episodes < ENOUGH * most}):
        yield f"enough episodes of {', '.join(few)}, which have less than half of the {most} of others and are left out"
    if options.kappa != 1.0:
        yield "times on the device: run this command there, without --kappa"
    yield "the link, which is a model: specact doctor --server URL"
    if verified_ms > 1e3 / pair.rate_hz:
        yield (
            f"success where a verified inference takes {verified_ms:.0f} ms, longer than a control step: in these runs "
            f"the world waited for the server; specact eval --realtime --link {options.link}"
        )


def _can_decode(pair: AnyPair, method: str) -> bool:
    """Whether a pair can be decoded as a method does, and has the drafter for it."""
    from specact.lab.rollout.families import decoded_by
    from specact.lab.rollout.methods import METHODS

    try:
        return decoded_by(METHODS[method], pair).drafter is not None
    except SpecactError:
        return False


def _read_study(path: Path) -> dict[str, Any]:
    from specact.lab.evaluation.budget import study_ways

    try:
        found = json.loads(path.read_text())
        if not isinstance(found["rows"], list):
            raise TypeError("its rows must be a list")
        for task in {row["task"] for row in found["rows"]}:
            study_ways(found, task)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not a table of python benchmarks/budget.py ({error}); leave out --study, or name one"
        ) from None
    return dict(found)


def _of_study(study: Mapping[str, Any], pair: AnyPair, budget_ms: float, target_ms: float | None) -> str:
    """What suffices for other policies of the same task, with the same share of their target's time."""
    from specact.lab.evaluation.budget import choose, describe, study_ways

    if target_ms is None:
        return "it cannot be compared with, as the target's time is not known"
    ways, share = study_ways(study, pair.env or "", alike=True), budget_ms / target_ms
    if not ways:
        return f"it holds nothing of the task {pair.env!r}"
    found = choose(ways, share)
    if found is None:
        return f"none of its ways fits into {share:.2g} of the target's time"
    return f"for other policies of {pair.env}, with {share:.2g} of their target's time: {describe(found)}"


def _label(way: Mapping[str, Any]) -> str:
    """The name of a method's line."""
    where = ", on the device" if way["on_device"] and way["method"] != _ON_DEVICE else ""
    return f"{way['method']}{where}" + (f" {way['asked']:g}" if 0.0 < way["asked"] < 1.0 else "")


def _print(answer: Mapping[str, Any]) -> None:
    from rich.table import Table

    def line(text: str) -> None:
        results.print(text, highlight=False, soft_wrap=True)

    line(f"{answer['bundle']}: {answer['budget_ms']:g} ms on the device for an inference")
    parts = ", ".join(f"{part} {ms:.3g}" for part, ms in answer["measured_here_ms"].items())
    line(f"measured on this machine, one thread, medians [ms]: {parts}")
    if answer["kappa"] != 1.0:
        line(f"on the device, not measured: {answer['kappa']:g} times as long, as given")
    line(
        f"link {answer['link']}, modelled: {answer['modelled_round_trip_ms']:.1f} ms for a request and its reply; "
        f"a control step is {answer['control_step_ms']:g} ms"
    )
    if answer["ways"]:
        table = Table(box=None, padding=(0, 1, 0, 0))
        table.add_column("method", no_wrap=True)
        for head in ("sent", "device", "mean", "success", "95 %", "over chance"):
            table.add_column(head, justify="right", no_wrap=True)
        for way in answer["ways"]:
            success, over = way["success"], way["over_chance"]
            table.add_row(
                _label(way), f"{way['rate']:.2f}",
                f"{way['device_ms']:.3g}", f"{way['mean_ms']:.3g}", f"{success['mean']:.3f}",
                f"{success['low']:.2f}-{success['high']:.2f}",
                "-" if over is None else f"{over['mean']:+.2f} [{over['low']:+.2f}, {over['high']:+.2f}]",
            )  # fmt: skip
        results.print(table)
        counts = sorted({way["episodes"] for way in answer["ways"]})
        episodes = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
        line(
            f"{episodes} episodes each; device: ms of an inference on the device; mean: with link and server, whose "
            "target takes what it takes here"
        )
    line(f"advice: {answer['advice']}")
    if answer["no_server_from_ms"] is not None:
        line(f"no server is needed from {answer['no_server_from_ms']:.3g} ms on")
    if "study" in answer:
        line(f"study: {answer['study']}")
    for one in answer["missing"]:
        line(f"not measured: {one}")
