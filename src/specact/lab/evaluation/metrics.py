"""The metrics of a method, from its outcomes and its step table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.lab.rollout.methods import CHANCE, Method
from specact.lab.rollout.statistics import LEAST_GAIN, choice_efficiency, contrast, holm, mean_interval, wilson
from specact.lab.rollout.steps import STAGES, Table, free_steps

END_POINTS = ("success", "score")


def method_metrics(
    outcomes: Table, steps: Table, *, sends: bool = True, success_at: Sequence[float] = ()
) -> dict[str, Any]:
    """All metrics of one method, as in a summary: of its outcomes, and :func:`step_metrics`.

    Outcomes are one row per episode: ``success``, ``score``, ``steps``, ``latency_s``, and of a suite ``task``; for
    steps see :class:`~specact.lab.rollout.steps.Audit`. A target on the device does not send what is verified;
    ``success_at`` are further score thresholds of success.
    """
    success = wilson(int(outcomes["success"].sum()), len(outcomes["success"]))
    at = {f"{least:g}": _success_rate(outcomes["score"] > least) for least in success_at}
    # Only suites have this column.
    tasks = outcomes.get("task", np.array([""]))
    of_tasks = {str(task): _success_rate(outcomes["success"][tasks == task]) for task in np.unique(tasks) if task}
    scores = outcomes["score"].astype(np.float64)
    score = success if np.array_equal(scores, outcomes["success"].astype(np.float64)) else mean_interval(scores)
    sent = steps["transmitted"]
    inference_ms = 1e3 * sum((steps[f"{stage}_s"] for stage in STAGES), np.zeros(len(sent)))
    actions = int(outcomes["steps"].sum())
    return {
        "success": _success_rate(outcomes["success"]),
        **({"success_at": at} if at else {}),
        **({"tasks": of_tasks} if of_tasks else {}),
        "score": asdict(score),
        "control_steps": actions,
        **step_metrics(steps, sends=sends),
        "latency": {
            "per_action_ms": 1e3 * float(outcomes["latency_s"].sum()) / actions,
            "inference_p50_ms": float(np.quantile(inference_ms, 0.50)),
            "inference_p95_ms": float(np.quantile(inference_ms, 0.95)),
            "inference_p99_ms": float(np.quantile(inference_ms, 0.99)),
            **{f"{stage}_ms": 1e3 * float(steps[f"{stage}_s"].mean()) for stage in STAGES},
            "actions_per_s": actions / float(outcomes["latency_s"].sum()),
        },
    }


def step_metrics(steps: Table, *, sends: bool = True) -> dict[str, Any]:
    """The metrics that need only the step table.

    ``missed``, share of inferences that were transmitted without an answer in time; ``action_change_loss``, mean over
    skipped steps, as ``true_skip_ratio``, mean of 1 - R(z) (None if none was skipped). Of action codes ``acceptance``,
    mean of 1 - r_k(z_k), per codebook and jointly; ``primary_rejection``, mean r of codebook 0; ``gated_loss``,
    (1 - TR)(1 - TSR) = mean of R(z), counted where skipped or missed; entropies [nats]. Of the other families the means
    of columns of :mod:`specact.lab.rollout.families`.
    """
    sent, change = steps["transmitted"], steps["action_change"]
    return {
        "inferences": len(sent),
        "sent": float(sent.mean()) if sends else 0.0,
        "missed": float(steps["missed"].mean()),
        "action_change_loss": float(change[~sent].mean()) if (~sent).any() else None,
        **{name: float(steps[name].mean()) for name in ("distance", "prefix") if name in steps},
        **(_code_metrics(steps) if "rejection" in steps else {}),
        **(_token_metrics(steps) if "passes" in steps else {}),
        **(_round_metrics(steps) if "full" in steps else {}),
    }


def _code_metrics(steps: Table) -> dict[str, Any]:
    sent, rejection = steps["transmitted"], steps["rejection"]
    skipped, unverified = ~sent, ~sent | steps["missed"]
    codebooks = sum(name.startswith("tv_") for name in steps)
    by_codebook = [float(1.0 - steps[f"rejection_{k}"].mean()) for k in range(codebooks)]
    return {
        "true_skip_ratio": float(1.0 - rejection[skipped].mean()) if skipped.any() else None,
        "acceptance": {"codebooks": by_codebook, "all": float(1.0 - rejection.mean())},
        "primary_rejection": float(steps["rejection_0"].mean()),
        "gated_loss": float((rejection * unverified).mean()),
        "choice_efficiency": choice_efficiency(rejection, sent),
        "draft_entropy": float(steps["draft_entropy"].mean()),
        "target_entropy": float(steps["target_entropy"].mean()),
    }


def _token_metrics(steps: Table) -> dict[str, Any]:
    """``accepted_per_pass``: drafted tokens per pass after the one over the prefix; ``greedy``: of verified steps."""
    sent, passes = steps["transmitted"], int(steps["passes"].sum())
    first = int((steps["passes"] > 0).sum())
    tails = [steps[name] for name in steps if name.startswith("tail_")]
    return {
        "passes": float(steps["passes"].mean()),
        "read": float(steps["read"].mean()),
        "accepted_per_pass": float(steps["accepted"].sum() / max(1, passes - first)),
        "greedy": float(steps["greedy"][sent].mean()) if sent.any() else None,
        "compensated": float((steps["compensated"] > 0).mean()),
        "tolerance": float(steps["tolerance"][sent].mean()) if sent.any() else None,
        "tail_error": [float(np.nanmean(tail)) if np.isfinite(tail).any() else None for tail in tails],
    }


def _round_metrics(steps: Table) -> dict[str, Any]:
    """``failed``: rounds that were full after a check; ``accepted``: actions per check."""
    checked, full = steps["checked"], steps["full"]
    return {
        "full": float(full.mean()),
        "failed": float((checked & full).mean()),
        "accepted": float(steps["accepted"][checked].mean()) if checked.any() else None,
        "actions_per_round": float(steps["actions"].mean()),
        "deviation": float(np.nanmean(steps["deviation"])) if np.isfinite(steps["deviation"]).any() else None,
        "reused": float(steps["reused"].mean()),
    }


# Other thresholds of success, of the score: gym-pusht's own, where ours is a coverage above .85.
SUCCESS_AT = {"pusht": (0.95,), "pusht-camera": (0.95,)}


def _success_rate(counted: NDArray[np.bool_]) -> dict[str, float]:
    n, k = len(counted), int(counted.sum())
    interval = wilson(k, n)
    return {"n": n, "k": k, "rate": interval.mean, "low": interval.low, "high": interval.high}


def add_gate_efficiency(ran: Iterable[Method], methods: dict[str, dict[str, Any]], oracle: Table | None) -> None:
    """Adds ``gate_efficiency`` to the metrics of every method: (random - gate) / (random - oracle) of the gated loss.

    Each method is compared at the rate it achieved: random's loss is proportional to its share of skips, the oracle's
    is that of skipping the same share of its own steps, those with the least R(z). The random baseline has the gate's
    constraints: ``random`` for the deviation, which may have a limit on skips, ``random_learned`` for the others; a
    random gate is its own baseline. None where one of the two did not run, a method skips nothing or everything or has
    another draft, or the oracle's gain over chance is negligible, because the ratio would be noise.
    """
    for method in ran:
        metrics, random = methods[method.name], _random_baseline(method, methods)
        rate = metrics["sent"]
        metrics["gate_efficiency"] = None
        comparable = method.proposes != "head" and 0.0 < rate < 1.0
        if not comparable or oracle is None or random is None or random["sent"] == 1.0:
            continue
        chance = random["gated_loss"] * (1.0 - rate) / (1.0 - random["sent"])
        # The oracle has the forced steps as well.
        free = np.sort(oracle["rejection"][free_steps(oracle)])
        skipped = min(round(len(oracle["rejection"]) * (1.0 - rate)), len(free))
        best = float(free[:skipped].sum() / len(oracle["rejection"]))
        if chance - best >= LEAST_GAIN:
            metrics["gate_efficiency"] = (chance - metrics["gated_loss"]) / (chance - best)


def _random_baseline(method: Method, methods: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Metrics of the random baseline with this method's constraints; None if none ran."""
    if method.gate == "random":
        return methods[method.name]
    names = CHANCE[1:] if method.gate == "adahi" else CHANCE
    return next((methods[name] for name in names if name in methods), None)


def contrasts(
    methods: Iterable[Method], outcomes: Mapping[str, Table], end_points: Sequence[str] = END_POINTS
) -> list[dict[str, Any]]:
    """Paired contrasts of methods, in this order, with those of their rivals that ran, given the outcomes by method.

    For each ``first``, ``second``, and for every end point ``{difference, low, high, p, test, p_holm}``; ``p_holm`` is
    corrected by Holm's method over all contrasts of this list, for each end point.
    """
    rows: list[dict[str, Any]] = []
    pairs = [(method.name, rival) for method in methods for rival in method.rivals_among(tuple(outcomes))]
    for first, second in pairs:
        row: dict[str, Any] = {"first": first, "second": second}
        for end_point in end_points:
            left, right = (outcomes[name][end_point].astype(np.float64) for name in (first, second))
            result = contrast(left, right)
            bounds = {"low": result.difference.low, "high": result.difference.high}
            row[end_point] = {"difference": result.difference.mean, **bounds, "p": result.p, "test": result.test}
        rows.append(row)
    for end_point in end_points:
        for row, p in zip(rows, holm([row[end_point]["p"] for row in rows]), strict=True):
            row[end_point]["p_holm"] = p
    return rows
