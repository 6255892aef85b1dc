"""What a device should run: the recommendation of ``specact advise``, and the measurements that it lacks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specact.errors import ConfigError, SpecactError
from specact.families.codes.pair import CodeParts
from specact.families.tokens.pair import TokenParts
from specact.gates.learned import has_fitting_head
from specact.lab.evaluation import budget
from specact.lab.evaluation.budget import Way
from specact.lab.report.runs import Run, find_runs
from specact.lab.rollout.families import decoded_by, family_of
from specact.lab.rollout.methods import METHODS
from specact.links.link import load_link, round_trip
from specact.pair import Pair
from specact.systems.flow import FlashParts

# Milliseconds of a pair's parts, by the name of the composition; "" is the pair as it was loaded.
Parts = Mapping[str, Mapping[str, float]]
# Methods that have to be evaluated for a recommendation, if the pair can run them.
_METHODS = ("draft", "head_draft", "target", "hybrid", "random", "adahi", "uncertainty", "random_learned", "learned")
# Likewise, of a token policy or a flow policy with a draft, with its own drafters, and alone.
_DECODED = ("ar", "full", "full_2", "full_1", "specvla", "last", "flash", "block")
_ON_DEVICE = "target_on_device"
_GATES_OF_TOKENS = {"periodic", "verify_skip", "similarity"}


def advise(
    pair: Pair[Any], runs: Sequence[Run], budget_ms: float, here_ms: Parts, *, kappa: float = 1.0,
    link: str = "wifi-paper",
) -> dict[str, Any]:  # fmt: skip
    """The recommendation, and all that it is made of, as plain values.

    Args:
        pair: the policies.
        runs: of this pair, see :func:`runs_of`.
        budget_ms: time of one core that is available for an inference on the device [ms].
        here_ms: times on this machine, see :func:`parts_of`.
        kappa: how many times slower the device is.
        link: to the server; see :func:`~specact.links.link.load_link`.
    """
    trip_ms = round_trip_ms(pair, link)
    device_ms = {name: {part: kappa * ms for part, ms in parts.items()} for name, parts in here_ms.items()}
    ways, target_ms = ways_of(runs, device_ms), device_ms[""].get("target")
    fits = target_ms is not None and target_ms <= budget_ms
    choice, free = budget.choose(ways, budget_ms), budget.without_server(ways)
    if fits and choice is not None and not choice.way.on_device and any(way.on_device for way in ways):
        advice = f"the target fits on the device, but more succeeds with {budget.describe(choice)}"
    elif fits:
        advice = "the target fits on the device: run it there, without a draft, a gate or a server"
    elif choice is not None:
        advice = budget.describe(choice)
    elif ways:
        advice = "nothing that was evaluated fits; the target on a server takes the device only the time of asking"
    else:
        advice = "which draft or gate is enough cannot be said before they are evaluated"
    verified_ms = {name: trip_ms + parts.get("target", 0.0) for name, parts in here_ms.items()}
    missing = list(_missing(pair, ways, here_ms[""]))
    if kappa != 1.0:
        missing.append("times on the device: run this command there, without --kappa")
    missing.append("the link, which is a model: specact doctor --server URL")
    if verified_ms[""] > 1e3 / pair.rate_hz:
        missing.append(
            f"success where a verified inference takes {verified_ms['']:.0f} ms, longer than a control step: in these "
            f"runs the world waited for the server; specact eval --realtime --link {link}"
        )
    return {
        "bundle": pair.name, "budget_ms": budget_ms, "control_step_ms": 1e3 / pair.rate_hz,
        "measured_here_ms": dict(here_ms[""]), "kappa": kappa, "link": link, "modelled_round_trip_ms": trip_ms,
        "verified_ms": verified_ms[""], "runs": [str(run.folder) for run in runs],
        "ways": [_row(way, ways, verified_ms) for way in ways],
        "target_fits": fits if target_ms is not None else None, "advice": advice,
        "no_server_from_ms": min((ms for ms in (target_ms, free) if ms is not None), default=None),
        "missing": missing, "others": None if target_ms is None else _of_others(pair.env, budget_ms / target_ms),
    }  # fmt: skip


def parts_of(pair: Pair[Any], runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Times of the pair's parts here, as it was loaded and as the methods of the runs compose it [ms]."""
    methods = {name: METHODS[name] for run in runs for name in METHODS.keys() & run.methods.keys()}
    composed = {
        name: budget.measure_parts(decoded_by(method, pair), 50, sorted({method.gate} & _GATES_OF_TOKENS))
        for name, method in sorted(methods.items())
        if method.decoding
    }
    return {"": budget.measure_parts(pair), **composed}


