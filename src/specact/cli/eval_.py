"""``specact eval`` runs methods side by side on the same episodes."""

from __future__ import annotations

from pathlib import Path

from specact.cli.options import changed, refuse_unused
from specact.cli.output import (
    Flat,
    command_line,
    contrast_lines,
    offline_table,
    print_json,
    progress_bars,
    results,
    summary_table,
)
from specact.lab.evaluation.evaluation import Evaluation

# Options that have no effect along demonstrations: there are no episodes of a simulator, no link and no times.
_SIMULATED = (
    "episodes", "link", "offset", "draft_ms", "gate_ms", "head_ms", "target_ms", "kappa", "shard",
    "calibration_episodes", "realtime", "wire", "deadline_ms", "mse", "demonstrations",
)  # fmt: skip
# In real time every time is measured.
_ACCOUNTED = ("draft_ms", "gate_ms", "head_ms", "target_ms", "kappa")


def eval_(
    what: Flat[Evaluation],
    out: Path,
    offline: bool = False,
    recipe: Path | None = None,
    workers: int | None = None,
    on: str = "here",
    json: bool = False,
) -> None:
    """Run methods side by side on the same episodes, in virtual or real time; writes a run folder that resumes.

    Args:
        what: what to evaluate.
        out: run folder: manifest.json, summary.json, episodes/ and steps/ as Parquet.
        offline: without a simulator: errors and transmissions along demonstrations kept back in training.
        recipe: with --offline: recipe of these demonstrations; the bundle's own if not given.
        workers: processes; one per core if not given.
        on: where they run: here, ray for a Ray cluster that is started here, or ray:ADDRESS; see docs/scale.md.
        json: print the summary as JSON.
    """
    from specact.gates.deciding import check_gate_options
    from specact.lab.rollout.methods import load_method
    from specact.lab.rollout.pool import Pool

    _refuse_unfit(what, offline, recipe)
    check_gate_options(what.gates.gate_options, [load_method(name).gate for name in what.methods])
    with Pool(workers, on) as pool, progress_bars() as update:
        if offline:
            from specact.cli.demonstrations import held_out
            from specact.families.load import load_named
            from specact.lab.evaluation.offline import evaluate_offline

            pair = load_named(what.bundle, what.named)
            shown = held_out(pair, recipe, None if what.data is None else Path(what.data), what.env)
            summary = evaluate_offline(
                pair, what.methods, shown, what.rate, out, pool, update, gates=what.gates, seed=what.seed,
                command=command_line(),
            )  # fmt: skip
        else:
            from specact.lab.evaluation.run import evaluate

            summary = evaluate(what, out, update, pool, command=command_line())
    if json:
        print_json(summary)
        return
    results.print((offline_table if offline else summary_table)(summary))
    for line in contrast_lines(summary):
        results.print(line, highlight=False)
    results.print(f"run folder: {out}", highlight=False)


def _refuse_unfit(what: Evaluation, offline: bool, recipe: Path | None) -> None:
    """Refuses options that do not apply to this kind of evaluation."""
    if offline:
        refuse_unused(changed(what, _SIMULATED), "has no effect along demonstrations; leave it out with --offline")
        return
    refuse_unused({"recipe": recipe is not None}, "is of demonstrations; add --offline, or leave it out")
    if what.realtime:
        refuse_unused(changed(what, _ACCOUNTED), "is an accounted time; with --realtime all are measured, leave it out")
    else:
        refuse_unused(changed(what, ["wire", "deadline_ms"]), "is for real sockets; add --realtime, or leave it out")
    if not what.mse:
        refuse_unused(changed(what, ["data", "demonstrations"]), "is for --mse; add that, or leave it out")
