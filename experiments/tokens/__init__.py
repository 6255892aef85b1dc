"""Spec-VLA, KERV and HeiSD on our token policies: gain on the target's own path, success, smaller policies, gates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.flash import METHODS as FLOW
from experiments.grid import DOCS, Cell, Part, Picture, Results, Run, evaluated
from experiments.measure import draw_success, interleaved, outcomes, paired, relative_costs
from experiments.tables import (
    about_table,
    contrast_table,
    difference_table,
    interval_text,
    markdown,
    named,
    optional_text,
    table,
)  # fmt: skip
from experiments.tokens.gain import TOLERANCES, measure_drafters, measure_gain
from experiments.tokens.methods import METHODS
from specact.families.chunks.pair import PairSettings
from specact.lab.evaluation.metrics import END_POINTS, contrasts
from specact.lab.evaluation.run import Evaluation
from specact.lab.rollout.methods import Method, load_method
from specact.lab.rollout.statistics import wilson
from specact.load import load_pair, load_policy, make_pair

PAGE = DOCS / "tokens.md"
DRAFTED = ("draft_9", "draft_fixed")
SYSTEMS = (
    "ar", "strict", "strict_last", "specvla", "specvla_5", "specvla_15", "specvla_20", "specvla_uniform",
    "specvla_device", "last", "filter", "kerv", "kerv_fixed", "kerv_last", "kerv_walk", "kerv_no_tail", "kerv_printed",
    "heisd", "heisd_verified", "heisd_no_switch", "heisd_similar", "heisd_similar_random", "heisd_fixed",
    "heisd_fixed_random", "last_fixed", "retrieval",
)  # fmt: skip
# Compared open loop, on the target's own rollouts; the last ones for targets with a draft policy.
GAIN = (
    "ar", "strict", "strict_last", "strict_bigram", "specvla_5", "specvla", "specvla_15", "specvla_20",
    "specvla_device", "last", "bigram", "filter", "random_tokens", "perfect", "kerv", "heisd_verified", "heisd_fixed",
    "strict_draft", "draft_9", "draft_fixed",
)  # fmt: skip
GATES = ("draft", "hybrid", "random", "adahi", "random_learned", "learned")
GROUPS = (
    ("greedy decoding", "o", ("ar", "strict", "strict_last", "strict_bigram", "strict_draft")),
    ("Spec-VLA", "s", tuple(name for name in METHODS if name.startswith("specvla"))),
    ("other drafters", "v", ("last", "filter", "bigram", "draft_9", "random_tokens", "perfect")),
    ("KERV", "D", tuple(name for name in METHODS if name.startswith("kerv"))),
    ("HeiSD, memory", "^", ("heisd", "heisd_verified", "heisd_fixed", "heisd_no_switch", "heisd_similar", "retrieval")),
    (
        "unverified controls", "x",
        ("heisd_random", "heisd_fixed_random", "heisd_similar_random", "last_fixed", "draft_fixed", "last_random"),
    ),
)  # fmt: skip
# Of each policy: episodes of a shard, those of the target's path, and its draft policy.
POLICIES: dict[str, tuple[int, int, str | None]] = {
    "relocate-tokens": (50, 5, None), "kitchen-tokens": (50, 3, None), "metaworld-tokens": (10, 40, "metaworld-draft"),
}  # fmt: skip
# Policies that decodings are compared to, by label: bundle, method, Euler steps. And the decodings.
OTHERS: dict[str, dict[str, tuple[str, Method, int]]] = {
    "metaworld-tokens": {
        **{f"flow, {steps} steps": ("metaworld-flow", FLOW[f"full_{steps}"], steps) for steps in (1, 2)},
        "one layer": ("metaworld-tokens-small", METHODS["ar"], 10),
    },
    **{
        f"{name}-tokens": {
            "one layer": (f"{name}-tokens-small", METHODS["ar"], 10),
            "regression": (f"{name}-regression", load_method("target_on_device"), 10),
        }
        for name in ("relocate", "kitchen")
    },
}
RIVALS = dict.fromkeys(POLICIES, ("ar", "last", "specvla", "kerv", "last_fixed")) | {
    "metaworld-tokens": ("ar", "specvla", "kerv", "heisd_fixed")
}
ROUND_TRIP_MS = 20.0  # of the modelled link
FEW = 9  # dimensions that fit a cell of a table


def plan(run: Run) -> Iterator[Cell]:
    """Of every policy success in closed loop, gain on the target's path, and other policies; then gates."""
    for bundle, (shard, on_path, draft) in POLICIES.items():
        names: tuple[str, ...] = (*SYSTEMS, *DRAFTED) if draft else SYSTEMS
        # Of relocate's hand nothing is a gripper, so that a strict one changes nothing.
        names = tuple(name for name in names if not (name == "specvla_uniform" and bundle.startswith("relocate")))
        # heisd_similar verifies as many inferences as the fixed pattern.
        evaluation = Evaluation(
            bundle, None, tuple(METHODS[name] for name in names), 200, seed=run.seed, shard=shard, draft=draft,
            rate=1.0 / 3.0,
        )  # fmt: skip
        yield Cell(f"{bundle}/summary", partial(with_outcomes, evaluation))
        yield Cell(f"{bundle}/gain", partial(gain, bundle, on_path))
        if not run.quick:  # these are trained: recipes/*-tokens-small.toml and *-regression.toml
            yield Cell(f"{bundle}/others", partial(others, bundle, shard))
    gated = Evaluation(
        "metaworld-tokens", None, GATES, 200, seed=run.seed, shard=10, rate=0.4, calibration_episodes=20,
        draft="metaworld-draft", decoding="specvla",
    )  # fmt: skip
    # A learned gate needs a head: specact calibrate --gate learned, in a copy of the bundle that --data names.
    if run.data is not None:
        yield Cell("metaworld-tokens/gated", partial(with_outcomes, replace(gated, bundle=str(run.data))))


