"""``specact calibrate`` finds a gate's threshold for a rate; ``specact offline`` also compares, without a simulator."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from msgspec import structs
from tyro.conf import Positional

from specact.cli.eval import Comparison
from specact.cli.options import ConfigFile, Flat, Maybe, Options, Parts, Rare
from specact.cli.output import command_line, lines_of, print_result, progress_bars, remark, table_of
from specact.errors import ConfigError, unknown_name
from specact.files import check_folder
from specact.gates.calibration import TOLERANCE, Calibration
from specact.gates.learned import TRAINING, head_file, trained_for
from specact.gates.settings import CALIBRATED, LEARNED, GateSettings, check_options, gate_settings, load_gate
from specact.pair import Pair
from specact.records import Count, InsideUnit, Seed

if TYPE_CHECKING:
    from specact.lab.data.episodes import Episodes
    from specact.lab.rollout.distillation import Collect, DistillationData


@dataclass(frozen=True, kw_only=True)
class GateOptions(Options):
    """A pair's gate, and its rate."""

    pair: Positional[str]  # path or name of a pair, or MODULE:NAME
    gate: str = "adahi"  # adahi, uncertainty, learned, learned_action, oracle, oracle_action, or MODULE:GATE
    gate_options: tuple[str, ...] = ()  # parameters of the gate, NAME=VALUE, such as alpha=0.3 or max_skips=4
    rate: InsideUnit = 0.6  # wanted share of inferences that ask the target
    # the score's quantile at that rate; or, as ADAHI writes it, from how rejections are distributed (r_th) through a
    # linear or logarithmic fit of them over the score
    threshold: Literal["quantile", "linear", "logarithmic"] = "quantile"
    rounds: Count = 4  # thresholds that are tried, each on the states that the one before leads to
    seed: Seed = 0  # random seed
    retrain: bool = False  # train a learned gate again, even if the pair has one
    # inferences that a learned gate is trained on, in each of two rounds; 100000 if not given, or all of the data
    lessons: Maybe[Count] = None
    out: Maybe[Path] = None  # folder for the calibration; the pair's own if not given
    workers: Maybe[Count] = None  # processes; one per core if not given
    json: bool = False  # print the calibration as JSON
    parts: Rare[Parts] = field(default_factory=Parts)

    def load(self) -> Pair[Any]:
        """The pair; ConfigError before any rollout if its gate cannot be calibrated, or the folder not be written."""
        if not load_gate(self.gate).calibrated:
            raise unknown_name("gate that can be calibrated", self.gate, CALIBRATED, plugins=True)
        if self.gate not in LEARNED and (self.retrain or self.lessons is not None):
            raise ConfigError(f"--retrain and --lessons are for a gate that is trained: {' or '.join(LEARNED)}")
        loaded = self.parts.load(self.pair)
        check_options(self.gate_options, [self.gate], loaded.exchange.contract.family)
        check_folder(self._folder(loaded))
        return loaded

    def settings(
        self, pair: Pair[Any], collect: Collect, update: Callable[[str, int, int], None], rounds: int = 2
    ) -> GateSettings:
        """The gate without its threshold; the head of a learned one is trained if it has to be."""
        if self.gate in LEARNED and (self.retrain or head_file(pair) is None):
            from specact.families.codes.pair import CodeParts
            from specact.lab.train.head import DISTANCE, HeadRecipe, train_head

            recipe, folder = HeadRecipe() if isinstance(pair.parts, CodeParts) else DISTANCE, training_folder(pair)
            metrics = train_head(pair, structs.replace(recipe, seed=self.seed, rounds=rounds), collect, folder, update)
            shutil.rmtree(folder)
            with suppress(OSError):  # another head is being trained, or was stopped
                folder.parent.rmdir()
            remark("head, held out: " + "  ".join(f"{name} {value:.3f}" for name, value in metrics.items()))
        return gate_settings(self.gate, pair, self.gate_options)

    def report(self, pair: Pair[Any], calibration: Calibration) -> None:
        """Stores a calibration, and prints it."""
        path = calibration.save(self._folder(pair))
        print_result(self.json, asdict(calibration), [*self._lines(calibration), f"written: {path}"])

    def _lines(self, calibration: Calibration) -> Iterator[str]:
        """The threshold, and what the scores say of rejections, or of the distance to the target."""
        model, statistics = calibration.model, ("spearman", "auroc", "linear", "logarithmic")
        yield f"{self.gate} at rate {self.rate:g}: threshold {calibration.settings.threshold:.4g}"
        yield from lines_of({"held out": calibration.held_out} | {name: model.get(name) for name in statistics})
        if "linear" in model and model["linear"]["slope"] < 0:
            remark("the slope is negative: this gate asks where the target would have accepted the draft", warn=True)
        if abs(calibration.held_out["rate"] - self.rate) > TOLERANCE:
            more = "more episodes or --rounds" if self.threshold == "quantile" else "--threshold quantile"
            remark(f"this is more than {TOLERANCE} from the wanted rate; use {more}", warn=True)

    def _folder(self, pair: Pair[Any]) -> Path:
        return self.out or Path(pair.path or ".") / "calibration"


