"""Spec-VLA, KERV and HeiSD on our token policies: gain on the target's own path, success, smaller policies, gates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.figures import add_series, points_of
from experiments.flash import METHODS as FLOW
from experiments.grid import Cell, Results, Run, evaluated, made_pair
from experiments.measure import interleaved, largest_p, outcomes, paired, ratio_interval, relative_costs
from experiments.report import Picture, Report, Table, contrast_table, glossary, methods_of, named, one_family, under
from experiments.tokens.gain import measure_gain
from experiments.tokens.methods import METHODS
from specact.lab.evaluation.metrics import END_POINTS, contrasts
from specact.lab.evaluation.run import Evaluation, read_table
from specact.lab.rollout.distillation import read_rollouts, record_rollouts, record_tokens
from specact.lab.rollout.methods import Method, load_method
from specact.lab.rollout.statistics import wilson
from specact.lab.rollout.steps import SHARD
from specact.lab.train.drafters import fit_memory
from specact.load import load_pair, load_policy
from specact.systems.kerv import PHI, KervDrafter
from specact.systems.tokens import DrafterSettings

# Methods of the policy that has a draft, and chunks of several actions.
CHUNKED = ("draft_9", "draft_fixed", "kerv_chunk_tail", "kerv_one", "kerv_no_tail_one")
# Methods that are compared in open loop alone.
OPEN_LOOP = ("strict_bigram", "strict_draft", "bigram", "random_tokens", "perfect")
SYSTEMS = tuple(name for name in METHODS if name not in (*CHUNKED, *OPEN_LOOP))
# Methods that are compared in open loop, on the target's own rollouts; the last ones need a draft policy.
GAIN = (
    "ar", "strict", "strict_last", "strict_bigram", "specvla_5", "specvla", "specvla_15", "specvla_20",
    "specvla_device", "last", "bigram", "filter", "random_tokens", "perfect", "kerv", "heisd", "heisd_fixed",
    "strict_draft", "draft_9", "draft_fixed",
)  # fmt: skip
GATES = ("draft", "hybrid", "random", "adahi", "random_learned", "learned")
# For each policy: episodes of a shard, episodes of the target's path, and its draft policy.
POLICIES: dict[str, tuple[int, int, str | None]] = {
    "relocate-tokens": (50, 5, None), "kitchen-tokens": (50, 3, None), "metaworld-tokens": (10, 40, "metaworld-draft"),
}  # fmt: skip
# Policies that decodings are compared to, by label: bundle, method, Euler steps. Below them, those decodings.
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
    "metaworld-tokens": ("ar", "specvla", "kerv", "heisd_fixed_no_switch")
}
SLOWER = ("strict", "specvla", "specvla_device", "kerv")
ROUND_TRIP_MS = 20.0  # of the modelled link
# What the report's main table and picture show, by label: a method, or another policy.
MAIN = {
    "greedy decoding": "ar", "exact, head drafts": "strict", "exact, last action drafts": "strict_last",
    "last action, 9 bins": "last", "Spec-VLA": "specvla", "KERV": "kerv", "HeiSD": "heisd",
    "HeiSD, least alike verified": "heisd_similar", "HeiSD, released code": "heisd_fixed",
    "HeiSD, released code without switch": "heisd_fixed_no_switch", "one layer, greedy": "one layer",
    "flow, one step": "flow, 1 steps", "regression": "regression",
}  # fmt: skip
DRAWN = tuple(label for label in MAIN if not label.startswith(("exact", "one layer", "HeiSD")))
DRAWN += ("HeiSD, released code without switch",)
# HeiSD, its variants and controls, whose unverified share and acceptance length are shown.
HEISD = ("ar", "specvla", *(name for name in METHODS if name.startswith(("heisd", "last_", "retrieval"))))
# The fitted boundary is at 0, so that nothing switches: methods whose verified inferences take the time of HeiSD's.
DECODED_AS = {"heisd_similar": "heisd", "heisd_fixed_no_switch": "heisd"}


def plan(run: Run) -> Iterator[Cell]:
    """For every policy each method in closed loop, the gain on the target's path, and other policies; then gates.

    A method is a cell, with the controls at its rate, so that a changed one runs alone: ``--only '*/methods/kerv*'``.
    """
    for bundle, (shard, on_path, draft) in POLICIES.items():
        names = (*SYSTEMS, *CHUNKED) if draft else SYSTEMS
        for name in names:
            # Relocate's hand has no gripper, so its uniform tolerance is the usual one.
            if METHODS[name].rate_of in names or (name == "specvla_uniform" and bundle.startswith("relocate")):
                continue
            ran = (METHODS[name], *(METHODS[other] for other in names if METHODS[other].rate_of == name))
            # heisd_similar verifies as many inferences as the fixed pattern.
            evaluation = Evaluation(bundle, None, ran, 200, seed=run.seed, shard=shard, draft=draft, rate=1.0 / 3.0)
            yield Cell(f"{bundle}/methods/{name}", partial(with_outcomes, evaluation))
        yield Cell(f"{bundle}/first_errors", partial(first_errors, bundle, shard))
        yield Cell(f"{bundle}/gain", partial(gain, bundle, on_path))
        yield Cell(f"{bundle}/times", partial(times, bundle, on_path))
        yield Cell(f"{bundle}/boundary", partial(boundary, bundle))
        if not run.quick:  # these are trained: recipes/*-tokens-small.toml and *-regression.toml
            yield Cell(f"{bundle}/others", partial(others, bundle, shard))
    # A learned gate needs a head: specact calibrate --gate learned, in a copy of the bundle that --data names.
    if run.data is not None:
        gated = Evaluation(
            str(run.data), None, GATES, 200, run.seed, 0.4, shard=10, calibration_episodes=20,
            draft="metaworld-draft", decoding="specvla",
        )  # fmt: skip
        yield Cell("metaworld-tokens/gated", partial(with_outcomes, gated))


def with_outcomes(evaluation: Evaluation, folder: Path, run: Run) -> dict[str, Any]:
    """What the tables need of a run, with the outcome of every episode."""
    summary = evaluated(evaluation, folder, run)
    episodes = {
        method: {point: outcomes(folder, method, point).tolist() for point in END_POINTS}
        for method in summary["methods"]
    }
    return summary | {"outcomes": episodes}


def first_errors(bundle: str, shard: int, folder: Path, run: Run) -> dict[str, Any]:
    """Mean position of the first rejected token among all of an inference, and among those of its first action.

    Without a rejection it is their number: "average first-error position" (KERV). In closed loop, with intervals over
    episodes; beside it KERV's settings.
    """
    pair, methods = load_pair(bundle, decoding="kerv"), tuple(METHODS[name] for name in ("specvla", "kerv"))
    spec, kerv, decoding = pair.parts.policy.spec, pair.parts.drafters.settings, pair.parts.decoding
    evaluated(Evaluation(bundle, None, methods, 50, seed=run.seed, shard=shard), folder, run)
    row = {
        "tokens": spec.chunk * spec.actions, "of_action": spec.actions, "scale": kerv.scale, "phi": PHI,
        "plain_steps": decoding.plain_steps, "least": decoding.least, "most": decoding.bins,
        "history": KervDrafter.history, "ahead": decoding.tail_actions,
    }  # fmt: skip
    for method in methods:
        steps = read_table(folder / "steps" / method.name)
        rejected, counts = steps["rejected"].astype(np.float64), np.bincount(steps["episode"])
        for name, values in (("first", rejected), ("first_of_action", np.minimum(rejected, spec.actions))):
            row[f"{method.name}_{name}"] = vars(ratio_interval(np.bincount(steps["episode"], values), counts))
    return row


def joined(cells: Mapping[str, Any]) -> dict[str, Any]:
    """The methods of several cells, in the order of the page, and the contrasts of their outcomes."""
    metrics = {name: row for cell in cells.values() for name, row in cell["methods"].items()}
    won = {name: arrays(points) for cell in cells.values() for name, points in cell["outcomes"].items()}
    ran = [name for name in METHODS if name in metrics]
    return {
        "methods": {name: metrics[name] for name in ran},
        "contrasts": contrasts([METHODS[name] for name in ran], {name: won[name] for name in ran}),
    }


def arrays(points: Mapping[str, Sequence[float]]) -> dict[str, np.ndarray]:
    """The stored outcomes of a method, by end point."""
    return {point: np.array(values) for point, values in points.items()}


def gain(bundle: str, episodes: int, folder: Path, run: Run) -> dict[str, Any]:
    """Decodings on the target's own rollouts."""
    pair = load_pair(bundle, draft=POLICIES[bundle][2])
    names = [name for name in GAIN if "draft" not in name or pair.parts.draft is not None]
    return {"fingerprint": pair.fingerprint, "decodings": measure_gain(pair, names, run.few(episodes), run.seed)}


