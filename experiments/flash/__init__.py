"""FLASH on our flow policies: success and cost of checked rounds, their controls, and other training seeds."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from matplotlib.figure import Figure

from experiments.figures import add_series, points_of
from experiments.grid import ROOT, Cell, Results, Run, evaluated, evaluation_cell, trained
from experiments.measure import interleaved, relative_costs, target_path
from experiments.report import Picture, Report, Table, contrast_table, glossary, methods_of, named, one_family, under
from specact.lab.evaluation.run import Evaluation
from specact.lab.rollout.methods import composed
from specact.lab.rollout.rollout import EpisodeRange
from specact.load import load_pair, load_policy
from specact.observation import Window
from specact.pair import Answer, Pair, Target
from specact.rng import Role, StepAddress, StepStreams, stream
from specact.systems.flash import Check, FlashVerifier, Round, RoundAnswer, RoundRequest, Rounds
from specact.systems.flow import FLASH as BLOCK
from specact.systems.flow import ROUNDS, FlowParts, load_flash
from specact.types import Outcome, Proposal

# For each policy: episodes of a shard, and episodes on which rounds are timed.
POLICIES = {"pusht-flow": (20, 4), "metaworld-flow": (10, 10)}
STUDY = (
    "full", "full_5", "full_3", "full_2", "full_1", "flash", "flash_fitted", "flash_unguarded", "flash_stale",
    "flash_last", "flash_last_fitted", "block", "unchecked", "unchecked_fitted",
)  # fmt: skip
SEEDS, OF_SEEDS = (1, 2), ("full", "full_2", "full_1", "flash", "flash_fitted", "unchecked")
SHUFFLED = ("full", "full_2", "flash", "flash_shuffled", "flash_fitted", "flash_fitted_shuffled")
# What the report's main table and its picture show.
MAIN = (
    "full", "full_2", "full_1", "flash", "flash_fitted", "flash_shuffled", "unchecked", "block", "flash_last",
    "flash_last_fitted",
)  # fmt: skip
DRAWN = {
    "flash": "FLASH", "flash_fitted": "FLASH, fitted check", "flash_shuffled": "FLASH, other verdicts",
    "unchecked": "drafts unchecked", "block": "draft alone",
}  # fmt: skip
KINDS = {
    "full_10": "full, 10 steps", "full_5": "full, 5 steps", "full_3": "full, 3 steps", "full_2": "full, 2 steps",
    "full_1": "full, 1 step", "check": "draft and check, accepted", "failed": "draft and check, then full",
    "given": "check of a chunk that is there", "given_failed": "check of a chunk that is there, then full",
    "stale": "draft and check on an old cache", "block": "encoder and draft alone",
}  # fmt: skip

_ACCEPT_ALL = Check(within=1e9, guarded=False)


@dataclass(frozen=True)
class ControlRounds(Rounds):
    """Rounds with another verifier, for a target in this process."""

    kind: type[FlashVerifier] = FlashVerifier
    local: ClassVar[bool] = True

    def verifier(self, parts: FlowParts, target: Target[RoundAnswer]) -> FlashVerifier:
        return self.kind(target, parts)


def controlled(kind: type[FlashVerifier], rounds: Rounds, about: str) -> ControlRounds:
    """The same rounds with this verifier."""
    return ControlRounds(**vars(rounds) | {"about": about}, kind=kind)


class ShuffledVerifier(FlashVerifier):
    """Uses a random one of all verdicts so far: the same distribution, independent of the scene; one per robot."""

    def __init__(self, target: Target[RoundAnswer], parts: FlowParts) -> None:
        super().__init__(target, parts)
        self._streams = StepStreams()
        # Accepted actions of each check, and whether a gripper's change ended them.
        self._verdicts: list[tuple[int, bool]] = []

    def judge(self, answer: Answer[RoundAnswer], proposal: Proposal, address: StepAddress) -> Outcome:
        real = answer.value.round(proposal.evidence)
        used = self._exchanged(answer.value, proposal, real, address) if real.checked else real
        return used.outcome(self.parts, answer.times)

    def _exchanged(self, answer: RoundAnswer, proposal: Proposal, real: Round, address: StepAddress) -> Round:
        self._verdicts.append((real.accepted, real.switches))
        drawn = self._verdicts[self._streams(Role.GATE, address).integers(len(self._verdicts))]
        if drawn == (real.accepted, real.switches):
            return real
        if drawn[0] == 0:
            full = answer.round(replace(proposal.evidence, full=True, drafted=None))
            return replace(full, checked=True, deviation=real.deviation)
        whole = answer.round(replace(proposal.evidence, check=_ACCEPT_ALL))
        return replace(whole, accepted=drawn[0], switches=drawn[1], deviation=real.deviation)


class StaleVerifier(FlashVerifier):
    """Checks on the prefix cache of the last full round, as in the released code; an episode's first round is full."""

    cache: Any = None

    def judge(self, answer: Answer[RoundAnswer], proposal: Proposal, address: StepAddress) -> Outcome:
        fresh, request = answer.value, proposal.evidence
        result = fresh.round(request) if request.full else replace(fresh, cache=self.cache).round(request)
        if result.full:
            fresh = replace(fresh, cache=fresh.target.policy.networks.cache([fresh.window]))
            self.cache = fresh.cache
            if not request.full:
                result = replace(fresh.round(replace(request, full=True)), checked=True, deviation=result.deviation)
        return result.outcome(self.parts, answer.times)


