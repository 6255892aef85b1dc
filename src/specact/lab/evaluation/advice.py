"""What a device should run: every way to act with its cost on the device, its transmission rate and its success.

``specact advise`` recommends the simplest way within a budget of compute, from evaluations of a pair, and says which
measurements are missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import BundleError, ConfigError, SpecactError
from specact.families.codes.pair import CodeParts
from specact.families.tokens.pair import TokenParts
from specact.gates.learned import has_fitting_head
from specact.gates.settings import LEARNED, gate_settings
from specact.lab.evaluation.cost import decision, median_ms
from specact.lab.evaluation.executions import executions
from specact.lab.evaluation.runs import Run, find_runs
from specact.lab.rollout.families import decoded_by, rollout_of
from specact.lab.rollout.methods import HYBRID, METHODS, load_method
from specact.lab.rollout.statistics import Interval, seeds_interval, wilson
from specact.lab.rollout.timed import Route
from specact.links.link import load_link
from specact.pair import Pair
from specact.rng import StepAddress
from specact.systems.flow import ROUNDS, FlowParts
from specact.systems.tokens import DECODINGS
from specact.wire import messages
from specact.wire.exchange import Request

# Milliseconds of a pair's parts, by the name of the composition; "" is the pair as it was loaded.
Parts = Mapping[str, Mapping[str, float]]
# A way that loses more success than this on average is never accepted, however wide its interval is.
MARGIN = 0.05
# A way with a smaller share of the episodes of the one with most is not chosen, nor compared with: one that wins two of
# two would be the best.
ENOUGH = 0.5
TARGET, HEAD_DRAFT, ON_DEVICE = "target", "head_draft", "target_on_device"
# What was recommended for other policies: by task, from which share of the target's time on, and the sentence.
TABLE = Path(__file__).with_name("advice.json")
# Gates by complexity: random needs no score, deviation and uncertainty no head.
_GATES = ("never", "random", "adahi", "uncertainty", "learned", "learned_action", "always")
# Decodings without a drafter.
_UNDRAFTED = {
    name
    for name, decoding in DECODINGS.items()
    if (decoding.proposes, decoding.then, decoding.gate) == ("nothing", "none", "always")
} | {name for name, rounds in ROUNDS.items() if rounds.proposes == "nothing" and not rounds.local}
# Methods that have to be evaluated for a recommendation, if the pair can run them: of a token policy or a flow policy
# alone and with its own drafters, and of a pair with a draft.
_DECODED = ("ar", "full", "full_2", "full_1", "specvla", "last", "flash", "block")
_DRAFTED = ("draft", "head_draft", "target", "hybrid", "random", "adahi", "uncertainty", "random_learned", "learned")


@dataclass(frozen=True, eq=False)
class Way:
    """A method with a draft, of this description; empty where none is evaluated.

    ``requested`` and ``rate`` are the requested and the achieved transmission rate, in [0, 1]; ``cost`` is the time of
    an inference on the device, decision of the gate included, in ms or as a share of the target's; ``successes`` by
    training seed the success of each episode by its name, which is common to all ways; ``decoded_on_device`` whether
    the target of :func:`runs_alone` runs on the device.
    """

    draft: str
    method: str
    requested: float
    rate: float
    cost: float
    successes: Mapping[int, Mapping[str, bool]]
    decoded_on_device: bool = False

    @cached_property
    def success(self) -> Interval:
        """Mean over training seeds, with the union of the 95 % intervals of seeds and episodes, and Wilson's over all.

        The width of the latter is not zero where all episodes have the same outcome.
        """
        groups = [_as_floats(outcomes.values()) for outcomes in self.successes.values()]
        over_seeds, every = seeds_interval(groups), np.concatenate(groups)
        pooled = wilson(int(every.sum()), len(every))
        return Interval(over_seeds.mean, min(over_seeds.low, pooled.low), max(over_seeds.high, pooled.high))

    @property
    def episodes(self) -> int:
        """The number of episodes, over all training seeds."""
        return sum(map(len, self.successes.values()))

    @property
    def on_device(self) -> bool:
        """Whether the target runs on the device, without a draft and a server."""
        return self.decoded_on_device or load_method(self.method).on_device

    @property
    def simplicity(self) -> tuple[bool, bool, float, int, float]:
        """The simpler, the smaller: the target on the device, no server, a low rate, a simple gate, a low cost."""
        gate = load_method(self.method).gate
        complexity = _GATES.index(gate) if gate in _GATES else len(_GATES)
        return not self.on_device, self.requested > 0.0, self.requested, complexity, self.cost

    def __str__(self) -> str:
        method = load_method(self.method)
        decoded = f" ({self.method})" if method.decoding else ""
        if self.on_device:
            return f"the target on the device{decoded}"
        if self.method == TARGET or runs_alone(self.method):
            return f"the target on a server at every inference{decoded}, without a draft"
        draft = f"the {self.draft}" if self.draft else "the draft"
        if method.gate == "never":
            head = f"the learned gate's head on {draft} as the draft" if method.proposes == "head" else draft
            return f"{head}{decoded}{',' * (method.proposes == 'head')} alone"
        if method.gate == "always":
            return f"{draft}{decoded}, every inference verified"
        how = "at random" if method.gate == "random" else f"by the gate {method.gate if decoded else self.method}"
        return f"{draft}{decoded}, {self.requested:.0%} verified {how}"


@dataclass(frozen=True)
class Choice:
    """The recommendation for a budget: the simplest way that is not significantly worse than the ``best`` one."""

    way: Way
    best: Way

    def __str__(self) -> str:
        gate, success = load_method(self.way.method).gate, self.way.success
        remark = ", and no gate is needed" if gate in ("never", "always") else ""
        remark = ", and no gate was shown to do better than chance" if gate == "random" else remark
        more = "" if self.best is self.way else f"; most has {self.best}, {self.best.success.mean:.2f}"
        return f"{self.way}: success {success.mean:.2f} [{success.low:.2f}, {success.high:.2f}]{remark}{more}"


@cache
def behind(way: Way, best: Way) -> Interval | None:
    """Success of ``best`` minus that of ``way`` over their common episodes; None where there are none."""
    differences = []
    for seed in sorted(way.successes.keys() & best.successes.keys()):
        first, other = way.successes[seed], best.successes[seed]
        if shared := sorted(first.keys() & other.keys()):
            differences.append(_as_floats(other[name] for name in shared) - _as_floats(first[name] for name in shared))
    return seeds_interval(differences) if differences else None


def choose(ways: Iterable[Way], budget: float) -> Choice | None:
    """The simplest way within a budget that is not significantly worse than the best one; None if none fits.

    A way is acceptable if the 95 % interval of its deficit :func:`behind` the best contains 0, and the mean is at most
    :data:`MARGIN`. They are ordered by :attr:`Way.simplicity`. Those with few episodes are left out, see
    :data:`ENOUGH`. ``budget`` is the maximum cost of an inference on the device, in the unit of the ways' costs.
    """
    simplest = sorted(ways, key=lambda way: way.simplicity)
    enough = ENOUGH * max((way.episodes for way in simplest), default=0)
    affordable = [way for way in simplest if way.cost <= budget and way.episodes >= enough]
    for way in affordable:
        best = max(affordable, key=lambda way: way.success.mean)
        deficit = behind(way, best)
        if deficit is not None and deficit.low <= 0.0 and deficit.mean <= MARGIN:
            return Choice(way, best)
    return None  # the best way is never behind itself, so that nothing fits


def without_server(ways: Sequence[Way]) -> float | None:
    """The least budget from which on :func:`choose` always finds a way without a server; None if there is none."""
    least = None
    for budget in sorted({way.cost for way in ways}, reverse=True):
        choice = choose(ways, budget)
        if choice is None or choice.way.requested > 0.0:
            break
        least = budget
    return least


def runs_alone(method: str) -> bool:
    """Whether a method decodes the target's chunks without a drafter, and so runs on a server or the device alone."""
    return load_method(method).decoding in _UNDRAFTED