def with_outcomes(evaluation: Evaluation, folder: Path, run: Run) -> dict[str, Any]:
    """What the tables need of a run, with the outcome of every episode."""
    summary = evaluated(evaluation, folder, run)
    found = {
        method: {point: outcomes(folder, method, point).tolist() for point in END_POINTS}
        for method in summary["methods"]
    }
    return summary | {"outcomes": found}


def gain(bundle: str, episodes: int, folder: Path, run: Run) -> dict[str, Any]:
    """Decodings and drafters on the target's own rollouts."""
    pair, episodes = load_pair(bundle, draft=POLICIES.get(bundle, (0, 0, None))[2]), min(run.few(episodes), episodes)
    names = [name for name in GAIN if "draft" not in name or pair.parts.draft is not None]
    return {
        "bundle": pair.name, "fingerprint": pair.fingerprint, "episodes": episodes, "seed": run.seed,
        "tokens": pair.parts.policy.spec.chunk * pair.parts.policy.spec.actions,
        "strict": list(pair.parts.drafters.settings.strict) if pair.parts.drafters else [],
        "decodings": measure_gain(pair, names, episodes, run.seed), "tolerances": list(TOLERANCES),
        "drafters": measure_drafters(pair, episodes, run.seed),
    }  # fmt: skip


def others(bundle: str, shard: int, folder: Path, run: Run) -> dict[str, Any]:
    """Success of policies that need no decoding, or less of it, and the time of an inference beside greedy decoding."""
    success: dict[str, list[float]] = {}
    for label, (name, method, _) in OTHERS[bundle].items():
        evaluated_bundle = name
        if name.endswith("-regression"):
            path = folder / "pair"
            if not path.exists():
                make_pair(path, name, name, PairSettings(env=name.removesuffix("-regression")))
            evaluated_bundle = str(path)
        evaluation = Evaluation(evaluated_bundle, None, (method,), 200, seed=run.seed, shard=shard)
        success[label] = with_outcomes(evaluation, folder / label, run)["outcomes"][method.name]["success"]
    found = {"success": success, "time": times(bundle, {label: other[::2] for label, other in OTHERS[bundle].items()})}
    return compared(run.result(f"{bundle}/summary")["outcomes"], found, RIVALS[bundle])


