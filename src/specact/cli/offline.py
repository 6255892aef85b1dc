"""``specact offline`` calibrates gates and compares methods along demonstrations, without a simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import Positional

from specact.cli.calibrate import GateOptions, training_folder
from specact.cli.eval import Comparison
from specact.cli.options import Flat, Maybe, Options
from specact.cli.output import command_line, progress_bars, table_of
from specact.errors import ConfigError

if TYPE_CHECKING:
    from specact.gates.settings import GateSettings
    from specact.lab.data.episodes import Episodes
    from specact.lab.rollout.distillation import DistillationData
    from specact.pair import Pair


@dataclass(frozen=True)
class Demonstrations(Options):
    """Demonstrations of a pair."""

    data: Maybe[Path] = None  # folder that the recipe's data paths are relative to
    recipe: Maybe[Path] = None  # of these demonstrations; the pair's own if not given
    env: Maybe[str] = None  # environment that the recipe names, if it is MODULE:TASK

    def split(self, pair: Pair[Any]) -> tuple[Episodes, Episodes]:
        """Those that were trained on, and those that were held out.

        Raises:
            ConfigError: if there is no recipe, or it names files and there is no folder.
            DataError: if they cannot be read.
        """
        from specact.families.codes.pair import CodeParts
        from specact.lab.data.generate import demonstrations
        from specact.lab.envs import load_task
        from specact.lab.evaluation.offline import demonstration_split
        from specact.lab.train.recipe import Recipe, load_recipe

        if self.recipe is None:
            if not isinstance(pair.parts, CodeParts) or not pair.parts.manifest.recipe:
                raise ConfigError(
                    f"{pair.name} holds no recipe, so its demonstrations are unknown; name them with --recipe, the "
                    "recipe of the draft, and --data, the folder of its files"
                )
            return demonstration_split(pair.parts, self.data, self.env)
        wanted = load_recipe(self.recipe, Recipe)
        if wanted.data and self.data is None:
            raise ConfigError(f"{self.recipe} names files ({', '.join(wanted.data)}); give their folder with --data")
        made = demonstrations(
            None if wanted.env is None else load_task(wanted.env),
            [(self.data or Path()) / name for name in wanted.data], wanted.generate_episodes, wanted.generate_noise,
            wanted.seed, sources=wanted.observations, rate_hz=wanted.rate_hz,
        )  # fmt: skip
        return made.split(wanted.held_out, wanted.seed)


@dataclass(frozen=True)
class Calibrate(Options):
    """Find a gate's threshold for a transmission rate along demonstrations that were kept back in training.

    A learned gate is trained first if the pair has none, along those that were trained on. More options: --help-all.
    """

    pair: Positional[str]  # path or name of a pair, or MODULE:NAME
    demonstrations: Flat[Demonstrations] = field(default_factory=Demonstrations)
    options: Flat[GateOptions] = field(default_factory=GateOptions)

    def run(self) -> None:
        from specact.lab.evaluation.offline import calibrate_offline
        from specact.lab.rollout.pool import Pool

        options = self.options
        pair = options.load(self.pair)
        trained_on, held_out = self.demonstrations.split(pair)
        with progress_bars() as update, Pool(options.workers) as pool:

            def collect(pair: Pair[Any], gates: Sequence[GateSettings], number: int) -> DistillationData:
                from specact.lab.train.head import demonstrated_lessons

                count = min(options.lessons, trained_on.steps)
                return demonstrated_lessons(
                    pair, trained_on, count, training_folder(pair) / "frames",
                    lambda done: update("lessons", done, count), seed=options.seed,
                )  # fmt: skip

            gate = options.settings(pair, collect, update, rounds=1)
            made = calibrate_offline(
                pair, gate, options.rate, held_out, pool, update, rounds=options.rounds, seed=options.seed
            )
        options.report(pair, made)


@dataclass(frozen=True)
class Eval(Options):
    """Compare methods by errors and transmissions along demonstrations that were kept back in training.

    Open loop: actions do not change the next observations. More options: --help-all.
    """

    pair: Positional[str]  # path or name of a pair, or MODULE:NAME
    options: Flat[Comparison]
    demonstrations: Flat[Demonstrations] = field(default_factory=Demonstrations)

    def run(self) -> None:
        from specact.lab.evaluation.offline import evaluate_offline
        from specact.lab.rollout.pool import Pool

        options = self.options
        pair = options.parts.load(self.pair)
        _, held_out = self.demonstrations.split(pair)
        with Pool(options.workers) as pool, progress_bars() as update:
            summary = evaluate_offline(
                pair, options.methods, held_out, options.rate, options.out, pool, update,
                gate_options=options.gate_options, seed=options.seed, command=command_line(),
            )  # fmt: skip
        title = f"{summary['bundle']}: {summary['episodes']} demonstrations"
        options.report(summary, table_of(title, [_row(*method) for method in summary["methods"].items()], _CAPTION))


Offline = Annotated[Calibrate, tyro.conf.subcommand("calibrate")] | Annotated[Eval, tyro.conf.subcommand("eval")]

_CAPTION = (
    "error: mean squared error to the demonstrated actions, normalised · sent: transmission rate · change: mean "
    "change of the action that verification of a skipped step would have made"
)


def _row(name: str, metrics: dict[str, Any]) -> dict[str, str]:
    error, change = metrics["error"], metrics["action_change_loss"]
    return {
        "method": name, "error": f"{error['mean']:.4f}", "95 %": f"{error['low']:.3f}-{error['high']:.3f}",
        "sent": f"{metrics['transmission_rate']:.2f}", "change": "-" if change is None else f"{change:.2f}",
    }  # fmt: skip