def times(bundle: str, episodes: int, folder: Path, run: Run) -> dict[str, dict[str, float]]:
    """What is slower than greedy decoding, KERV and HeiSD, measured once more: alternating with few others."""
    names = (*SLOWER, "heisd", "heisd_fixed", *("kerv_chunk_tail",) * (POLICIES[bundle][2] is not None))
    return measure_gain(load_pair(bundle), ("ar", *names), run.few(episodes), run.seed)


def boundary(bundle: str, folder: Path, run: Run) -> dict[str, float]:
    """HeiSD's boundary, its bounds of verify-skip, and what is found on the episodes to which they were fitted."""
    pair = load_pair(bundle)
    drafters, record = pair.parts.drafters, partial(record_tokens, str(pair.path), pair.env)
    settings: DrafterSettings = drafters.settings
    recipe = drafters.manifest.recipe
    count = recipe["episodes"] // SHARD
    held_out = range(count - max(1, round(recipe["held_out"] * count)), count)
    files = record_rollouts(
        partial(record, recipe["seed"]), folder / "rollouts", held_out, run.pool.each, partial(run.update, "rollouts")
    )
    _, fit = fit_memory(settings, read_rollouts(files), drafters.memory, drafters.by_name["head"])
    return {
        "boundary": settings.fast, "similarity": settings.skip.similarity, "distance": settings.skip.distance,
        **fit["boundary"],
    }  # fmt: skip