def device_cost(method: str, parts: Mapping[str, float], rate: float, *, on_device: bool = False) -> float:
    """Time of a method's inference on the device, in the unit of ``parts``, if this share of inferences is transmitted.

    A part that is needed and was not measured, see :func:`measure_parts`, is a :exc:`KeyError`; without ``ask``, as in
    older results, asking takes no time. ``on_device`` is whether a target that :func:`runs_alone` does so there.
    """
    method_ = load_method(method)
    if on_device or method_.on_device:
        return parts["target"]
    asking = rate * parts.get("ask", 0.0)
    if runs_alone(method) or not method_.waits_for_draft:
        return asking
    gate_ms = 0.0 if method_.gate in ("never", "always") else parts[f"gate {method_.gate}"]
    return asking + gate_ms + parts[HEAD_DRAFT if method_.proposes == "head" else "draft"]


def measure_parts(
    pairs: Mapping[str, Pair[Any]], rounds: int = 400, gates: Sequence[str] = ()
) -> dict[str, dict[str, float]]:
    """Median milliseconds of the parts of pairs on one core of this machine, called alternately, by pair.

    ONNX Runtime, one thread, batch 1, observations of zeros; each pair decoded as the method that is timed. Parts are
    ``draft``, ``target`` (where the pair has it), ``head_draft`` (draft and head, where it has one), ``ask``: encoding
    a request and reading its reply, without a link, and for each gate that the pair can have, and the further ones
    ``gates``, ``gate NAME``: a decision, of a learned gate with its head.
    """
    calls = {name: _parts(pair, gates) for name, pair in pairs.items()}
    times = median_ms({(name, part): call for name, parts in calls.items() for part, call in parts.items()}, rounds)
    return {name: {part: times[name, part] for part in parts} for name, parts in calls.items()}


