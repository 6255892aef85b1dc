"""``specact demo`` compares five methods of a pair on the same simulated episodes."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specact.cli.output import command_line, contrast_lines, print_json, progress_bars, results, summary_table
from specact.errors import ConfigError
from specact.files import write_whole

if TYPE_CHECKING:
    from specact.lab.report.paths import TracedEpisode

METHODS = ("draft", "target", "hybrid", "random", "adahi")
# Methods of flow and token policies; the first two need no drafter that was trained for the target.
FLOW, TOKENS = ("full", "full_2", "flash", "unchecked"), ("ar", "strict_last", "specvla", "kerv")


def demo(
    bundle: str = "ball",
    episodes: int = 60,
    seed: int = 0,
    out: Path | None = None,
    workers: int | None = None,
    json: bool = False,
) -> None:
    """Run draft, target, hybrid, random and ADAHI on the same simulated episodes and print a comparison.

    For a token policy or a flow policy, compare its decodings, such as Spec-VLA, KERV and FLASH.

    Args:
        bundle: path or name of a bundle.
        episodes: number of episodes per method.
        seed: random seed.
        out: run folder; a new one under runs/ if not given.
        workers: processes; one per core if not given.
        json: print the summary as JSON.
    """
    from specact.families.flash.pair import FlashPair
    from specact.families.load import load_pair
    from specact.families.tokens.pair import TokenPair
    from specact.lab.evaluation.evaluation import Evaluation
    from specact.lab.evaluation.run import evaluate
    from specact.lab.rollout.pool import Pool

    pair = load_pair(bundle)
    methods: tuple[str, ...] = METHODS
    if isinstance(pair, FlashPair):
        methods = FLOW if pair.block is not None else FLOW[:2]
    elif isinstance(pair, TokenPair):
        methods = TOKENS if pair.drafters is not None else TOKENS[:2]
    folder = out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    with Pool(workers) as pool, progress_bars() as update:
        what = Evaluation(bundle, None, methods, episodes, seed)
        summary = evaluate(what, folder, update, pool, command=command_line())
    compared = methods == METHODS
    shown = (_picture(bundle, summary, folder, seed) or _film(folder)) if compared else None
    if json:
        print_json(summary | ({} if shown is None else {"shown": str(shown[0]), "choice": shown[1]}))
        return
    results.print(summary_table(summary))
    for line in contrast_lines(summary):
        results.print(line, highlight=False)
    if compared:
        results.print(_summary_sentence(summary), highlight=False)
    results.print(
        f"run folder: {folder}"
        + ("" if shown is None else f"   {'film' if shown[0].suffix == '.webm' else 'picture'}: {shown[0]}"),
        highlight=False,
    )
    if shown is not None:
        results.print(shown[1], highlight=False)


def _summary_sentence(summary: dict[str, Any]) -> str:
    """The main results of the table as a sentence."""
    m = summary["methods"]
    success = {name: f"{m[name]['success']['rate']:.0%}" for name in METHODS}
    saved = 1.0 - m["adahi"]["latency"]["per_action_ms"] / m["hybrid"]["latency"]["per_action_ms"]
    return (
        f"The draft alone succeeds in {success['draft']} of the episodes, the target in {success['target']}. "
        f"ADAHI sends {m['adahi']['transmission_rate']:.0%} of the steps, succeeds in {success['adahi']} "
        f"(random at the same rate: {success['random']}) and takes {saved:.0%} less time per action than hybrid."
    )


def _film(folder: Path) -> tuple[Path, str] | None:
    """Writes a film of an episode of the run, and why that one, if this machine can render the environment."""
    try:
        from specact.lab.report.films import show_film
        from specact.lab.report.runs import find_runs
    except ModuleNotFoundError:
        return None
    try:
        shown = show_film(find_runs([folder])[0][0], ("draft", "adahi", "hybrid"))
    except ConfigError:
        return None
    path = folder / "film.webm"
    write_whole(path, shown.film.video)
    return path, shown.why


def _picture(bundle: str, summary: dict[str, Any], folder: Path, seed: int) -> tuple[Path, str] | None:
    """Writes a picture of rollouts, and says which, if Matplotlib is installed and the environment can be drawn."""
    try:
        from specact.lab.report.paths import POINTS, choose, draw_paths, trace
    except ModuleNotFoundError:
        return None
    from specact.families.codes.bundle import load_bundle
    from specact.gates import Always, Never
    from specact.gates.calibration import calibrated_gate
    from specact.policy import SpeculativePolicy

    if summary["env"] not in POINTS:
        return None
    loaded = load_bundle(bundle)
    try:
        gates = {"draft": Never(), "ADAHI": calibrated_gate(loaded, "deviation", summary["rate"]), "hybrid": Always()}
    except ConfigError:
        return None

    @cache
    def traced(name: str, episode: int) -> TracedEpisode:
        return trace(SpeculativePolicy(loaded, gates[name], seed=seed), summary["env"], episode, seed)

    shown = choose(lambda episode: traced("draft", episode).success, summary["episodes"])
    rows = {name: [traced(name, episode) for episode in shown] for name in gates}
    failing = sum(not episode.success for episode in rows["draft"])
    alone = summary["methods"]["draft"]["success"]
    title = (
        f"The first {failing} episodes in which the draft alone fails, and the first {len(shown) - failing} in which "
        f"it succeeds (of all {alone['n']} it fails in {alone['n'] - alone['k']})"
    )
    path = folder / "rollouts.png"
    draw_paths(rows, summary["env"], title, path)
    return path, f"{title}."