def times(policy: str, policies: Mapping[str, tuple[Any, ...]], rounds: int = 60) -> dict[str, dict[str, float]]:
    """Costs of policies in so many Euler steps beside greedy decoding, alternating."""
    rng = np.random.default_rng(0)
    loaded = {label: load_policy(name, steps=steps).policy for label, (name, steps) in policies.items()}
    loaded["ar"] = load_policy(policy).policy

    def infer(label: str, number: int) -> None:
        loaded[label].infer(loaded[label].spec.observation.zeros(), rng)

    spent = interleaved({label: partial(infer, label) for label in loaded}, range(rounds), rng)
    warm = {label: seconds[10:] for label, seconds in spent.items()}
    return relative_costs(warm, warm["ar"])


def compared(of: Mapping[str, Any], found: Mapping[str, Any], rivals: Sequence[str]) -> dict[str, Any]:
    """Other policies beside decodings, on the same episodes."""
    won = {name: np.array(of[name]["success"]) for name in rivals}
    won |= {label: np.array(values) for label, values in found["success"].items()}
    return {
        "episodes": len(next(iter(won.values()))),
        "success": {name: (int(values.sum()), len(values)) for name, values in won.items()},
        "contrasts": paired(won, [(label, name) for label in found["success"] for name in rivals]),
        "time": found["time"],
    }


def pages(results: Results) -> Iterator[Part | Picture]:
    """The tables and pictures of docs/tokens.md."""
    yield Part(PAGE, "decodings", about_table(METHODS))
    for name, found in results.items():
        if "others" in found:
            yield Part(PAGE, f"others {name}", others_table(found["others"]))
        if "gated" in found:
            yield Part(PAGE, f"gated {name}", gated_table(found["gated"]))
        summary = found["summary"]
        yield Part(PAGE, name, "\n".join(section(summary, found["gain"])))
        passes = {method: metrics["passes"] for method, metrics in summary["methods"].items()}
        label = "passes of the target's decoder per inference"
        yield Picture(DOCS / f"tokens-{summary['env']}.png", partial(draw_success, summary, passes, GROUPS, label))


def section(summary: Mapping[str, Any], gain: Mapping[str, Any]) -> Iterator[str]:
    """The section of one policy, as pieces of Markdown."""
    inferences = next(iter(gain["decodings"].values()))["inferences"]
    yield f"### {summary['bundle']}: {gain['tokens']} tokens for a chunk\n"
    yield f"On the target's own path, {inferences} inferences in {gain['episodes']} episodes (seed {gain['seed']}):\n"
    yield gain_table(gain) + "\n"
    without = " and accepted tokens other than the gripper's" if gain["strict"] else ""
    yield f"There, every drafter by itself at every tolerance: passes for a chunk; accepted tokens{without}:\n"
    yield drafters_table(gain) + "\n"
    yield f"In closed loop, {summary['episodes']} paired episodes each (seed {summary['seed']}):\n"
    scored = any(m["score"]["mean"] != m["success"]["rate"] for m in summary["methods"].values())
    yield closed_loop_table(summary, scored) + "\n"
    yield contrast_table(summary, ("success", "score") if scored else ("success",)) + "\n"