def others(bundle: str, shard: int, folder: Path, run: Run) -> dict[str, Any]:
    """Success of policies that need no decoding, or less of it, and the time of an inference beside greedy decoding."""
    success: dict[str, list[float]] = {}
    for label, (name, method, _) in OTHERS[bundle].items():
        env = name.removesuffix("-regression")
        # Both parts of a pair are the policy, so that it can be evaluated without another one.
        pair = name if name == env else made_pair(folder / "pair", name, name, env=env)
        evaluation = Evaluation(pair, None, (method,), 200, seed=run.seed, shard=shard)
        success[label] = with_outcomes(evaluation, folder / label, run)["outcomes"][method.name]["success"]
    cells = (run.result(f"{bundle}/methods/{name}")["outcomes"] for name in RIVALS[bundle])
    won = {name: cell[name]["success"] for cell in cells for name in cell if name in RIVALS[bundle]} | success
    won = {name: np.array(values) for name, values in won.items()}
    return {
        "success": {name: (int(values.sum()), len(values)) for name, values in won.items()},
        "contrasts": paired(won, [(label, name) for label in success for name in RIVALS[bundle]]),
        "time": costs(bundle, {label: other[::2] for label, other in OTHERS[bundle].items()}),
    }


def costs(policy: str, policies: Mapping[str, tuple[Any, ...]], rounds: int = 60) -> dict[str, dict[str, float]]:
    """Costs of policies in so many Euler steps beside greedy decoding, alternating."""
    rng = np.random.default_rng(0)
    loaded = {label: load_policy(name, steps=steps).policy for label, (name, steps) in policies.items()}
    loaded["ar"] = load_policy(policy).policy

    def infer(label: str, number: int) -> None:
        loaded[label].infer(loaded[label].spec.observation.zeros(), rng)

    spent = interleaved({label: partial(infer, label) for label in loaded}, range(rounds), rng)
    warm = {label: seconds[10:] for label, seconds in spent.items()}
    return relative_costs(warm, warm["ar"])