def _parts(pair: Pair[Any], gates: Sequence[str]) -> dict[str, Callable[[], object]]:
    family, has_head, of_codes = rollout_of(pair, HYBRID), has_fitting_head(pair), isinstance(pair.parts, CodeParts)
    draft = family.call("draft")
    calls = {"draft": draft, "ask": _asking(pair)}
    with suppress(BundleError):  # it is only on a server
        calls["target"] = family.call("target")
    if of_codes and has_head:
        head = family.call("head")
        calls[HEAD_DRAFT] = lambda: (draft(), head())
    learned = (LEARNED if of_codes else LEARNED[:1]) if has_head else ()
    for name in ("random", "adahi", *("uncertainty",) * of_codes, *learned, *gates):
        calls[f"gate {name}"] = decision(gate_settings(name, pair).build(pair), pair)
    return calls


def _asking(pair: Pair[Any]) -> Callable[[], object]:
    """A call that does what asking the server takes on the device, besides the link."""
    contract = pair.exchange.contract
    kind = contract.kinds[contract.step_kind]
    received = messages.encode(messages.Reply(1, 1.0, 1.0, 1.0, 1, kind.reply.pack(kind.reply.example())))
    request = Request(contract.observation.zeros(), StepAddress(0, 0, 0, 0), kind.request.example())

    def ask() -> object:
        messages.encode(messages.ask(request, contract, contract.step_kind, 1, 1.0))
        reply = messages.read_reply(received)
        return kind.reply.unpack(reply.arrays) if isinstance(reply, messages.Reply) else None

    return ask


def _as_floats(values: Iterable[bool]) -> NDArray[np.float64]:
    return np.fromiter(values, dtype=np.float64)


