"""``specact advise`` recommends what a device should run: the target, a draft, a gate, or only queries to a server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from specact.cli.options import Flat, Maybe, Options
from specact.cli.output import print_json, remark, say, table_of
from specact.errors import ConfigError, SpecactError
from specact.records import NotNegative, Positive

if TYPE_CHECKING:
    from specact.lab.evaluation.budget import Way
    from specact.lab.report.runs import Run
    from specact.pair import Pair

# Methods that have to be evaluated for a recommendation, if the pair can run them.
_METHODS = ("draft", "head_draft", "target", "hybrid", "random", "adahi", "uncertainty", "random_learned", "learned")
# Likewise, of a token policy or a flow policy with a draft, with its own drafters, and alone.
_DECODED = ("ar", "full", "full_2", "full_1", "specvla", "last", "flash", "block")
_ON_DEVICE = "target_on_device"
_GATES_OF_TOKENS = {"periodic", "verify_skip", "similarity"}
# Milliseconds of a pair's parts, by the name of the composition; "" is the pair as it was loaded.
Parts = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Device(Options):
    """A device, and what is known of the pair."""

    budget_ms: NotNegative  # time of one core that is available for an inference on the device [ms]
    link: str = "wifi-paper"  # to the server; see specact proxy --help
    runs: tuple[Path, ...] = ()  # run folders of specact eval, or folders that contain some at any depth
    kappa: Positive = 1.0  # how many times slower the device is than this machine; 1 if this is the device
    # of a pair of chunk policies, where the pair does not name it: MODULE:NAME or a .toml file
    draft: Maybe[str] = None
    target: Maybe[str] = None  # likewise
    json: bool = False  # print everything as JSON


@dataclass(frozen=True)
class Advise(Options):
    """Recommend what to run on a device with a budget for inference, from your own evaluations of a pair.

    Inferences are timed on this machine. Success and transmission rates are those of the run folders. Missing
    measurements are listed, with the commands that make them.
    """

    pair: Positional[str]  # path or name of a pair, or MODULE:NAME
    device: Flat[Device]

    def run(self) -> None:
        from specact.lab.evaluation.budget import measure_parts
        from specact.load import load_pair

        device = self.device
        pair = load_pair(self.pair, draft=device.draft, target=device.target)
        round_trip = round_trip_ms(pair, device.link)
        runs, left_out = runs_of(pair, device.runs)
        found = answer(device, pair, runs, {"": measure_parts(pair), **composed_parts(pair, runs)}, round_trip)
        if device.json:
            print_json(found)
            return
        for folder, reason in left_out.items():
            remark(f"left out {folder}: {reason}", warn=True)
        _print(found)


def composed_parts(pair: Pair[Any], runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """The parts of the pair as the methods of the runs compose it, timed here."""
    from specact.lab.evaluation.budget import measure_parts
    from specact.lab.rollout.families import decoded_by
    from specact.lab.rollout.methods import METHODS

    methods = {name: METHODS[name] for run in runs for name in METHODS.keys() & run.methods.keys()}
    return {
        name: measure_parts(decoded_by(method, pair), 50, sorted({method.gate} & _GATES_OF_TOKENS))
        for name, method in sorted(methods.items())
        if method.decoding
    }


def answer(device: Device, pair: Pair[Any], runs: Sequence[Run], here_ms: Parts, round_trip: float) -> dict[str, Any]:
    """The recommendation, and all that it is made of, as plain values.

    Args:
        device: options.
        pair: the policies.
        runs: of this pair.
        here_ms: times on this machine.
        round_trip: of the link [ms].
    """
    from specact.lab.evaluation.budget import choose, describe, without_server

    device_ms = {name: {part: device.kappa * ms for part, ms in parts.items()} for name, parts in here_ms.items()}
    ways, target_ms = ways_of(runs, device_ms), device_ms[""].get("target")
    fits = target_ms is not None and target_ms <= device.budget_ms
    found, free = choose(ways, device.budget_ms), without_server(ways)
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
    verified_ms = {name: round_trip + parts.get("target", 0.0) for name, parts in here_ms.items()}
    return {
        "bundle": pair.name, "budget_ms": device.budget_ms, "control_step_ms": 1e3 / pair.rate_hz,
        "measured_here_ms": dict(here_ms[""]), "kappa": device.kappa, "link": device.link,
        "modelled_round_trip_ms": round_trip, "verified_ms": verified_ms[""],
        "runs": [str(run.folder) for run in runs], "ways": [_row(way, ways, verified_ms) for way in ways],
        "target_fits": fits if target_ms is not None else None, "advice": advice,
        "no_server_from_ms": min((ms for ms in (target_ms, free) if ms is not None), default=None),
        "missing": list(_missing(device, pair, ways, here_ms[""], verified_ms[""])),
        "others": None if target_ms is None else of_others(pair.env or "", device.budget_ms / target_ms),
    }  # fmt: skip


def of_others(env: str, share: float) -> str | None:
    """What suffices for other policies of an environment, with the same share of their target's time."""
    from specact.lab.evaluation.budget import TABLE

    steps = json.loads(TABLE.read_text()).get(env, [])
    fitting = [sentence for least, sentence in steps if least <= share]
    return f"for other policies of {env}, with {share:.2g} of their target's time: {fitting[-1]}" if fitting else None


