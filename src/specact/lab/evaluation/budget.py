"""Where device compute belongs: what ways to act cost on the device, send and achieve, and which one is enough."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.families.codes.bundle import Bundle
from specact.families.codes.head import HeadDraft, load_head
from specact.families.head import HEAD
from specact.families.load import AnyPair
from specact.gates.settings import LEARNED, GateChoices
from specact.lab.rollout.methods import load_method
from specact.lab.statistics import Interval, seeds_interval, wilson
from specact.rng import Role, StepAddress, stream

# A way that loses more success than this on average is never called enough, however few episodes there are.
MARGIN = 0.05
TARGET, HEAD_DRAFT = "target", "head_draft"
# Of two ways that send as much, the one whose gate needs less comes first: chance no score, learned ones a head.
_GATES = ("never", "random", "deviation", "uncertainty", "learned", "learned_action", "always")


@dataclass(frozen=True)
class Way:
    """One way to act.

    Attributes:
        draft: which draft, in words; empty where none is evaluated.
        method: see :data:`~specact.lab.rollout.methods.METHODS`.
        asked: transmission rate that was asked for, in [0, 1].
        rate: that was achieved.
        cost: time of an inference on the device, decision of the gate included: [ms], or as a share of the target's.
        successes: by training seed, whether each episode succeeded, by a name of the episode that all ways share.
    """

    draft: str
    method: str
    asked: float
    rate: float
    cost: float
    successes: Mapping[int, Mapping[str, bool]]

    @cached_property
    def success(self) -> Interval:
        """Mean over training seeds, with the wider of two 95 % intervals at either end.

        They are that of :func:`~specact.lab.statistics.seeds_interval`, and Wilson's over all episodes, which has a
        width even where every episode went alike.
        """
        groups = [_as_numbers(one.values()) for one in self.successes.values()]
        over_seeds, every = seeds_interval(groups), np.concatenate(groups)
        pooled = wilson(int(every.sum()), len(every))
        return Interval(over_seeds.mean, min(over_seeds.low, pooled.low), max(over_seeds.high, pooled.high))

    @property
    def episodes(self) -> int:
        """In all, over all training seeds."""
        return sum(map(len, self.successes.values()))

    @property
    def needs_server(self) -> bool:
        """Whether anything is ever sent."""
        return self.asked > 0.0

    def __str__(self) -> str:
        """What to do, in words."""
        if self.method == "target_on_device":
            return "the target on the device"
        if self.method == TARGET:
            return "the target on a server at every inference, without a draft"
        of = f"the {self.draft}" if self.draft else "the draft"
        if self.method == "draft":
            return f"{of} alone"
        if self.method == HEAD_DRAFT:
            return f"the learned gate's head on {of} as the draft, alone"
        if self.method == "hybrid":
            return f"{of}, every inference verified"
        how = "at random" if load_method(self.method).gate == "random" else f"by the gate {self.method}"
        return f"{of}, {self.asked:.0%} verified {how}"


@dataclass(frozen=True)
class Choice:
    """What to do with a budget.

    Attributes:
        way: the simplest that is enough.
        best: the one with the most success; ``way`` was not shown to be worse.
        behind: success of ``best`` minus that of ``way``, on the same episodes.
    """

    way: Way
    best: Way
    behind: Interval


def behind(way: Way, best: Way) -> Interval | None:
    """Success of ``best`` minus that of ``way`` over the episodes of both; None where they share none."""
    away = []
    for seed in sorted(way.successes.keys() & best.successes.keys()):
        one, other = way.successes[seed], best.successes[seed]
        if shared := sorted(one.keys() & other.keys()):
            away.append(_as_numbers(other[name] for name in shared) - _as_numbers(one[name] for name in shared))
    return seeds_interval(away) if away else None


def choose(ways: Iterable[Way], budget: float, most_rate: float = 1.0) -> Choice | None:
    """The simplest way within a budget that is not shown to be worse than the best within it; None if nothing fits.

    A way is enough if the 95 % interval of what it is :func:`behind` reaches down to 0, and its mean is at most
    :data:`MARGIN`. Simplest is the target on the device, then what needs no server, then what asks for fewer
    transmissions, then what needs less of a gate, then what costs less.

    Args:
        ways: to choose from.
        budget: the most that an inference may cost on the device, in the unit of the ways' costs.
        most_rate: the most that may be asked for.
    """
    able = sorted((way for way in ways if way.cost <= budget and way.asked <= most_rate), key=_simplicity)
    if not able:
        return None
    best = max(able, key=lambda way: way.success.mean)
    for way in able:
        lost = behind(way, best)
        if lost is not None and lost.low <= 0.0 and lost.mean <= MARGIN:
            return Choice(way, best, lost)
    raise AssertionError("the best way is never behind itself")


def without_server(ways: Sequence[Way]) -> float | None:
    """The least budget from which on, at every larger one as well, what :func:`choose` finds needs no server.

    None if there is none, or nothing to choose from.
    """
    least = None
    for budget in sorted({way.cost for way in ways}, reverse=True):
        found = choose(ways, budget)
        assert found is not None, "a way fits into its own cost"
        if found.way.needs_server:
            break
        least = budget
    return least


def advice(ways: Sequence[Way], budgets: Sequence[float], unit: str) -> str:
    """What to do at which budget, in a sentence.

    Args:
        ways: to choose from.
        budgets: ascending; neighbours with the same answer are told together.
        unit: of the budgets, in words: ``ms``, ``of the target's time``.
    """
    parts: list[str] = []
    before: Way | None = None
    for budget in budgets:
        found = choose(ways, budget)
        if found is None or found.way is before:
            continue
        before = found.way
        parts.append(f"from {budget:.2g} {unit} on {told(found)}")
    free = without_server(ways)
    last = "a server is needed at every budget" if free is None else f"nobody needs a server from {free:.2g} {unit} on"
    return "; ".join([*parts, last])


def told(choice: Choice) -> str:
    """A choice in words, with its success and whether a gate is needed."""
    way = choice.way
    if load_method(way.method).gate in ("never", "always"):
        gate = ", and no gate is needed"
    elif load_method(way.method).gate == "random":
        gate = ", and no gate was shown to do better than chance"
    else:
        gate = ""
    success, best = way.success, choice.best
    over = "" if best is way else f"; most has {best}, {best.success.mean:.2f}"
    return f"{way}: success {success.mean:.2f} [{success.low:.2f}, {success.high:.2f}]{gate}{over}"


def study_ways(results: Mapping[str, Any], task: str, *, alike: bool = False) -> list[Way]:
    """The ways of a task of a study (``benchmarks/results/budget.json``); costs are shares of the target's time.

    Args:
        results: ``rows``, each with ``task``, ``draft``, ``method``, ``asked`` and ``seeds``: by training seed the
            achieved ``rate``, the ``cost``, and ``successes``, a character 0 or 1 for every episode.
        task: which.
        alike: with those training seeds alone at which every way was judged, so that ways can be compared.
    """
    rows = [row for row in results["rows"] if row["task"] == task]
    common = set[str].intersection(*(set(row["seeds"]) for row in rows)) if alike and rows else None
    ways = []
    for row in rows:
        seeds = {seed: of for seed, of in row["seeds"].items() if common is None or seed in common}
        if seeds:
            mean = {key: float(np.mean([of[key] for of in seeds.values()])) for key in ("rate", "cost")}
            won = {
                int(seed): {str(number): one == "1" for number, one in enumerate(of["successes"])}
                for seed, of in seeds.items()
            }
            ways.append(Way(row["draft"], row["method"], row["asked"], mean["rate"], mean["cost"], won))
    return ways


def device_cost(method: str, parts: Mapping[str, float]) -> float:
    """What an inference of a method takes on the device, in the unit of the times of the pair's parts.

    Raises:
        KeyError: for a part that was not measured.
    """
    how = load_method(method)
    if how.on_device:
        return parts["target"]
    if not how.waits_for_draft:
        return 0.0
    decision = 0.0 if how.gate in ("never", "always") else parts[f"gate {how.gate}"]
    return decision + parts[HEAD_DRAFT if how.proposes == "head" else "draft"]


def measure_parts(pair: AnyPair, rounds: int = 400) -> dict[str, float]:
    """Median milliseconds of a pair's parts on one core of this machine, called in turns.

    ONNX Runtime, one thread, batch 1, observations of zeros.

    Returns:
        ``draft``, ``target`` (where the pair has it), ``head_draft`` (draft and head, where the pair has one), and for
        each gate that the pair can have ``gate NAME``: a decision, of a learned gate with its head.
    """
    window, rng, drafter = pair.observation.zeros(), stream(0, Role.GATE), pair.drafter
    proposal = drafter.propose(window, rng)
    calls: dict[str, Callable[[], object]]
    if isinstance(pair, Bundle):
        draft, target = pair.draft, pair.local_target
        calls = {"draft": lambda: draft.infer(window)}
        if target is not None:
            calls["target"] = lambda: target.infer(window)
    else:
        answers = pair.target
        calls = {
            "draft": lambda: drafter.propose(window, rng),
            "target": lambda: answers.answer(window, StepAddress(0, 0, 0, 0)),
        }
    has_head = pair.path is not None and (pair.path / HEAD).is_file()
    if isinstance(pair, Bundle) and has_head:
        proposer = HeadDraft(pair.draft, load_head(pair))
        calls[HEAD_DRAFT] = lambda: proposer.infer(window)
    gates = ["random", "deviation"] + ["uncertainty"] * isinstance(pair, Bundle) + list(LEARNED) * has_head
    for name in gates if isinstance(pair, Bundle) else [gate for gate in gates if gate != "learned_action"]:
        gate = GateChoices().settings(name, pair).build(pair)
        gate.reset()
        gate.update(proposal.actions[0], proposal.actions[0])
        calls[f"gate {name}"] = lambda gate=gate: gate.decide(proposal, rng)  # type: ignore[misc]
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 10):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - start)
    return {name: 1e3 * float(np.median(times[10:])) for name, times in taken.items()}


def _simplicity(way: Way) -> tuple[bool, bool, float, int, float]:
    how = load_method(way.method)
    gate = _GATES.index(how.gate) if how.gate in _GATES else len(_GATES)
    return not how.on_device, way.needs_server, way.asked, gate, way.cost


def _as_numbers(values: Iterable[bool]) -> NDArray[np.float64]:
    return np.fromiter(values, dtype=np.float64)