def advise(
    pair: Pair[Any], runs: Sequence[Run], budget_ms: float, here_ms: Parts, *, kappa: float = 1.0,
    link: str = "wifi-paper",
) -> dict[str, Any]:  # fmt: skip
    """The recommendation for a pair, see :func:`runs_of` and :func:`parts_of`, and all that it is made of.

    Of a device whose core has so much time for an inference [ms], and is slower than this one by a factor ``kappa``.
    """
    trip_ms = round_trip_ms(pair, link)
    device_ms = {name: {part: kappa * ms for part, ms in parts.items()} for name, parts in here_ms.items()}
    ways, target_ms = ways_of(runs, device_ms), device_ms[""].get("target")
    fits = target_ms is not None and target_ms <= budget_ms
    choice, free = choose(ways, budget_ms), without_server(ways)
    if fits and choice is not None and not choice.way.on_device and any(way.on_device for way in ways):
        advice = f"the target fits on the device, but more succeeds with {choice}"
    elif fits:
        advice = "the target fits on the device: run it there, without a draft, a gate or a server"
    elif choice is not None:
        advice = str(choice)
    elif ways:
        advice = "nothing that was evaluated fits; the target on a server takes the device only the time of asking"
    else:
        advice = "which draft or gate is enough cannot be said before they are evaluated"
    verified_ms = {name: trip_ms + parts.get("target", 0.0) for name, parts in here_ms.items()}
    missing = list(_missing(pair, ways, here_ms[""]))
    if kappa != 1.0:
        missing.append("times on the device: run this command there, without --kappa")
    source = pair.source.cli_args
    missing.append(f"the link, which is a model: specact doctor {source} --server URL")
    if verified_ms[""] > 1e3 / pair.rate_hz:
        missing.append(
            f"success where a verified inference takes {verified_ms['']:.0f} ms, longer than a control step: in these "
            f"runs the world waited for the server; specact eval {source} --realtime --link {link} "
            f"--out runs/{pair.name}-realtime"
        )
    return {
        "bundle": pair.name, "budget_ms": budget_ms, "control_step_ms": 1e3 / pair.rate_hz,
        "measured_here_ms": dict(here_ms[""]), "kappa": kappa, "link": link, "modelled_round_trip_ms": trip_ms,
        "verified_ms": verified_ms[""], "runs": [str(run.folder) for run in runs],
        "ways": [_row(way, ways, verified_ms) for way in ways],
        "target_fits": fits if target_ms is not None else None, "advice": advice,
        "no_server_from_ms": min((ms for ms in (target_ms, free) if ms is not None), default=None),
        "execution": executions(verified_ms[""], 1e3 / pair.rate_hz),
        "missing": missing, "others": None if target_ms is None else _of_others(pair.env, budget_ms / target_ms),
    }  # fmt: skip