def _row(way: Way, ways: Sequence[Way], verified_ms: Mapping[str, float]) -> dict[str, Any]:
    """A way as plain values, with its difference from the random gate with forced steps at the same rate."""
    from specact.lab.evaluation.budget import behind
    from specact.lab.rollout.methods import METHODS

    chance = {"adahi": "random"}.get(way.method, "random_learned" if METHODS[way.method].gate != "random" else "")
    rival = next((one for one in ways if one.method == chance and one.asked == way.asked), None)
    gained = None if rival is None else behind(rival, way)
    return {
        "method": way.method, "on_device": way.on_device, "asked": way.asked, "rate": way.rate, "device_ms": way.cost,
        "mean_ms": way.cost + way.rate * verified_ms[METHODS[way.method].decoding],
        "episodes": way.episodes, "success": vars(way.success), "over_chance": None if gained is None else vars(gained),
    }  # fmt: skip


def runs_of(pair: Pair[Any], folders: Sequence[Path]) -> tuple[list[Run], dict[Path, str]]:
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


def ways_of(runs: Sequence[Run], device_ms: Parts) -> list[Way]:
    """The methods that were evaluated and can be timed, with the episodes of all their runs.

    The accounted times of a run are not used, because they may have been set by options.

    Raises:
        ConfigError: if an episode ended otherwise in another run.
    """
    from specact.lab.evaluation.budget import Way, device_cost, runs_alone
    from specact.lab.rollout.methods import METHODS

    won: dict[tuple[float, str, bool], dict[str, bool]] = {}
    rates: dict[tuple[float, str, bool], list[tuple[float, int]]] = {}
    for run in runs:
        for evaluated in METHODS.keys() & run.methods.keys():
            outcomes, seed = run.outcomes(evaluated), run.evaluation["seed"]
            episodes = zip(outcomes["episode"].tolist(), outcomes["success"].tolist(), strict=True)
            successes = {f"{seed}/{number}": success for number, success in episodes}
            # The target succeeds as often wherever it runs.
            ends = [(evaluated, False), *[(evaluated, True)] * runs_alone(evaluated)]
            ends = [("target", False), (_ON_DEVICE, True)] if evaluated in ("target", _ON_DEVICE) else ends
            for method, on_device in ends:
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
            continue  # an oracle, or a method whose head, target or composition is missing
        ways.append(Way("", method, asked, mean, cost, {0: successes}, on_device and method != _ON_DEVICE))
    return ways


def round_trip_ms(pair: Pair[Any], name: str) -> float:
    """Mean round trip of the link model with the arrays of a request and its reply [ms]."""
    import numpy as np

    from specact.links.link import load_link, round_trip

    link, (up, down), rng = load_link(name), pair.exchange.contract.array_bytes, np.random.default_rng(0)
    return float(1e3 * np.mean([round_trip(link, up, down, at, rng) for at in np.linspace(0.0, 60.0, 300).tolist()]))


