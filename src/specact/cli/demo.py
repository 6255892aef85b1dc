"""``specact demo`` compares methods of a pair on the same simulated episodes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from tyro.conf import Positional

from specact.cli.eval import contrast_lines, summary_table
from specact.cli.options import Maybe, Options
from specact.cli.output import command_line, print_result, progress_bars
from specact.errors import ConfigError
from specact.files import write_whole
from specact.records import Count, Seed

if TYPE_CHECKING:
    from specact.pair import Pair

METHODS = ("draft", "target", "hybrid", "random", "adahi")
# Of flow and token policies; the first two need no drafter that was trained for the target.
FLOW, TOKENS = ("full", "full_2", "flash", "unchecked"), ("ar", "strict_last", "specvla", "kerv")


@dataclass(frozen=True)
class Demo(Options):
    """Run draft, target, hybrid, random and ADAHI on the same simulated episodes and print a comparison.

    For a token policy or a flow policy, compare its decodings, such as Spec-VLA, KERV and FLASH.
    """

    pair: Positional[str] = "ball"  # path or name of a bundle
    episodes: Count = 60  # episodes per method
    seed: Seed = 0  # random seed
    out: Maybe[Path] = None  # run folder; a new one under runs/ if not given
    workers: Maybe[Count] = None  # processes; one per core if not given
    json: bool = False  # print the summary as JSON

    def run(self) -> None:
        from specact.lab.evaluation.evaluation import Evaluation
        from specact.lab.evaluation.run import evaluate
        from specact.lab.rollout.pool import Pool
        from specact.load import load_pair

        pair = load_pair(self.pair)
        methods, folder = _methods_of(pair), self.out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
        with Pool(self.workers) as pool, progress_bars() as update:
            what = Evaluation(self.pair, None, methods, self.episodes, self.seed)
            summary = evaluate(what, folder, update, pool, command=command_line())
        lines: list[str | Table] = [summary_table(summary), *contrast_lines(summary)]
        if methods == METHODS:
            lines.append(_sentence(summary))
            if (shown := _shown(pair, summary, self.seed, folder)) is not None:
                summary |= {"shown": str(shown[0]), "choice": shown[1]}
                lines += [f"{'film' if shown[0].suffix == '.webm' else 'picture'}: {shown[0]}", shown[1]]
        print_result(self.json, summary, [*lines, f"run folder: {folder}"])


def _methods_of(pair: Pair[Any]) -> tuple[str, ...]:
    from specact.families.tokens.pair import TokenParts
    from specact.systems.flow import FlashParts

    if isinstance(pair.parts, FlashParts):
        return FLOW if pair.parts.block is not None else FLOW[:2]
    if isinstance(pair.parts, TokenParts):
        return TOKENS if pair.parts.drafters is not None else TOKENS[:2]
    return METHODS


def _sentence(summary: dict[str, Any]) -> str:
    """The main results of the table."""
    m = summary["methods"]
    success = {name: f"{m[name]['success']['rate']:.0%}" for name in METHODS}
    saved = 1.0 - m["adahi"]["latency"]["per_action_ms"] / m["hybrid"]["latency"]["per_action_ms"]
    return (
        f"The draft alone succeeds in {success['draft']} of the episodes, the target in {success['target']}. "
        f"ADAHI sends {m['adahi']['transmission_rate']:.0%} of the steps, succeeds in {success['adahi']} "
        f"(random at the same rate: {success['random']}) and takes {saved:.0%} less time per action than hybrid."
    )


def _shown(pair: Pair[Any], summary: dict[str, Any], seed: int, folder: Path) -> tuple[Path, str] | None:
    """A picture of rollouts, or a film of an episode, and what is shown; None if this machine can make neither."""
    try:
        from specact.lab.report.paths import draw_comparison

        if (title := draw_comparison(pair, summary, seed, folder / "rollouts.png")) is not None:
            return folder / "rollouts.png", title
    except ModuleNotFoundError:
        pass
    try:
        from specact.lab.evaluation.runs import find_runs
        from specact.lab.report.film import show_film

        shown = show_film(find_runs([folder])[0][0], ("draft", "adahi", "hybrid"))
    except (ModuleNotFoundError, ConfigError):
        return None
    write_whole(folder / "film.webm", shown.video)
    return folder / "film.webm", shown.why