def gain_table(gain: Mapping[str, Any]) -> str:
    """Passes, accepted tokens and time of every decoding on the same inferences.

    The last two columns are modelled: the measured times, plus a round trip for each inference, or for each pass, as a
    drafter needs it that reads the target's features on the other side of a link.
    """
    greedy = gain["decodings"]["ar"]

    def over_link(row: Mapping[str, float], trips: float, of_greedy: float) -> float:
        mine = trips * ROUND_TRIP_MS + row["relative"] * greedy["ms"]
        return float(mine / (of_greedy * ROUND_TRIP_MS + greedy["ms"]))

    rows = [
        {**row, "once": over_link(row, 1.0, 1.0), "each": over_link(row, row["passes"], greedy["passes"])}
        for row in named(gain["decodings"])
    ]
    return table(
        "decoding | passes | accepted | without gripper | read | greedy's chunk | ms | time of greedy decoding's "
        f"| of it the proposal | with a round trip of {ROUND_TRIP_MS:g} ms | with one for each pass",
        "`{name}` | {passes:.2f} | {accepted:.2f} | {accepted_free:.2f} | {read:.1f} | {greedy:.2f} | {ms:.1f} "
        "| {0:ci2} | {proposal:.2f} | {once:.2f} | {each:.2f}",
        rows,
    )  # fmt: skip


def drafters_table(gain: Mapping[str, Any]) -> str:
    """Passes for a chunk with every drafter by itself at every tolerance."""
    template = "{passes:.2f} [{passes_low:.2f}, {passes_high:.2f}]; {accepted:.1f}"
    template += ", {accepted_free:.1f}" if gain["strict"] else ""
    rows = [
        [
            name,
            *(template.format(**dict(zip(found, values, strict=True))) for values in zip(*found.values(), strict=True)),
        ]
        for name, found in gain["drafters"].items()
    ]
    return markdown(["drafter", "exact", *(f"{bins} bins" for bins in gain["tolerances"][1:])], rows)


def closed_loop_table(summary: Mapping[str, Any], scored: bool) -> str:
    """Success, score and passes of every method in closed loop."""
    rows = [
        {**row, "unverified": 1.0 - row["transmission_rate"], "tail": _tail_text(row["tail_error"])}
        for row in named(summary["methods"])
    ]
    score = " | {score[mean]:.4g} [{score[low]:.4g}, {score[high]:.4g}]" if scored else ""
    return table(
        f"method | success{' | score' * scored} | unverified | passes per inference | accepted per pass | compensated "
        "| tolerance [bins] | error of the tail, by dimension",
        f"`{{name}}` | {{success:ci2}}{score} | {{unverified:.2f}} | {{passes:.2f}} | {{accepted_per_pass:.2f}} "
        "| {compensated:.2f} | {tolerance:.1f?} | {tail}",
        rows,
    )  # fmt: skip


def _tail_text(errors: Sequence[float | None]) -> str:
    """Mean absolute errors of the dimensions (normalised units); of many their range."""
    known = [error for error in errors if error is not None]
    if known and len(errors) > FEW:
        return f"{min(known):.2f} to {max(known):.2f}"
    return " / ".join(optional_text(error, 2) for error in errors) if known else ""


def gated_table(summary: Mapping[str, Any]) -> str:
    """Success and transmission rate of every gate before one decoding."""
    tables = {
        method: {point: np.array(values) for point, values in found.items()}
        for method, found in summary["outcomes"].items()
    }
    tested = contrast_table({"contrasts": contrasts(map(load_method, tables), tables)})
    cells = "`{name}` | {success:ci2} | {transmission_rate:.2f} | {passes:.2f}"
    return (
        table("method | success | verified | passes per inference", cells, named(summary["methods"])) + f"\n\n{tested}"
    )


def others_table(found: Mapping[str, Any]) -> str:
    """Success and time of other policies and of the decodings, and their contrasts."""
    rows = []
    for name, (k, n) in found["success"].items():
        measured = interval_text(found["time"][name], 3) if name in found["time"] else "see above"
        rows.append({"name": name, "success": vars(wilson(k, n)), "time": "1" if name == "ar" else measured})
    whole = table(" | success | time of greedy decoding's", "`{name}` | {success:ci2} | {time}", rows)
    return f"{whole}\n\n{difference_table(found['contrasts'])}"