@dataclass(frozen=True, kw_only=True)
class Calibrate(GateOptions):
    """Find a gate's threshold for a rate, on states of the gated policy, checked on held-out episodes.

    A learned gate is trained first if the pair has none; its head is written into the pair's folder. Without a
    simulator: specact offline calibrate. More options: --help-all.
    """

    env: Maybe[str] = None  # environment, a name or MODULE:TASK; the pair's own if not given
    episodes: Count = 40  # episodes per round, and for the check
    config: ConfigFile = None  # file of options; what is typed goes first

    def run(self) -> None:
        from specact.lab.envs import env_of
        from specact.lab.evaluation.calibrate import calibrate
        from specact.lab.rollout.distillation import collector
        from specact.lab.rollout.pool import Pool

        pair = self.load()
        world, rounds = self.env or env_of(pair.env), self.rounds if self.threshold == "quantile" else 0
        total = self.episodes * (rounds + 2)
        with progress_bars() as update, Pool(self.workers) as pool:
            collect = collector(self.lessons or 100_000, pool, update, world, training_folder(pair) / "frames")
            calibration = calibrate(
                pair, self.settings(pair, collect, update), self.rate, episodes=self.episodes, rounds=self.rounds,
                seed=self.seed, env=world, pool=pool, threshold=self.threshold,
                advance=lambda done: update(f"calibrating {self.gate}", done, total),
            )  # fmt: skip
        self.report(pair, calibration)


def training_folder(pair: Pair[Any]) -> Path:
    """Folder in which a head of this pair, as it was loaded, is trained; removed afterwards."""
    return Path(pair.path or ".") / TRAINING / "-".join(filter(None, trained_for(pair).values()))


@dataclass(frozen=True)
class Demonstrations(Options):
    """Demonstrations of a pair."""

    data: Maybe[Path] = None  # folder that the recipe's data paths are relative to
    recipe: Maybe[Path] = None  # of these demonstrations; the pair's own if not given
    env: Maybe[str] = None  # environment that the recipe names, if it is MODULE:TASK

    def split(self, pair: Pair[Any]) -> tuple[Episodes, Episodes]:
        """The demonstrations that were trained on, and those that were held out.

        ConfigError if there is no recipe, or it names files and no folder is given; DataError if they are unreadable.
        """
        from specact.lab.data.generate import split_demonstrations
        from specact.lab.evaluation.offline import demonstrations_of
        from specact.lab.train.recipe import Recipe, load_recipe

        recipe = demonstrations_of(pair, self.env) if self.recipe is None else load_recipe(self.recipe, Recipe)
        return split_demonstrations(recipe, self.data)


@dataclass(frozen=True, kw_only=True)
class OfflineCalibrate(GateOptions):
    """Find a gate's threshold for a rate along demonstrations that were kept back in training.

    A learned gate is trained first if the pair has none, along those that were trained on. More options: --help-all.
    """

    demonstrations: Flat[Demonstrations] = field(default_factory=Demonstrations)
    config: ConfigFile = None  # file of options; what is typed goes first

    def run(self) -> None:
        from specact.lab.evaluation.offline import calibrate_offline
        from specact.lab.rollout.pool import Pool

        pair = self.load()
        trained_on, held_out = self.demonstrations.split(pair)
        count, frames = min(self.lessons or 100_000, trained_on.steps), training_folder(pair) / "frames"
        with progress_bars() as update, Pool(self.workers) as pool:

            def collect(pair: Pair[Any], gates: Sequence[GateSettings], number: int) -> DistillationData:
                from specact.lab.train.head import demonstrated_lessons

                return demonstrated_lessons(
                    pair, trained_on, count, frames, lambda done: update("lessons", done, count), seed=self.seed
                )

            gate = self.settings(pair, collect, update, rounds=1)
            calibration = calibrate_offline(
                pair, gate, self.rate, held_out, pool, update,
                rounds=self.rounds, seed=self.seed, threshold=self.threshold,
            )  # fmt: skip
        self.report(pair, calibration)


@dataclass(frozen=True, kw_only=True)
class OfflineEval(Comparison):
    """Compare methods by errors and transmissions along demonstrations that were kept back in training.

    Open loop: actions do not change the next observations. More options: --help-all.
    """

    demonstrations: Flat[Demonstrations] = field(default_factory=Demonstrations)

    def run(self) -> None:
        from specact.lab.evaluation.offline import evaluate_offline
        from specact.lab.rollout.pool import Pool

        pair = self.parts.load(self.pair)
        _, held_out = self.demonstrations.split(pair)
        with Pool(self.workers) as pool, progress_bars() as update:
            summary = evaluate_offline(
                pair, self.names, held_out, self.rate, self.folder, pool, update,
                gate_options=self.gate_options, seed=self.seed, command=command_line(),
            )  # fmt: skip
        rows = [{"method": name, **metrics} for name, metrics in summary["methods"].items()]
        columns = {
            "method": "method", "error.mean": "error", "error.low": "low", "error.high": "high",
            "sent": "sent", "action_change_loss": "change",
        }  # fmt: skip
        caption = (
            "error: mean squared error to the demonstrated actions, normalised · sent: share that asked · change: "
            "mean change of the action that verification of a skipped step would have made"
        )
        title = f"{summary['bundle']}: {summary['episodes']} demonstrations"
        self.report(summary, table_of(title, rows, columns, caption))


Offline = (
    Annotated[OfflineCalibrate, tyro.conf.subcommand("calibrate")]
    | Annotated[OfflineEval, tyro.conf.subcommand("eval")]
)