def report(results: Results) -> Report:
    """Success, time and passes of every decoding on every policy, and three families of contrasts."""
    gains = {name: cells["gain"]["decodings"] | cells["times"] for name, cells in results.items()}
    summaries = {name: joined(cells["methods"]) for name, cells in results.items()}
    # The area under the curve and its interval as one value.
    boundaries = {
        name: {**row, "auc": {"mean": row["auc"], "low": row["auc_low"], "high": row["auc_high"]}}
        for name, row in ((name, cells["boundary"]) for name, cells in results.items())
    }
    methods = {name: summary["methods"] for name, summary in summaries.items()}
    others = {
        name: {label: {"success": vars(wilson(*won)), "time": cells["others"]["time"].get(label)}
               for label, won in cells["others"]["success"].items()}
        for name, cells in results.items()
    }  # fmt: skip
    gated, main = results["metaworld-tokens"]["gated"], list(_main(methods, gains, others))
    won = {method: arrays(points) for method, points in gated["outcomes"].items()}
    scored = {name: summary for name, summary in summaries.items() if not name.startswith("metaworld")}
    families: dict[str, tuple[str, list[Any]]] = {
        "contrasts": ("success among decodings on the three policies",
                      [row for name, summary in summaries.items() for row in under(name, summary["contrasts"])]),
        "scores": ("their scores on relocate and kitchen",
                   [row for name, summary in scored.items() for row in under(name, summary["contrasts"], "score")]),
        "policies": ("success between other policies and decodings",
                     [row for name, cells in results.items()
                      for row in under(name, largest_p(cells["others"]["contrasts"]))]),
        "gates": ("gates before Spec-VLA",
                  under("metaworld-tokens, before Spec-VLA", contrasts(map(load_method, won), won))),
    }  # fmt: skip
    tested = {name: one_family(rows) for name, (_, rows) in families.items()}
    tables = [
        Table(
            "main", "Success in 200 paired episodes of each policy; time for an executed action, greedy's being 1. "
            "HeiSD's is the measured time of its proposal and of its verified inferences, by their shares.",
            "method | metaworld | time | relocate | time | kitchen | time",
            "{label} | {success[metaworld]:ci2} | {time[metaworld]:ci2} | {success[relocate]:ci2} "
            "| {time[relocate]:ci2} | {success[kitchen]:ci2} | {time[kitchen]:ci2}",
            main,
        ),
        Table(
            "slower", f"Time for an executed action, greedy decoding's being 1: measured, and modelled over a link of "
            f"{ROUND_TRIP_MS:g} ms with one round trip for an inference, and with one for each pass.",
            "policy | decoding | on one machine | one round trip | one for each pass",
            "{policy} | `{name}` | {0:ci2} | {once:.2f} | {each:.2f}",
            [row for row in _gain(gains) if row["name"] in SLOWER],
        ),
        Table(
            "heisd", "HeiSD, its variants and controls in 200 paired episodes. Acceptance length: tokens for each pass "
            "of the target, those of unverified chunks included, as in the paper; greedy decoding's is 1. In brackets "
            "the share of chunks that is not verified.",
            "policy | method | success | not verified | acceptance length",
            "{policy} | `{name}` | {success:ci2} | {unverified:.2f} | {length:.2f?}",
            [row for row in _closed_loop(summaries) if row["name"] in HEISD],
            "`{name}` | {policy} | {success:ci2} ({unverified:.2f}), {length:.2f}",
        ),
        Table(
            "boundary", "HeiSD's boundary of F, fitted to held-out inferences: accepted tokens of a chunk with the "
            "memory, the head, and the boundary; how often that chooses the memory; F's area under the ROC curve for "
            "where the memory's are more; and both bounds of verify-skip, which never skip.",
            rows=[{"policy": name, **row} for name, row in boundaries.items()],
        ),
        glossary(METHODS, "decodings"),
        Table("gain", "Every decoding on the same inferences of the target's own path: passes, tokens, time.",
              rows=list(_gain(gains))),
        Table(
            "kerv", "KERV's settings, n in inferences, AC and PL in actions; mean position of the first rejected "
            "token, of an inference and of its first action, their number if none is, in 50 episodes of each policy.",
            "policy | tokens | of an action | K_S | phi | n | r_min | r_max | AC | PL | Spec-VLA: first error | KERV "
            "| of the first action: Spec-VLA | KERV",
            "{policy} | {tokens} | {of_action} | {scale:.3f} | {phi} | {plain_steps} | {least} | {most} | {history} "
            "| {ahead} | {specvla_first:ci2} | {kerv_first:ci2} | {specvla_first_of_action:ci2} "
            "| {kerv_first_of_action:ci2}",
            [{"policy": name, **cells["first_errors"]} for name, cells in results.items()],
        ),
        Table("closed-loop", "Every method in 200 paired episodes of each policy.",
              rows=list(_closed_loop(summaries))),
        Table("gated", "Gates asked for a rate of 0.4 before Spec-VLA's decoding, in 200 paired episodes of metaworld.",
              rows=methods_of(gated)),
        *(contrast_table(rows, name, families[name][0]) for name, rows in tested.items()),
    ]  # fmt: skip
    facts: dict[str, Any] = {
        name.removesuffix("-tokens"): {
            "time": gains[name], "won": rows, "other": others[name], "boundary": boundaries[name],
            "gained": rows["specvla"]["passes"] / rows["heisd_fixed_no_switch"]["passes"],
            "longer": rows["specvla"]["accepted_per_pass"] / rows["strict"]["accepted_per_pass"] - 1.0,
            "first": first, "late": first["kerv_first_of_action"]["mean"] / first["of_action"],
            "kerv_of_specvla": gains[name]["kerv"]["relative"] / gains[name]["specvla"]["relative"],
        }
        for name, rows in methods.items() for first in [results[name]["first_errors"]]
    }  # fmt: skip
    for family, before in {"contrasts": "", "policies": "", "gates": "gate", "scores": "score_"}.items():
        for row in tested[family]:
            on = before + (row["on"].removesuffix("-tokens") if family != "gates" else "")
            facts[f"{on}_{row['first']}_{row['second']}".replace(" ", "_").replace(",", "")] = row
    facts["heisd_time"] = {
        name.removesuffix("-tokens"): relative_time(gains[name]["heisd"], rows["heisd_fixed_no_switch"])
        for name, rows in methods.items()
    }
    worst = [min(decodings[name]["relative_low"] for name in ("specvla", "kerv")) for decodings in gains.values()]
    facts |= {"slower": sum(low > 1.0 for low in worst), "policies": len(worst)}
    return Report(tables, facts, [Picture("tokens.svg", partial(draw, main))])


