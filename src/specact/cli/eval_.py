"""``specact eval`` runs methods side by side on the same episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import tyro

from specact.cli.output import (
    command_line,
    contrast_lines,
    offline_table,
    print_json,
    progress_bars,
    results,
    summary_table,
)
from specact.families.codes.verify import Offset
from specact.gates.settings import BUNDLES_OWN, GateChoices


def eval_(
    bundle: str,
    out: Path,
    env: str | None = None,
    methods: str = "draft,target,hybrid,random,adahi",
    episodes: int = 100,
    seed: int = 0,
    rate: float = 0.6,
    link: str = "wifi-paper",
    offset: Offset = "target",
    overlap: bool = False,
    gates: tyro.conf.OmitArgPrefixes[GateChoices] = BUNDLES_OWN,
    draft_ms: float | None = None,
    gate_ms: float | None = None,
    head_ms: float | None = None,
    target_ms: float | None = None,
    kappa: float = 1.0,
    realtime: bool = False,
    wire: Literal["stream", "json"] = "stream",
    deadline_ms: float = 200.0,
    mse: bool = False,
    data: Path | None = None,
    offline: bool = False,
    recipe: Path | None = None,
    draft: str | None = None,
    target: str | None = None,
    workers: int | None = None,
    json: bool = False,
) -> None:
    """Run methods side by side on the same episodes, in virtual or real time; writes a run folder that resumes.

    Args:
        bundle: path or name of a bundle, or MODULE:NAME for a pair of your own.
        out: run folder: manifest.json, summary.json, episodes/ and steps/ as Parquet.
        env: environment, a name or MODULE:TASK; the bundle's own if not given.
        methods: comma-separated: draft, head_draft, target, target_on_device, hybrid, random, plain_random,
            random_learned, head_random, adahi, gated_target, uncertainty, learned, learned_action, oracle,
            oracle_action, or MODULE:GATE to verify where a gate of your own asks for it.
        episodes: number of episodes per method.
        seed: random seed.
        rate: transmission rate the gates are calibrated for; random runs at the rate ADAHI achieved and with ADAHI's
            forced steps, random_learned and head_random at the learned gate's, plain_random without forced steps.
        link: wifi-paper, lan, 5g, lte, loopback, rtt:FILE, mahimahi:UP,DOWN, with +loss=, +outage=; see
            specact proxy --help.
        offset: offset of verified steps: target, or the ablations draft and stale.
        overlap: send a request before its draft is computed if the gate is predicted to transmit.
        draft_ms: accounted time of a draft inference; measured if not given.
        gate_ms: accounted time of a gate's decision; measured for each gate if not given.
        head_ms: accounted time of the learned gate's head where it is the draft; measured if not given.
        target_ms: accounted time of a target inference; measured if not given.
        kappa: factor on the computation times of the device, to model a slower one.
        realtime: over real sockets: a server process of its own, behind a relay that behaves like the link.
        wire: with --realtime: stream (WebSocket, the device samples) or json (HTTP, the server samples).
        deadline_ms: with --realtime: how long a step waits for the target.
        mse: also measure each method's error along the demonstrations that were kept back in training.
        data: with --mse or --offline: folder that the recipe's data paths are relative to.
        offline: without a simulator: errors and transmissions along demonstrations kept back in training.
        recipe: with --offline: recipe of these demonstrations; the bundle's own if not given.
        draft: of a pair of chunk policies, where the pair does not name it: MODULE:NAME or a .toml file.
        target: likewise.
        workers: processes; one per core if not given.
        json: print the summary as JSON.
    """
    from specact.cli.gating import check_gate_options
    from specact.lab.evaluation.evaluation import Evaluation
    from specact.lab.evaluation.run import evaluate, parse_methods
    from specact.lab.rollout.methods import load_method
    from specact.lab.rollout.pool import Pool

    check_gate_options(gates.gate_options, [load_method(name).gate for name in parse_methods(methods)])

    if offline:
        from specact.cli.shown import held_out
        from specact.families.load import load_pair
        from specact.lab.evaluation.offline import evaluate_along

        pair = load_pair(bundle, draft=draft, target=target)
        shown = held_out(pair, recipe, data, env)
        with Pool(workers) as pool, progress_bars() as update:
            summary = evaluate_along(
                pair, parse_methods(methods), shown, rate, out, pool, update, gates=gates, seed=seed,
                command=command_line(),
            )  # fmt: skip
        if json:
            print_json(summary)
            return
        results.print(offline_table(summary))
        for line in contrast_lines(summary):
            results.print(line, highlight=False)
        results.print(f"run folder: {out}", highlight=False)
        return
    what = Evaluation(
        bundle=bundle, env=env, methods=parse_methods(methods), episodes=episodes, seed=seed, rate=rate, link=link,
        offset=offset, overlap=overlap, gates=gates, draft_ms=draft_ms, gate_ms=gate_ms, head_ms=head_ms,
        target_ms=target_ms, kappa=kappa,
        realtime=realtime, wire=wire, deadline_ms=deadline_ms,
        mse=mse, data=None if data is None else str(data), draft=draft, target=target,
    )  # fmt: skip
    with Pool(workers) as pool, progress_bars() as update:
        summary = evaluate(what, out, update, pool, command=command_line())
    if json:
        print_json(summary)
        return
    results.print(summary_table(summary))
    for line in contrast_lines(summary):
        results.print(line, highlight=False)
    results.print(f"run folder: {out}", highlight=False)