def runs_of(pair: Pair[Any], folders: Sequence[Path]) -> tuple[list[Run], dict[Path, str]]:
    """The runs of this pair that measure success, and the reasons why the others are left out."""
    if not folders:
        return [], {}
    runs, skipped = find_runs(folders)
    left_out = {each.folder: each.reason for each in skipped}
    for run in runs:
        evaluation = run.evaluation
        if evaluation["fingerprint"] != pair.fingerprint:
            left_out[run.folder] = f"it is of other weights ({evaluation['bundle']})"
        elif run.summary["realtime"]:
            left_out[run.folder] = "its success depends on a deadline"
        elif pair.env and evaluation["env"] != pair.env:
            left_out[run.folder] = f"it is of another environment ({evaluation['env']})"
        elif evaluation.get("decoding"):
            left_out[run.folder] = f"its draft and gates work with the decoding {evaluation['decoding']}"
    return [run for run in runs if run.folder not in left_out], left_out


def ways_of(runs: Sequence[Run], device_ms: Parts) -> list[Way]:
    """The methods that were evaluated and can be timed, with the episodes of all their runs.

    The accounted times of a run are not used, because they may have been set by options.

    Raises:
        ConfigError: if an episode ended otherwise in another run.
    """
    won: dict[tuple[float, str, bool], dict[str, bool]] = {}
    rates: dict[tuple[float, str, bool], list[tuple[float, int]]] = {}
    for run in runs:
        for evaluated in METHODS.keys() & run.methods.keys():
            outcomes, seed = run.outcomes(evaluated), run.evaluation["seed"]
            episodes = zip(outcomes["episode"].tolist(), outcomes["success"].tolist(), strict=True)
            successes = {f"{seed}/{number}": success for number, success in episodes}
            # The target succeeds as often wherever it runs.
            places = [(evaluated, False), *[(evaluated, True)] * budget.runs_alone(evaluated)]
            places = [("target", False), (_ON_DEVICE, True)] if evaluated in ("target", _ON_DEVICE) else places
            for method, on_device in places:
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
            cost = budget.device_cost(method, device_ms[METHODS[method].decoding], mean, on_device=on_device)
        except KeyError:
            continue  # an oracle, or a method whose head, target or composition is missing
        ways.append(Way("", method, asked, mean, cost, {0: successes}, on_device and method != _ON_DEVICE))
    return ways


def round_trip_ms(pair: Pair[Any], name: str) -> float:
    """Mean round trip of the link model with the arrays of a request and its reply [ms]."""
    link, (up, down), rng = load_link(name), pair.exchange.contract.array_bytes, np.random.default_rng(0)
    return float(1e3 * np.mean([round_trip(link, up, down, at, rng) for at in np.linspace(0.0, 60.0, 300).tolist()]))


def _row(way: Way, ways: Sequence[Way], verified_ms: Mapping[str, float]) -> dict[str, Any]:
    """A way as plain values, with its difference from the random gate with forced steps at the same rate."""
    chance = {"adahi": "random"}.get(way.method, "random_learned" if METHODS[way.method].gate != "random" else "")
    rival = next((each for each in ways if each.method == chance and each.asked == way.asked), None)
    gained = None if rival is None else budget.behind(rival, way)
    return {
        "method": way.method, "on_device": way.on_device, "asked": way.asked, "rate": way.rate, "device_ms": way.cost,
        "mean_ms": way.cost + way.rate * verified_ms[METHODS[way.method].decoding],
        "episodes": way.episodes, "success": vars(way.success), "over_chance": None if gained is None else vars(gained),
    }  # fmt: skip


def _of_others(env: str, share: float) -> str | None:
    """What suffices for other policies of an environment, with the same share of their target's time."""
    steps = json.loads(budget.TABLE.read_text()).get(env, [])
    fitting = [sentence for least, sentence in steps if least <= share]
    return f"for other policies of {env}, with {share:.2g} of their target's time: {fitting[-1]}" if fitting else None


def _missing(pair: Pair[Any], ways: Sequence[Way], here_ms: Mapping[str, float]) -> Iterator[str]:
    """Missing measurements of the pair, each with the command that makes it."""
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
    if few := sorted({way.method for way in ways if way.episodes < budget.ENOUGH * most}):
        yield f"enough episodes of {', '.join(few)}, which have less than half of the {most} of others and are left out"


def _possible(pair: Pair[Any]) -> list[str]:
    """The methods that a recommendation for this pair compares."""
    of_codes, has_head = isinstance(pair.parts, CodeParts), has_fitting_head(pair)
    possible = [
        name
        for name in _METHODS
        if (of_codes or not (METHODS[name].needs_codes or METHODS[name].proposes == "head"))
        and (METHODS[name].verifier == "speculative" or not family_of(pair).measured)
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
