"""``specact data info`` describes demonstrations; ``generate`` and ``from-recording`` make some."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from specact.cli.options import changed, refuse_unused
from specact.cli.output import print_json, progress_bars, remarks, results
from specact.errors import ConfigError
from specact.files import check_folder

if TYPE_CHECKING:
    from specact.lab.data.episodes import Episodes
    from specact.observation import Field, ObservationSpec


@dataclass(frozen=True)
class Info:
    """Describe demonstrations and warn of problems for training."""

    path: tyro.conf.Positional[Path]
    """npz file, zarr replay buffer, LeRobot dataset folder (v2.1, v3.0), or robomimic HDF5 file."""
    recipe: Path | None = None
    """A recipe: show the data as it reads them, in its environment's terms, and what each of its policies sees."""
    json: bool = False
    """Print the description as JSON."""

    def run(self) -> None:
        from specact.lab.data.info import describe
        from specact.lab.data.readers import read

        episodes, seen = (read(self.path), {}) if self.recipe is None else self._as_the_recipe_reads_them(self.recipe)
        description = describe(episodes, self.path)
        if self.json:
            policies = {} if self.recipe is None else {"policies": {who: spec.describe() for who, spec in seen.items()}}
            print_json(description.as_dict() | policies)
            return
        for name, value in description.as_dict().items():
            if name != "warnings":
                results.print(f"{name:18} {_format_value(value)}", highlight=False, soft_wrap=True)
        for who, spec in seen.items():
            fields = ", ".join(f"{name} {_format_field(field)}" for name, field in spec.fields.items())
            results.print(f"policy {who:11} sees {fields}", highlight=False, soft_wrap=True)
        for warning in description.warnings:
            remarks.print(f"warning: {warning}", style="yellow", highlight=False, soft_wrap=True)

    def _as_the_recipe_reads_them(self, path: Path) -> tuple[Episodes, dict[str, ObservationSpec]]:
        from specact.lab.data.generate import demonstrations
        from specact.lab.envs import load_task
        from specact.lab.train.chunk_recipe import load_any_recipe
        from specact.lab.train.windows import observation_of

        recipe, policies = load_any_recipe(path)
        task = None if recipe.env is None else load_task(recipe.env)
        made = demonstrations(
            task, [self.path], 0, 0.0, recipe.seed, sources=recipe.observations, rate_hz=recipe.rate_hz
        )
        seen = {who: observation_of(policy, recipe, made, f"policy {who!r}") for who, policy in policies.items()}
        return made, seen