def varied(name: str, about: str, **changes: Any) -> Rounds:
    """Rounds of the package with other values of some fields."""
    return replace(ROUNDS[name], about=about, **changes)


_OTHERS, _FIT = "the verdict of another of its rounds", {"levels": None, "within": None}
# Rounds that the package does not have.
CONTROLS: dict[str, Rounds] = {
    "flash_shuffled": controlled(
        ShuffledVerifier, ROUNDS["flash"], f"FLASH with {_OTHERS}, drawn at random: the control"
    ),
    "flash_fitted_shuffled": controlled(
        ShuffledVerifier, ROUNDS["flash_fitted"],
        f"FLASH with fitted noise levels and delta, and {_OTHERS}: the control",
    ),
    "flash_unguarded": varied("flash", "FLASH without guards and periodic full rounds", guarded=False, periodic=False),
    "flash_stale": controlled(StaleVerifier, ROUNDS["flash"], "FLASH, checked on the cache of the last full round"),
    "flash_last_fitted": varied("flash_last", "the fitted check of what is left of the last chunk", **_FIT),
    "flash_policy_fitted": varied("flash_policy", "the fitted check of a draft policy's chunk", **_FIT),
    "unchecked_fitted": varied(
        "unchecked", "drafts unchecked, as many full rounds as fitted FLASH, at random: the control",
        rate_of="flash_fitted", **_FIT,
    ),
}  # fmt: skip
# In the order of the page, with their rivals.
RIVALS: dict[str, tuple[str, ...]] = {
    "full": (), "full_5": (), "full_3": (), "full_2": ("full",), "full_1": ("full",),
    "flash": ("full", "full_2", "unchecked", "flash_last", "flash_unguarded", "flash_shuffled"),
    "flash_fitted": ("full", "full_2", "unchecked_fitted", "flash_fitted_shuffled"),
    "flash_shuffled": (), "flash_fitted_shuffled": (), "flash_unguarded": (), "flash_stale": (), "flash_device": (),
    "flash_last": (), "flash_last_fitted": (), "flash_policy": (), "flash_policy_fitted": (), "block": ("full",),
    "unchecked": (), "unchecked_fitted": (),
}  # fmt: skip
METHODS = {name: composed(name, (ROUNDS | CONTROLS)[name], *rivals) for name, rivals in RIVALS.items()}


def plan(run: Run) -> Iterator[Cell]:
    """Every policy in closed loop and its rounds; then the shuffled verdicts, and other seeds, which are trained."""
    for bundle, (shard, on_path) in POLICIES.items():
        evaluation = Evaluation(bundle, None, tuple(METHODS[name] for name in STUDY), 200, seed=run.seed, shard=shard)
        yield evaluation_cell(f"{bundle}/summary", evaluation)
        yield Cell(f"{bundle}/rounds", partial(measure_rounds, bundle, on_path))
        shuffled = replace(evaluation, methods=tuple(METHODS[name] for name in SHUFFLED))
        yield evaluation_cell(f"shuffled/{bundle}", shuffled)
    for seed in () if run.quick else SEEDS:
        yield Cell(f"seeds/{seed}", partial(other_training, seed))


def other_training(seed: int, folder: Path, run: Run) -> dict[str, Any]:
    """Trains PushT's flow and its block with another seed, and evaluates them on the study's episodes."""
    data = run.needed("the demonstrations of PushT").resolve()
    recipe = (ROOT / "recipes" / "flow-pusht.toml").read_text().replace("pusht-flow", f"pusht-flow-{seed}")
    bundle = trained(f"{recipe}seed = {seed}\n", folder / "flow", run, "--data", data)
    if not (bundle / BLOCK).exists():
        recipe = f'kind = "flash"\nbundle = "block"\ntarget = "{bundle}"\nexecute = 8\nseed = {seed}\n'
        shutil.copytree(trained(recipe, folder / "block", run, "--data", data), bundle / BLOCK)
    methods = tuple(METHODS[name] for name in OF_SEEDS)
    return evaluated(Evaluation(str(bundle), None, methods, 200, seed=run.seed), folder / "run", run)


