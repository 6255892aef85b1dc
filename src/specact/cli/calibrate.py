"""``specact calibrate`` finds a gate's threshold for a wanted transmission rate."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs
from tyro.conf import Positional

from specact.cli.options import Flat, Maybe, Options, Parts, Rare
from specact.cli.output import print_result, progress_bars, remark
from specact.errors import unknown_name
from specact.files import check_folder
from specact.gates.settings import CALIBRATED, LEARNED, gate_for, gate_settings, load_gate
from specact.records import Count, InsideUnit, Seed

if TYPE_CHECKING:
    from specact.gates.calibration import Calibration
    from specact.gates.settings import GateSettings, gate_settings
    from specact.lab.rollout.distillation import Collect
    from specact.pair import Pair


@dataclass(frozen=True)
class GateOptions(Options):
    """A gate and its rate."""

    gate: str = "deviation"  # deviation, uncertainty, learned, learned_action, oracle, oracle_action, or MODULE:GATE
    gate_options: tuple[str, ...] = ()  # parameters of the gate, NAME=VALUE, such as alpha=0.3 or max_skips=4
    rate: InsideUnit = 0.6  # wanted share of inferences that ask the target
    rounds: Count = 4  # thresholds that are tried, each on the states that the one before leads to
    seed: Seed = 0  # random seed
    retrain: bool = False  # train a learned gate again, even if the pair has one
    # inferences that a learned gate is trained on, in each of two rounds; along demonstrations, at most
    lessons: Count = 100_000
    out: Maybe[Path] = None  # folder for the calibration; the pair's own if not given
    workers: Maybe[Count] = None  # processes; one per core if not given
    json: bool = False  # print the calibration as JSON
    parts: Rare[Parts] = field(default_factory=Parts)

    def load(self, pair: str) -> Pair[Any]:
        """The pair, if its gate can be calibrated and stored: before anything is rolled out or trained.

        Raises:
            ConfigError: for a gate that cannot be calibrated for this pair, or a folder that cannot be written.
        """
        from specact.gates.settings import check_options

        check_options(self.gate_options, [self.gate])
        if not load_gate(self.gate).calibrated:
            raise unknown_name("gate that can be calibrated", self.gate, CALIBRATED, plugins=True)
        loaded = self.parts.load(pair)
        gate_for(self.gate, loaded)
        check_folder(self._folder(loaded))
        return loaded

    def settings(
        self, pair: Pair[Any], collect: Collect, update: Callable[[str, int, int], None], rounds: int = 2
    ) -> GateSettings:
        """The gate without its threshold; the head of a learned one is trained if it has to be."""
        from specact.bundle.bundle import HEAD

        if self.gate in LEARNED and (self.retrain or pair.path is None or not (pair.path / HEAD).exists()):
            _train_head(pair, collect, update, self.seed, rounds)
        return gate_settings(self.gate, pair, self.gate_options)

    def report(self, pair: Pair[Any], made: Calibration) -> None:
        """Stores a calibration, and prints it."""
        path = made.save(self._folder(pair))
        print_result(self.json, asdict(made), [*self._lines(made), f"written: {path}"])

    def _lines(self, made: Calibration) -> Iterator[str]:
        """The threshold, and what the scores say of rejections, or of the distance to the target."""
        from specact.lab.evaluation.calibrate import TOLERANCE

        held_out, model = made.held_out, made.model
        rate, inferences, episodes = held_out["rate"], held_out["inferences"], held_out["episodes"]
        yield f"{self.gate} at rate {self.rate:g}: threshold {made.settings.threshold:.4g}"
        yield f"held out: rate {rate:.3f} over {inferences} inferences of {episodes} episodes"
        if "linear" in model:
            for form in ("linear", "logarithmic"):
                yield f"{form} rejection model: slope {model[form]['slope']:+.3g}, R² {model[form]['r2']:.2f}"
            yield f"Spearman {model['spearman']:+.2f}, AUROC {model['auroc']:.2f} over single steps"
            if model["linear"]["slope"] < 0:
                remark(
                    "the slope is negative: this gate asks where the target would have accepted the draft", warn=True
                )
        else:
            yield f"Spearman {model['spearman']:+.2f} between score and distance to the target over single steps"
        if abs(rate - self.rate) > TOLERANCE:
            remark(f"this is more than {TOLERANCE} from the wanted rate; use more --episodes or --rounds", warn=True)

    def _folder(self, pair: Pair[Any]) -> Path:
        return self.out or Path(pair.path or ".") / "calibration"


@dataclass(frozen=True)
class Calibrate(Options):
    """Find a gate's threshold for a transmission rate, on states of the gated policy, checked on held-out episodes.

    A learned gate is trained first if the pair has none; its head is written into the pair's folder. Without a
    simulator: specact offline calibrate. More options: --help-all.
    """

    pair: Positional[str]  # path or name of a pair, or MODULE:NAME
    options: Flat[GateOptions] = field(default_factory=GateOptions)
    env: Maybe[str] = None  # environment, a name or MODULE:TASK; the pair's own if not given
    episodes: Count = 40  # episodes per round, and for the check

    def run(self) -> None:
        from specact.lab.envs import env_of
        from specact.lab.evaluation.calibrate import CalibrationRun, calibrate
        from specact.lab.rollout.distillation import collector
        from specact.lab.rollout.pool import Pool

        options = self.options
        pair = options.load(self.pair)
        world, total = self.env or env_of(pair, None), self.episodes * (options.rounds + 2)
        how = CalibrationRun(options.rate, self.episodes, options.rounds, options.seed)
        with progress_bars() as update, Pool(options.workers) as pool:
            collect = collector(options.lessons, pool, update, world, training_folder(pair) / "frames")
            made = calibrate(
                pair, options.settings(pair, collect, update), how, env=world, pool=pool,
                advance=lambda done: update(f"calibrating {options.gate}", done, total),
            )  # fmt: skip
        options.report(pair, made)


def training_folder(pair: Pair[Any]) -> Path:
    """Folder in which a head of this pair, as it was loaded, is trained; removed afterwards."""
    from specact.gates.learned import TRAINING, TrainedFor

    return Path(pair.path or ".") / TRAINING / "-".join(filter(None, vars(TrainedFor.of(pair)).values()))


def _train_head(
    pair: Pair[Any], collect: Collect, update: Callable[[str, int, int], None], seed: int, rounds: int
) -> None:
    from specact.families.codes.pair import CodeParts
    from specact.lab.train.head import DISTANCE, HeadRecipe, train_head

    recipe, folder = HeadRecipe() if isinstance(pair.parts, CodeParts) else DISTANCE, training_folder(pair)
    metrics = train_head(pair, structs.replace(recipe, seed=seed, rounds=rounds), collect, folder, update)
    shutil.rmtree(folder)
    with suppress(OSError):  # another head is being trained, or was stopped
        folder.parent.rmdir()
    remark("head, held out: " + "  ".join(f"{name} {value:.3f}" for name, value in metrics.items()))