def _closed_loop(summaries: Any) -> Iterator[dict[str, Any]]:
    """Every method, with the share that it does not verify and the acceptance length."""
    for policy, summary in summaries.items():
        tokens = summary["methods"]["ar"]["passes"]
        for row in methods_of(summary):
            length = tokens / row["passes"] if row["passes"] else None
            yield {"policy": policy, **row, "unverified": 1.0 - row["sent"], "length": length}


def _main(methods: Any, gains: Any, others: Any) -> Iterator[dict[str, Any]]:
    """Success and time of the main methods and controls on each policy."""
    for label, name in MAIN.items():
        row: dict[str, Any] = {"label": label, "success": {}, "time": {}}
        for policy in POLICIES:
            short, time = policy.removesuffix("-tokens"), gains[policy].get(DECODED_AS.get(name, name))
            metrics = methods[policy].get(name) or others[policy].get(name, {"success": None, "time": None})
            row["success"][short] = metrics["success"]
            row["time"][short] = metrics.get("time") if time is None else relative_time(time, metrics)
        yield row


def relative_time(time: Mapping[str, float], metrics: Mapping[str, Any]) -> dict[str, float]:
    """The time of a method whose unverified inferences are proposals alone."""
    sent = metrics.get("sent", 1.0)
    names = ("relative", "relative_low", "relative_high")
    return {name: sent * time[name] + (1.0 - sent) * time["proposal"] for name in names}


def _gain(gains: Any) -> Iterator[dict[str, Any]]:
    """Decodings on the target's path; over a link with a round trip for each inference, or for each pass."""
    for policy, decodings in gains.items():
        greedy = decodings["ar"]
        for row in named(decodings):
            row = {"executed": 1.0, **row}
            spent, trip = row["relative"] * greedy["ms"], ROUND_TRIP_MS / row["executed"]
            yield {
                "policy": policy, **row, "once": (trip + spent) / (ROUND_TRIP_MS + greedy["ms"]),
                "each": (row["passes"] * trip + spent) / (greedy["passes"] * ROUND_TRIP_MS + greedy["ms"]),
            }  # fmt: skip


def draw(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Success over the time for an action, a panel for each policy."""
    figure = Figure(figsize=(4.8, 8.4), layout="constrained")
    for policy, axes in zip(POLICIES, figure.subplots(3, 1), strict=True):
        short = policy.removesuffix("-tokens")
        series = {
            MAIN[row["label"]]: points_of({row["time"][short]["relative"]: row["success"][short]})
            for row in rows
            if row["label"] in DRAWN and row["success"][short] is not None and row["time"][short] is not None
        }
        names = {name: label for label, name in MAIN.items()}
        add_series(axes, series, "time for an action (greedy decoding: 1)", "success", short, names)
        axes.set_xlim(left=0.0)
    return figure