def measure_rounds(bundle: str, episodes: int, folder: Path, run: Run) -> dict[str, Any]:
    """Costs and acceptance along the target's own rollouts, with the check's figures from the block's bundle."""
    pair, seed = load_pair(bundle), run.seed
    block = load_flash(Path(pair.path or "") / BLOCK, load_policy(str(pair.path)))
    numbers = EpisodeRange.FLOW_PATHS.episodes(run.few(episodes))
    windows = [record.proposal.window for record in target_path(pair, pair.env, numbers, seed)]
    return {
        "fingerprint": pair.fingerprint, "check": block.manifest.check,
        "acceptance": acceptance(pair, windows, seed), "costs": measure_costs(pair, windows, seed),
    }  # fmt: skip


def measure_costs(pair: Pair[Any], windows: list[Window], seed: int) -> dict[str, dict[str, float]]:
    """The :func:`~experiments.measure.relative_costs` of each kind of round, in random order at each observation.

    ``full_N``: a full round of N steps; ``check``: a block's draft that is accepted; ``failed``: one that is not, with
    the full round behind it; ``given`` and ``given_failed``: the check of a chunk that is there; ``stale``: the check
    on another window's cache; ``block``: the draft alone. Relative to ``full_10``.
    """
    target, order = pair.target(), stream(seed, Role.GATE)
    never, always = Check(within=0.0, guarded=False), _ACCEPT_ALL
    cache = pair.parts.policy.networks.cache([pair.parts.policy.spec.observation.select(windows[0])])
    middle = pair.units.to_environment(
        np.zeros((pair.parts.policy.spec.chunk, pair.parts.policy.spec.actions), np.float32)
    )
    kinds = {f"full_{steps}": RoundRequest(True, steps=steps) for steps in (1, 2, 3, 5, 10)} | {
        "check": RoundRequest(False, check=always),
        "failed": RoundRequest(False, check=never),
        "given": RoundRequest(False, middle, always),
        "given_failed": RoundRequest(False, middle, never),
    }
    drafter = pair.composed(rounds=METHODS["block"].composition).drafter()

    def run(request: RoundRequest, numbered: tuple[int, Window], cache: Any = None) -> object:
        answer = target.answer(numbered[1], StepAddress(seed, 0, 0, numbered[0]))
        return replace(answer, cache=cache).round(request)

    work: dict[str, Callable[[tuple[int, Window]], object]] = {
        **{name: partial(run, request) for name, request in kinds.items()},
        "stale": partial(run, kinds["check"], cache=cache),
        "block": lambda numbered: drafter.propose(numbered[1], order),
    }
    seconds = interleaved(work, enumerate(windows), order)
    return relative_costs(seconds, seconds["full_10"])


def acceptance(pair: Pair[Any], windows: list[Window], seed: int) -> dict[str, dict[str, float]]:
    """FLASH's mean accepted share of the executed actions of its drafts: ``seen``, and with cameras ``blank``."""
    target, request = pair.target(), RoundRequest(False, check=Check(guarded=False))

    def mean(seen: list[Window]) -> float:
        answers = [target.answer(window, StepAddress(seed, 0, 1, number)) for number, window in enumerate(seen)]
        return float(np.mean([answer.round(request).accepted for answer in answers])) / pair.execute

    def blank(window: Window) -> Window:
        grey = {name: np.full_like(window.arrays[name], 128) for name in images}
        return replace(window, arrays={**window.arrays, **grey})

    shares, images = {"seen": mean(windows)}, pair.parts.policy.spec.observation.images
    if images:
        shares["blank"] = mean([blank(window) for window in windows])
    return {"flash": shares}


def cost_of(rounds: Rounds, metrics: Mapping[str, Any], costs: Mapping[str, Mapping[str, float]]) -> float:
    """Milliseconds per executed action of a composition's rollouts: every round at the cost of its kind."""
    ms = {name: cost["ms"] for name, cost in costs.items()}
    full, failed, sent = metrics["full"], metrics["failed"], metrics["sent"]
    drafts_block = rounds.proposes == "block" and not rounds.on_device
    check, failed_check = (ms["check"], ms["failed"]) if drafts_block else (ms["given"], ms["given_failed"])
    spent = (full - failed) * ms[f"full_{rounds.steps}"] + failed * failed_check
    spent += (sent - full) * (ms["stale"] if getattr(rounds, "kind", None) is StaleVerifier else check)
    if rounds.on_device:
        spent += ms["block"]
    return float(spent / metrics["actions_per_round"])