def parts_of(pair: Pair[Any], runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Times of the pair's parts here, as it was loaded and as the methods of the runs compose it [ms]."""
    times = measure_parts({"": pair})
    for name in sorted({name for run in runs for name in METHODS.keys() & run.methods.keys()}):
        if (method := METHODS[name]).decoding:
            times |= measure_parts({name: decoded_by(method, pair)}, 50, (method.gate,))
    return times


def runs_of(pair: Pair[Any], folders: Sequence[Path]) -> tuple[list[Run], dict[Path, str]]:
    """The runs of this pair that measure success, and the reasons why the others are left out."""
    if not folders:
        return [], {}
    runs, skipped = find_runs(folders)
    left_out = {skip.folder: skip.reason for skip in skipped}
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

    The accounted times of a run are not used, because they may have been set by options. An episode that ended
    otherwise in another run is a :exc:`ConfigError`.
    """
    episodes_by_way: dict[tuple[float, str, bool], dict[str, bool]] = {}
    rates: dict[tuple[float, str, bool], list[tuple[float, int]]] = {}
    for run in runs:
        for evaluated in METHODS.keys() & run.methods.keys():
            outcomes, seed = run.outcomes(evaluated), run.evaluation["seed"]
            episodes = zip(outcomes["episode"].tolist(), outcomes["success"].tolist(), strict=True)
            successes = {f"{seed}/{number}": success for number, success in episodes}
            # The target succeeds as often wherever it runs.
            places = [(evaluated, False), *[(evaluated, True)] * runs_alone(evaluated)]
            places = [(TARGET, False), (ON_DEVICE, True)] if evaluated in (TARGET, ON_DEVICE) else places
            for method, on_device in places:
                requested = 0.0 if on_device else {"never": 0.0, "always": 1.0}.get(METHODS[method].gate)
                rate = run.methods[evaluated]["sent"] if requested is None else requested
                key = run.summary["rate"] if requested is None else requested, method, on_device
                known = episodes_by_way.setdefault(key, {})
                if differing := [name for name, success in successes.items() if known.get(name, success) != success]:
                    raise ConfigError(
                        f"episode {differing[0]} (seed/number) of {evaluated} in {run.folder} ended otherwise in "
                        "another of these runs; name only one of them with --runs"
                    )
                known.update(successes)
                rates.setdefault(key, []).append((rate, len(successes)))
    ways = []
    for key, successes in sorted(episodes_by_way.items()):
        requested, method, on_device = key
        mean = sum(rate * count for rate, count in rates[key]) / sum(count for _, count in rates[key])
        with suppress(KeyError):  # an oracle, or a method whose head, target or composition is missing
            cost = device_cost(method, device_ms[METHODS[method].decoding], mean, on_device=on_device)
            ways.append(Way("", method, requested, mean, cost, {0: successes}, on_device and method != ON_DEVICE))
    return ways


def round_trip_ms(pair: Pair[Any], name: str) -> float:
    """Mean round trip of the link model with the arrays of a request and its reply [ms]."""
    route = Route.of(load_link(name), pair.exchange.contract, np.random.default_rng(0))
    return float(1e3 * np.mean([route.round_trip_s(at) for at in np.linspace(0.0, 60.0, 300).tolist()]))


def _row(way: Way, ways: Sequence[Way], verified_ms: Mapping[str, float]) -> dict[str, Any]:
    """A way as plain values, with its difference from the random gate with forced steps at the same rate."""
    chance = {"adahi": "random"}.get(way.method, "random_learned" if METHODS[way.method].gate != "random" else "")
    rival = next((rival for rival in ways if (rival.method, rival.requested) == (chance, way.requested)), None)
    gained = None if rival is None else behind(rival, way)
    return {
        "method": way.method, "on_device": way.on_device, "asked": way.requested, "rate": way.rate,
        "device_ms": way.cost,
        "mean_ms": way.cost + way.rate * verified_ms[METHODS[way.method].decoding],
        "episodes": way.episodes, "success": vars(way.success), "over_chance": None if gained is None else vars(gained),
    }  # fmt: skip


def _of_others(env: str, share: float) -> str | None:
    """The advice for other policies of an environment with the same share of their target's time."""
    steps = json.loads(TABLE.read_text()).get(env, [])
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
    if wanted := [name for name in _possible(pair) if name not in known]:
        yield (
            f"success of {', '.join(wanted)}: specact eval {source} --methods {','.join(wanted)} "
            f"--rate 0.4 --out runs/{pair.name}-advice, then --runs runs/{pair.name}-advice"
        )
    most = max((way.episodes for way in ways), default=0)
    if few := sorted({way.method for way in ways if way.episodes < ENOUGH * most}):
        yield f"enough episodes of {', '.join(few)}, which have less than half of the {most} of others and are left out"


def _possible(pair: Pair[Any]) -> list[str]:
    """The methods that a recommendation for this pair compares."""
    has_head = has_fitting_head(pair)

    def runs(name: str) -> bool:
        try:
            return rollout_of(pair, METHODS[name]).drafter() is not None and (has_head or not METHODS[name].needs_head)
        except SpecactError:
            return False

    # Without a draft policy nothing acts where a gate does not ask.
    undrafted = isinstance(pair.parts, TokenParts | FlowParts) and pair.parts.draft is None
    return [*filter(runs, _DECODED if undrafted else (*_DECODED, *_DRAFTED))]
