"""Choosing a method under a budget of device compute: cost, transmission rate and success of every option."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import BundleError
from specact.families.codes.pair import CodeParts
from specact.gates.learned import has_fitting_head
from specact.gates.settings import LEARNED, gate_settings
from specact.lab.evaluation.cost import decision, median_ms
from specact.lab.rollout.families import rollout_of
from specact.lab.rollout.methods import HYBRID, load_method
from specact.lab.rollout.statistics import Interval, seeds_interval, wilson
from specact.pair import Pair
from specact.rng import StepAddress
from specact.systems.flow import ROUNDS
from specact.systems.tokens import DECODINGS
from specact.wire import messages
from specact.wire.exchange import Request

# A way that loses more success than this on average is never accepted, however wide its interval is.
MARGIN = 0.05
# A way with a smaller share of the episodes of the one with most is not chosen, nor compared with: one that wins two of
# two would be the best.
ENOUGH = 0.5
TARGET, HEAD_DRAFT = "target", "head_draft"
# What was recommended for other policies: by task, from which share of the target's time on, and the sentence.
TABLE = Path(__file__).with_name("advice.json")
# Gates by complexity: random needs no score, deviation and uncertainty no head.
_GATES = ("never", "random", "deviation", "uncertainty", "learned", "learned_action", "always")
# Decodings without a drafter.
_UNDRAFTED = {
    name
    for name, decoding in DECODINGS.items()
    if (decoding.proposes, decoding.then, decoding.gate) == ("nothing", "none", "always")
} | {name for name, rounds in ROUNDS.items() if rounds.proposes == "nothing" and not rounds.local}


@dataclass(frozen=True)
class Way:
    """One way to act.

    Attributes:
        draft: description of the draft; empty where none is evaluated.
        method: see :data:`~specact.lab.rollout.methods.METHODS`.
        asked: requested transmission rate, in [0, 1].
        rate: achieved one.
        cost: time of an inference on the device, decision of the gate included: [ms], or as a share of the target's.
        successes: by training seed, the success of each episode by its name; names are common to all ways.
        decoded_on_device: whether the target of :func:`runs_alone` runs on the device.
    """

    draft: str
    method: str
    asked: float
    rate: float
    cost: float
    successes: Mapping[int, Mapping[str, bool]]
    decoded_on_device: bool = False

    @cached_property
    def success(self) -> Interval:
        """Mean over training seeds, with the union of two 95 % intervals.

        These are :func:`~specact.lab.rollout.statistics.seeds_interval`, and Wilson's over all episodes, whose width is
        not zero where all episodes have the same outcome.
        """
        groups = [_as_floats(one.values()) for one in self.successes.values()]
        over_seeds, every = seeds_interval(groups), np.concatenate(groups)
        pooled = wilson(int(every.sum()), len(every))
        return Interval(over_seeds.mean, min(over_seeds.low, pooled.low), max(over_seeds.high, pooled.high))

    @property
    def episodes(self) -> int:
        """Their number, over all training seeds."""
        return sum(map(len, self.successes.values()))

    @property
    def needs_server(self) -> bool:
        """Whether any request is sent."""
        return self.asked > 0.0

    @property
    def on_device(self) -> bool:
        """Whether the target runs on the device, without a draft and a server."""
        return self.decoded_on_device or load_method(self.method).on_device

    def __str__(self) -> str:
        """A description."""
        method = load_method(self.method)
        decoded = f" ({self.method})" if method.decoding else ""
        if self.on_device:
            return f"the target on the device{decoded}"
        if self.method == TARGET or runs_alone(self.method):
            return f"the target on a server at every inference{decoded}, without a draft"
        of = f"the {self.draft}" if self.draft else "the draft"
        if method.gate == "never":
            head = f"the learned gate's head on {of} as the draft" if method.proposes == "head" else of
            return f"{head}{decoded}{',' * (method.proposes == 'head')} alone"
        if method.gate == "always":
            return f"{of}{decoded}, every inference verified"
        how = "at random" if method.gate == "random" else f"by the gate {method.gate if decoded else self.method}"
        return f"{of}{decoded}, {self.asked:.0%} verified {how}"


@dataclass(frozen=True)
class Choice:
    """The recommendation for a budget.

    Attributes:
        way: the simplest acceptable one.
        best: the one with the highest success; ``way`` is not significantly worse.
        behind: success of ``best`` minus that of ``way``, on the same episodes.
    """

    way: Way
    best: Way
    behind: Interval


def behind(way: Way, best: Way) -> Interval | None:
    """Success of ``best`` minus that of ``way`` over their common episodes; None where there are none."""
    differences = []
    for seed in sorted(way.successes.keys() & best.successes.keys()):
        one, other = way.successes[seed], best.successes[seed]
        if shared := sorted(one.keys() & other.keys()):
            differences.append(_as_floats(other[name] for name in shared) - _as_floats(one[name] for name in shared))
    return seeds_interval(differences) if differences else None


def choose(ways: Iterable[Way], budget: float, most_rate: float = 1.0) -> Choice | None:
    """The simplest way within a budget that is not significantly worse than the best one; None if none fits.

    A way is acceptable if the 95 % interval of its deficit :func:`behind` the best contains 0, and the mean is at most
    :data:`MARGIN`. Ways are ordered by simplicity: the target on the device, then ways without a server, then by
    requested rate, complexity of the gate, and cost. Ways with few episodes are left out, see :data:`ENOUGH`.

    Args:
        ways: to choose from.
        budget: maximum cost of an inference on the device, in the unit of the ways' costs.
        most_rate: maximum requested rate.
    """
    ways = list(ways)
    enough = ENOUGH * max((way.episodes for way in ways), default=0)
    affordable = sorted(
        (way for way in ways if way.cost <= budget and way.asked <= most_rate and way.episodes >= enough),
        key=_simplicity,
    )
    if not affordable:
        return None
    best = max(affordable, key=lambda way: way.success.mean)
    for way in affordable:
        deficit = behind(way, best)
        if deficit is not None and deficit.low <= 0.0 and deficit.mean <= MARGIN:
            return Choice(way, best, deficit)
    raise AssertionError("the best way is never behind itself")


def without_server(ways: Sequence[Way]) -> float | None:
    """The least budget from which on :func:`choose` always finds a way without a server; None if there is none."""
    least = None
    for budget in sorted({way.cost for way in ways}, reverse=True):
        choice = choose(ways, budget)
        if choice is None or choice.way.needs_server:
            break
        least = budget
    return least


def describe(choice: Choice) -> str:
    """Describes a choice, with its success and whether a gate is needed."""
    way = choice.way
    if load_method(way.method).gate in ("never", "always"):
        gate = ", and no gate is needed"
    elif load_method(way.method).gate == "random":
        gate = ", and no gate was shown to do better than chance"
    else:
        gate = ""
    success, best = way.success, choice.best
    comparison = "" if best is way else f"; most has {best}, {best.success.mean:.2f}"
    return f"{way}: success {success.mean:.2f} [{success.low:.2f}, {success.high:.2f}]{gate}{comparison}"


def runs_alone(method: str) -> bool:
    """Whether a method decodes the target's chunks without a drafter, and so runs on a server or on the device alone.

    These are a token policy's greedy decoding, and full rounds of a flow policy in any number of steps.
    """
    return load_method(method).decoding in _UNDRAFTED


def device_cost(method: str, parts: Mapping[str, float], rate: float, *, on_device: bool = False) -> float:
    """Time of a method's inference on the device, in the unit of ``parts``.

    Args:
        method: its name.
        parts: see :func:`measure_parts`; without ``ask``, as in older results, asking takes no time.
        rate: share of the inferences that are transmitted, in [0, 1].
        on_device: whether a target that :func:`runs_alone` does so there.

    Raises:
        KeyError: for a part that was not measured.
    """
    method_ = load_method(method)
    if on_device or method_.on_device:
        return parts["target"]
    asking = rate * parts.get("ask", 0.0)
    if runs_alone(method) or not method_.waits_for_draft:
        return asking
    decision = 0.0 if method_.gate in ("never", "always") else parts[f"gate {method_.gate}"]
    return asking + decision + parts[HEAD_DRAFT if method_.proposes == "head" else "draft"]


def measure_parts(pair: Pair[Any], rounds: int = 400, gates: Sequence[str] = ()) -> dict[str, float]:
    """Median milliseconds of a pair's parts on one core of this machine, called alternately.

    ONNX Runtime, one thread, batch 1, observations of zeros.

    Args:
        pair: decoded as the method that is timed.
        rounds: number of timed calls.
        gates: further ones to time.

    Returns:
        ``draft``, ``target`` (where the pair has it), ``head_draft`` (draft and head, where the pair has one), ``ask``:
        encoding a request and reading its reply, without a link, and for each gate that the pair can have ``gate
        NAME``: a decision, of a learned gate with its head.
    """
    return measure_together({"": pair}, rounds, gates)[""]


def measure_together(
    pairs: Mapping[str, Pair[Any]], rounds: int = 400, gates: Sequence[str] = ()
) -> dict[str, dict[str, float]]:
    """The parts of several pairs, as :func:`measure_parts`, all called alternately: the machine's other work hits all.

    Args:
        pairs: by name.
        rounds, gates: as there.
    """
    calls = {(name, part): call for name, pair in pairs.items() for part, call in _parts(pair, gates).items()}
    times = median_ms(calls, rounds)
    return {name: {part: ms for (of, part), ms in times.items() if of == name} for name in pairs}


def _parts(pair: Pair[Any], gates: Sequence[str]) -> dict[str, Callable[[], object]]:
    """The parts to time."""
    family, has_head, of_codes = rollout_of(pair, HYBRID), has_fitting_head(pair), isinstance(pair.parts, CodeParts)
    draft = family.call("draft")
    calls = {"draft": draft, "ask": _asking(pair)}
    with suppress(BundleError):  # it is only on a server
        calls["target"] = family.call("target")
    if of_codes and has_head:
        head = family.call("head")
        calls[HEAD_DRAFT] = lambda: (draft(), head())
    learned = (LEARNED if of_codes else LEARNED[:1]) if has_head else ()
    for name in ("random", "deviation", *("uncertainty",) * of_codes, *learned, *gates):
        calls[f"gate {name}"] = decision(gate_settings(name, pair).build(pair), pair)
    return calls


def _asking(pair: Pair[Any]) -> Callable[[], object]:
    """What asking the server takes on the device, besides the link."""
    contract = pair.exchange.contract
    kind = contract.kinds[contract.step_kind]
    received = messages.encode(messages.Reply(1, 1.0, 1.0, 1.0, 1, kind.reply.pack(kind.reply.example())))
    request = Request(contract.observation.zeros(), StepAddress(0, 0, 0, 0), kind.request.example())

    def ask() -> object:
        messages.encode(messages.ask(request, contract, contract.step_kind, 1, 1.0))
        reply = messages.read_reply(received)
        return kind.reply.unpack(reply.arrays) if isinstance(reply, messages.Reply) else None

    return ask


def _simplicity(way: Way) -> tuple[bool, bool, float, int, float]:
    method = load_method(way.method)
    gate = _GATES.index(method.gate) if method.gate in _GATES else len(_GATES)
    return not way.on_device, way.needs_server, way.asked, gate, way.cost


def _as_floats(values: Iterable[bool]) -> NDArray[np.float64]:
    return np.fromiter(values, dtype=np.float64)