def _missing(
    device: Device, pair: Pair[Any], ways: Sequence[Way], here_ms: Mapping[str, float], verified_ms: float
) -> Iterator[str]:
    """Missing measurements, each with the command that makes it."""
    from specact.families.head import has_fitting_head
    from specact.lab.evaluation.budget import ENOUGH

    source = pair.source.cli_args
    if pair.path is not None and not has_fitting_head(pair):
        yield f"a learned gate: specact calibrate {source} --gate learned, then evaluate it"
    if "target" not in here_ms:
        yield "the time of the target, which this bundle was exported without: give the complete one"
    known = {way.method for way in ways}
    wanted = [name for name in _possible(pair) if name not in known]
    if wanted:
        yield (
            f"success of {', '.join(wanted)}: specact eval {source} --methods {','.join(wanted)} "
            f"--rate 0.4 --out runs/{pair.name}-advice, then --runs runs/{pair.name}-advice"
        )
    most = max((way.episodes for way in ways), default=0)
    if few := sorted({way.method for way in ways if way.episodes < ENOUGH * most}):
        yield f"enough episodes of {', '.join(few)}, which have less than half of the {most} of others and are left out"
    if device.kappa != 1.0:
        yield "times on the device: run this command there, without --kappa"
    yield "the link, which is a model: specact doctor --server URL"
    if verified_ms > 1e3 / pair.rate_hz:
        yield (
            f"success where a verified inference takes {verified_ms:.0f} ms, longer than a control step: in these runs "
            f"the world waited for the server; specact eval --realtime --link {device.link}"
        )


def _possible(pair: Pair[Any]) -> list[str]:
    """The methods that a recommendation for this pair compares."""
    from specact.families.codes.pair import CodeParts
    from specact.families.head import has_fitting_head
    from specact.families.tokens.pair import TokenParts
    from specact.lab.rollout.families import decoded_by, depends_on_content
    from specact.lab.rollout.methods import METHODS
    from specact.systems.flash import FlashParts

    of_codes, has_head = isinstance(pair.parts, CodeParts), has_fitting_head(pair)
    possible = [
        name
        for name in _METHODS
        if (of_codes or not (METHODS[name].needs_codes or METHODS[name].proposes == "head"))
        and (METHODS[name].verifier == "speculative" or not depends_on_content(pair))
        and (has_head or not METHODS[name].needs_head)
    ]
    if not isinstance(pair.parts, TokenParts | FlashParts):
        return possible

    def composes(name: str) -> bool:
        try:
            return decoded_by(METHODS[name], pair).drafter() is not None
        except SpecactError:
            return False

    # Without a draft policy nothing acts where a gate does not ask.
    return [*filter(composes, _DECODED), *(possible if pair.parts.draft is not None else [])]


def _print(found: Mapping[str, Any]) -> None:
    say(f"{found['bundle']}: {found['budget_ms']:g} ms on the device for an inference")
    parts = ", ".join(f"{part} {ms:.3g}" for part, ms in found["measured_here_ms"].items())
    say(f"measured on this machine, one thread, medians [ms]: {parts}")
    if found["kappa"] != 1.0:
        say(f"on the device, not measured: {found['kappa']:g} times as long, as given")
    say(
        f"link {found['link']}, modelled: {found['modelled_round_trip_ms']:.1f} ms for a request and its reply; "
        f"a control step is {found['control_step_ms']:g} ms"
    )
    if found["ways"]:
        counts = sorted({way["episodes"] for way in found["ways"]})
        episodes = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
        caption = (
            f"{episodes} episodes each; device: ms of an inference on the device; mean: with link and server, whose "
            "target takes what it takes here"
        )
        say(table_of("", [_line(way) for way in found["ways"]], caption))
    say(f"advice: {found['advice']}")
    if found["no_server_from_ms"] is not None:
        say(f"no server is needed from {found['no_server_from_ms']:.3g} ms on")
    if found["others"] is not None:
        say(found["others"])
    for one in found["missing"]:
        say(f"not measured: {one}")


def _line(way: Mapping[str, Any]) -> dict[str, str]:
    where = ", on the device" if way["on_device"] and way["method"] != _ON_DEVICE else ""
    rate = f" {way['asked']:g}" if 0.0 < way["asked"] < 1.0 else ""
    success, over = way["success"], way["over_chance"]
    chance = "-" if over is None else f"{over['mean']:+.2f} [{over['low']:+.2f}, {over['high']:+.2f}]"
    return {
        "method": f"{way['method']}{where}{rate}", "sent": f"{way['rate']:.2f}", "device": f"{way['device_ms']:.3g}",
        "mean": f"{way['mean_ms']:.3g}", "success": f"{success['mean']:.3f}",
        "95 %": f"{success['low']:.2f}-{success['high']:.2f}", "over chance": chance,
    }  # fmt: skip
