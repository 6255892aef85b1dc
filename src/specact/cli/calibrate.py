"""``specact calibrate`` finds a gate's threshold for a wanted transmission rate."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specact.cli.options import changed, refuse_unused
from specact.cli.output import Flat, print_json, progress_bars, remarks, results
from specact.errors import unknown_name
from specact.files import check_folder
from specact.gates.settings import BUNDLE_DEFAULTS, CALIBRATED, LEARNED, GateChoices, gate_for, load_gate

if TYPE_CHECKING:
    from specact.families.load import AnyPair
    from specact.gates.calibration import Calibration
    from specact.gates.settings import GateSettings
    from specact.lab.data.distillation import DistillationData
    from specact.lab.rollout.distillation import Collect


@dataclass(frozen=True)
class CalibrateOptions:
    """Pair, gate and data of a calibration.

    Attributes:
        bundle: path or name of a bundle, or MODULE:NAME for a pair of your own.
        env: environment, a name or MODULE:TASK; the bundle's own if not given.
        gate: deviation, uncertainty, learned, learned_action, oracle, oracle_action, or MODULE:GATE for one of your
            own.
        rate: target share of inferences to transmit.
        episodes: in a simulator: number of episodes per round, and for the held-out check.
        rounds: number of rounds: of episodes of the gated policy, or with --offline along the demonstrations.
        seed: random seed.
        gates: settings that the papers do not specify.
        offline: without a simulator, along demonstrations that were kept back in training.
        recipe: with --offline: recipe of these demonstrations; the bundle's own if not given.
        data: with --offline: folder that the recipe's data paths are relative to.
        retrain: train a learned gate again, even if the bundle has one.
        lessons: number of inferences to train a learned gate on, in each of two rounds; with --offline at most so many
            steps, in one.
        draft: of a pair of chunk policies, where the pair does not name it: MODULE:NAME, a .toml file, lerobot:PATH@HZ
            or openpi:ws://HOST:PORT#FILE.toml; of a token or flow policy any of these, or a bundle of a policy.
        target: of a pair of chunk policies likewise.
        decoding: of a token or flow policy, see specact run --help: what it proposes and verifies.
        out: folder for the calibration; the bundle's own if not given.
        workers: processes; one per core if not given.
        json: print the calibration as JSON.
    """

    bundle: str
    env: str | None = None
    gate: str = "deviation"
    rate: float = 0.6
    episodes: int = 40
    rounds: int = 4
    seed: int = 0
    gates: GateChoices = BUNDLE_DEFAULTS
    offline: bool = False
    recipe: Path | None = None
    data: Path | None = None
    retrain: bool = False
    lessons: int = 100_000
    draft: str | None = None
    target: str | None = None
    decoding: str = ""
    out: Path | None = None
    workers: int | None = None
    json: bool = False


def calibrate(options: Flat[CalibrateOptions]) -> None:
    """Find a gate's threshold for a transmission rate, on states of the gated policy, checked on held-out episodes.

    A learned gate is trained first if the bundle has none: on states of the gated policy, or with --offline along the
    demonstrations that were trained on. Its head is written into the bundle.
    """
    from specact.families.load import load_pair
    from specact.gates.deciding import check_gate_options

    gate = options.gate
    if options.offline:
        refuse_unused(changed(options, ["episodes"]), "is for a simulator; leave it out with --offline")
    else:
        refuse_unused(changed(options, ["recipe", "data"]), "is of demonstrations; add --offline, or leave it out")
    if gate not in LEARNED:
        refuse_unused(changed(options, ["lessons", "retrain"]), "is for a learned gate (--gate learned); leave it out")
    check_gate_options(options.gates.gate_options, [gate])
    if not load_gate(gate).calibrated:
        raise unknown_name("gate that can be calibrated", gate, CALIBRATED, plugins=True)
    pair = load_pair(options.bundle, draft=options.draft, target=options.target, decoding=options.decoding)
    gate_for(gate, pair)  # before a head is trained
    folder = options.out or Path(pair.path or ".") / "calibration"
    check_folder(folder)
    made = (_along_demonstrations if options.offline else _in_simulation)(pair, options)
    _print(made, gate, options.rate, folder, options.json)


def _in_simulation(pair: AnyPair, options: CalibrateOptions) -> Calibration:
    from specact.lab.envs import env_of
    from specact.lab.evaluation.calibrate import CalibrationRun
    from specact.lab.evaluation.calibrate import calibrate as run
    from specact.lab.rollout.distillation import collector
    from specact.lab.rollout.pool import Pool

    gate, world = options.gate, options.env or env_of(pair, None)
    how = CalibrationRun(options.rate, options.episodes, options.rounds, options.seed)
    total = options.episodes * (options.rounds + 2)
    with progress_bars() as update, Pool(options.workers) as pool:
        if _needs_training(pair, options):
            roll = collector(options.lessons, pool, update, world, _gate_folder(pair) / "frames")
            _train_gate_head(pair, roll, update, options.seed)
        settings = options.gates.settings(gate, pair)
        return run(
            pair, settings, how, env=world, pool=pool, advance=lambda done: update(f"calibrating {gate}", done, total)
        )


def _along_demonstrations(pair: AnyPair, options: CalibrateOptions) -> Calibration:
    from specact.cli.demonstrations import split_demonstrations
    from specact.lab.evaluation.offline import calibrate_offline
    from specact.lab.rollout.pool import Pool

    trained_on, shown = split_demonstrations(pair, options.recipe, options.data, options.env)
    with progress_bars() as update, Pool(options.workers) as pool:
        if _needs_training(pair, options):
            from specact.lab.train.teacher import lessons_along

            count = min(options.lessons, trained_on.steps)

            def along(pair: AnyPair, gates: Sequence[GateSettings], number: int) -> DistillationData:
                return lessons_along(
                    pair, trained_on, count, _gate_folder(pair) / "frames",
                    lambda done: update("lessons", done, count), seed=options.seed,
                )  # fmt: skip

            _train_gate_head(pair, along, update, options.seed, rounds=1)
        wanted = options.gates.settings(options.gate, pair)
        return calibrate_offline(
            pair, wanted, options.rate, shown, pool, update, rounds=options.rounds, seed=options.seed
        )


def _print(made: Calibration, gate: str, rate: float, folder: Path, json: bool) -> None:
    from specact.lab.evaluation.calibrate import TOLERANCE

    path = made.save(folder)
    if json:
        print_json(asdict(made))
        return
    model = made.model
    results.print(f"{gate} at rate {rate:g}: threshold {made.settings.threshold:.4g}", highlight=False)
    results.print(
        f"held out: rate {made.held_out['rate']:.3f} over {made.held_out['inferences']} inferences of "
        f"{made.held_out['episodes']} episodes",
        highlight=False,
    )
    if "linear" in model:
        _print_rejection_model(model)
    else:
        results.print(
            f"Spearman {model['spearman']:+.2f} between score and distance to the target over single steps",
            highlight=False,
        )
    if abs(made.held_out["rate"] - rate) > TOLERANCE:
        remarks.print(
            f"the held-out rate is more than {TOLERANCE} away from the one asked for; use more --episodes or --rounds",
            style="yellow",
        )
    results.print(f"written: {path}", highlight=False)


def _print_rejection_model(model: dict[str, Any]) -> None:
    for form in ("linear", "logarithmic"):
        fit = model[form]
        results.print(f"{form} rejection model: slope {fit['slope']:+.3g}, R² {fit['r2']:.2f}", highlight=False)
    results.print(f"Spearman {model['spearman']:+.2f}, AUROC {model['auroc']:.2f} over single steps", highlight=False)
    if model["linear"]["slope"] < 0:
        remarks.print(
            "the slope is negative: this gate transmits steps that the target would have accepted", style="yellow"
        )


def _needs_training(pair: AnyPair, options: CalibrateOptions) -> bool:
    """Whether this is a learned gate whose head has to be trained first."""
    from specact.families.head import HEAD

    return options.gate in LEARNED and (options.retrain or pair.path is None or not (pair.path / HEAD).exists())


def _gate_folder(pair: AnyPair) -> Path:
    """Folder in which a head of this pair, as it was loaded, is trained; removed afterwards."""
    from specact.families.head import TRAINING, TrainedFor

    return Path(pair.path or ".") / TRAINING / "-".join(filter(None, vars(TrainedFor.of(pair)).values()))


def _train_gate_head(
    pair: AnyPair, collect: Collect, update: Callable[[str, int, int], None], seed: int, rounds: int = 2
) -> None:
    """Trains the pair's head."""
    from specact.families.codes.bundle import Bundle
    from specact.lab.train.head import DISTANCE, HeadRecipe, train_head

    recipe = HeadRecipe() if isinstance(pair, Bundle) else DISTANCE
    folder = _gate_folder(pair)
    metrics = train_head(pair, replace(recipe, seed=seed, rounds=rounds), collect, folder, update)
    shutil.rmtree(folder)
    with suppress(OSError):  # another head is being trained, or was stopped
        folder.parent.rmdir()
    numbers = "  ".join(f"{name} {value:.3f}" for name, value in metrics.items())
    remarks.print(f"head, held out: {numbers}", highlight=False)