def report(results: Results) -> Report:
    """Success, time and rounds of FLASH and its controls on both policies, and one family of contrasts."""
    runs = {name: results[name] for name in POLICIES}
    rounds = {name: run["rounds"] for name, run in runs.items()}
    methods = [row for name, run in runs.items() for row in _costed(name, run["summary"], rounds[name])]
    shuffled = [row for name, run in results["shuffled"].items() for row in _costed(name, run, rounds[name])]
    cells = {(row["policy"], row["name"]): row for row in shuffled + methods}
    main = [
        {"name": name} | {policy.removesuffix("-flow"): cells[policy, name] for policy in POLICIES} for name in MAIN
    ]
    contrasts = one_family([
        *(row for name, run in runs.items() for row in under(name, run["summary"]["contrasts"])),
        *(row for name, run in results["shuffled"].items() for row in under(name, run["contrasts"])
          if row["second"].endswith("shuffled")),
        *(row for seed, run in results["seeds"].items()
          for row in under(f"pusht-flow, training seed {seed}", run["contrasts"])),
    ])  # fmt: skip
    tables = [
        Table(
            "main", "Success in 200 paired episodes; cost of an executed action, that of `full` being 1, from the "
            "times of each kind of round.",
            "method | PushT | cost | metaworld | cost",
            "`{name}` | {pusht[success]:ci2} | {pusht[share]:.2f} | {metaworld[success]:ci2} | {metaworld[share]:.2f}",
            main,
        ),
        glossary(METHODS, "rounds"),
        Table("closed-loop", "Every method in 200 paired episodes of each policy.", rows=methods),
        Table("shuffled", "The run with verdicts of other rounds, 200 paired episodes.", rows=shuffled),
        Table("costs", "Time of each kind of round on the same observations, in random order.",
              rows=[{"policy": name, "label": label, **cell["costs"][kind]}
                    for name, cell in rounds.items() for kind, label in KINDS.items()]),
        Table(
            "check", "What the check tells on held-out observations, by level of noise: slope and correlation of its "
            "distance with the true one; whether it separates the target's own chunks from those for another scene; "
            "shares within .15.",
            rows=[{"policy": name, **row} for name, cell in rounds.items() for row in named(cell["check"]["levels"])],
        ),
        contrast_table(contrasts, family="success on both policies, and of three training seeds on PushT"),
    ]  # fmt: skip
    shorts = {"pusht-flow": "pusht", "metaworld-flow": "metaworld"} | {
        f"pusht-flow, training seed {seed}": f"seed{seed}" for seed in results["seeds"]
    }
    facts: dict[str, Any] = {f"{shorts[row['on']]}_{row['first']}_{row['second']}": row for row in contrasts}
    facts |= {name.removesuffix("-flow"): cell for name, cell in rounds.items()}
    facts |= {"main": {row["name"]: row for row in main}}
    return Report(tables, facts, [Picture("flash.svg", partial(draw, cells))])


def _costed(policy: str, summary: Mapping[str, Any], rounds: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Methods with their cost per executed action, and its share of that of full rounds."""
    compositions: Any = {name: method.composition for name, method in METHODS.items()}
    ms = {name: cost_of(compositions[name], metrics, rounds["costs"]) for name, metrics in summary["methods"].items()}
    for row in methods_of(summary):
        yield {"policy": policy, **row, "ms": ms[row["name"]], "share": ms[row["name"]] / ms["full"]}


def draw(cells: Mapping[tuple[str, str], Mapping[str, Any]]) -> Figure:
    """Success over cost, a panel for each policy."""
    figure = Figure(figsize=(4.8, 6.2), layout="constrained")
    for policy, axes in zip(POLICIES, figure.subplots(2, 1), strict=True):
        rows = {name: [cells[policy, name]] for name in DRAWN} | {
            "full": [cells[policy, f"full{steps}"] for steps in ("", "_5", "_3", "_2", "_1")]
        }
        series = {name: points_of({row["share"]: row["success"] for row in curve}) for name, curve in rows.items()}
        names = {"full": "10 to 1 steps"} | DRAWN
        add_series(
            axes, series, "cost of an executed action (10 steps: 1)", "success", policy.removesuffix("-flow"), names
        )
        axes.set_xlim(left=0.0)
    return figure