@dataclass(frozen=True)
class Generate:
    """Generate demonstrations with a scripted expert; a folder is recorded on several processes, and resumes."""

    env: str
    """A task with a scripted expert: ball, ball-chase, swarm, peg, metaworld or one of its tasks (metaworld/reach-v3),
    or MODULE:TASK for one of your own."""
    out: Path
    """What to write: an .npz file, or a folder for a LeRobot dataset (v3.0) with camera frames and instructions."""
    episodes: int = 200
    """Successful episodes to keep; of a suite, of each of its tasks."""
    seed: int = 0
    """Random seed."""
    noise: float = 0.0
    """Standard deviation of bursts of noise on executed actions. Recorded actions are the expert's."""
    pixels: int = 64
    """Height and width of the frames of each camera, in a folder; 0 for no frames."""
    privileged: bool = False
    """In a folder: also record what only the simulator knows, such as the positions of objects (privileged.*), for
    auxiliary in recipes."""
    workers: int | None = None
    """Processes that record a folder; as many as there are processors if not given."""
    json: bool = False
    """Print the counts as JSON."""

    def run(self) -> None:
        if self.out.suffix not in ("", ".npz"):
            raise ConfigError(f"--out must be a .npz file, or a folder whose name has no dot, got {self.out}")
        if self.out.suffix:
            refuse_unused(
                changed(self, ["pixels", "privileged", "workers"]),
                "is for a folder; leave it out, or name a folder with --out",
            )
        check_folder(self.out.parent)
        counts = {"path": str(self.out), **(self._file() if self.out.suffix else self._folder())}
        if self.json:
            print_json(counts)
            return
        results.print(
            f"{counts['kept']} episodes ({counts['steps']} steps) of {counts['tried']} tried: {self.out}",
            highlight=False,
        )
        for name, task in counts.get("tasks", {}).items():
            results.print(f"{name:40} {task['kept']} of {task['tried']}", highlight=False)

    def _file(self) -> dict[str, Any]:
        from specact.lab.data.generate import generate, save
        from specact.lab.envs import load_task

        task = load_task(self.env)
        if task.tasks:
            raise ConfigError(
                f"demonstrations of {task.name} have instructions, which an .npz file does not hold; name a folder, "
                f"such as --out {self.out.with_suffix('')}"
            )
        with progress_bars() as update:
            made = generate(
                task, self.episodes, self.seed, self.noise, lambda done: update("demonstrations", done, self.episodes)
            )
        save(self.out, made.episodes)
        return {"kept": len(made.episodes), "tried": made.tried, "steps": made.episodes.steps}

    def _folder(self) -> dict[str, Any]:
        from specact.lab.data.record import Order, record
        from specact.lab.rollout.pool import Pool

        order = Order(self.env, self.seed, self.noise, self.pixels, self.privileged)
        with Pool(self.workers) as pool, progress_bars() as update:
            made = record(order, self.out, self.episodes, pool.each, partial(update, "demonstrations"))
        tasks = {name: {"kept": made.kept[name], "tried": made.tried[name]} for name in made.kept}
        kept, tried = sum(made.kept.values()), sum(made.tried.values())
        return {"kept": kept, "tried": tried, "steps": made.steps, "tasks": tasks}


@dataclass(frozen=True)
class FromRecording:
    """Convert recordings of specact run --record to a LeRobot dataset (v3.0), for training."""

    recordings: tyro.conf.Positional[tuple[Path, ...]]
    """MCAP files, of the same observations and control rate."""
    out: Path
    """The dataset's folder."""
    json: bool = False
    """Print the counts as JSON."""

    def run(self) -> None:
        from specact.lab.data.recordings import to_dataset

        if not self.recordings:
            raise ConfigError("give at least one recording, as in: specact data from-recording run.mcap --out dataset")
        check_folder(self.out)
        with progress_bars() as update:
            made = to_dataset(self.recordings, self.out, partial(update, "recordings"))
        written = made.written
        counts = {
            "path": str(self.out), "episodes": sum(written.kept.values()), "steps": written.steps,
            "tasks": written.kept, "left_out": made.left_out, "cut": made.cut,
        }  # fmt: skip
        if self.json:
            print_json(counts)
            return
        results.print(
            f"{counts['episodes']} episodes ({written.steps} steps): {self.out}; {made.left_out} steps left out, "
            f"{made.cut} episodes begin after a gap",
            highlight=False, soft_wrap=True,
        )  # fmt: skip


def data(
    action: Annotated[
        Annotated[Info, tyro.conf.subcommand("info")]
        | Annotated[Generate, tyro.conf.subcommand("generate")]
        | Annotated[FromRecording, tyro.conf.subcommand("from-recording")],
        tyro.conf.arg(name=""),  # otherwise the words would be "action:info" and "--action.json"
    ],
) -> None:
    """Describe or generate demonstrations, or make them of recordings."""
    action.run()


def _format_field(field: Field) -> str:
    """Shape, type and history of an observation's field, as text."""
    shape = " x ".join(str(size) for size in field.shape)
    return f"[{shape}] {field.dtype}, " + (f"the last {field.history}" if field.history else "the newest")


def _format_value(value: Any) -> str:
    """A value as text: numbers with three decimals, quantiles on lines of their own."""
    if isinstance(value, dict) and all(isinstance(entry, list) for entry in value.values()):
        return "".join(f"\n  {name:>16} {_format_value(entry)}" for name, entry in value.items())
    if isinstance(value, list):
        return (", " if value and isinstance(value[0], str) else " ").join(_format_value(entry) for entry in value)
    return f"{value:.3f}" if isinstance(value, float) else str(value)
