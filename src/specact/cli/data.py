"""``specact data info`` describes demonstrations; ``specact data generate`` makes some with a scripted expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

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
                results.print(f"{name:18} {_short(value)}", highlight=False, soft_wrap=True)
        for who, spec in seen.items():
            fields = ", ".join(f"{name} {_window(field)}" for name, field in spec.fields.items())
            results.print(f"policy {who:11} sees {fields}", highlight=False, soft_wrap=True)
        for warning in description.warnings:
            remarks.print(f"warning: {warning}", style="yellow", highlight=False, soft_wrap=True)

    def _as_the_recipe_reads_them(self, path: Path) -> tuple[Episodes, dict[str, ObservationSpec]]:
        from specact.lab.data.generate import demonstrations
        from specact.lab.envs import load_task
        from specact.lab.train.flow_recipe import load_any_recipe
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
    """Generate demonstrations with a scripted expert."""

    env: tyro.conf.Positional[str]
    """A task with a scripted expert: ball, ball-chase, swarm, peg, or MODULE:TASK for one of your own."""
    out: Path
    """The .npz file to write."""
    episodes: int = 200
    """Successful episodes to keep."""
    seed: int = 0
    """Random seed."""
    noise: float = 0.0
    """Standard deviation of bursts of noise on executed actions. Recorded actions are the expert's."""
    json: bool = False
    """Print the counts as JSON."""

    def run(self) -> None:
        from specact.lab.data.generate import generate, save
        from specact.lab.envs import load_task

        if self.out.suffix != ".npz":
            raise ConfigError(f"--out must be a .npz file, got {self.out}")
        check_folder(self.out.parent)
        task = load_task(self.env)
        with progress_bars() as update:
            bar: Callable[[int], None] = lambda done: update("demonstrations", done, self.episodes)  # noqa: E731
            made = generate(task, self.episodes, self.seed, self.noise, bar)
        save(self.out, made.episodes)
        counts = {"path": str(self.out), "kept": len(made.episodes), "tried": made.tried, "steps": made.episodes.steps}
        if self.json:
            print_json(counts)
        else:
            results.print(
                f"{counts['kept']} episodes ({counts['steps']} steps) of {counts['tried']} tried: {self.out}",
                highlight=False,
            )


def data(
    action: Annotated[
        Annotated[Info, tyro.conf.subcommand("info")] | Annotated[Generate, tyro.conf.subcommand("generate")],
        tyro.conf.arg(name=""),  # else the words were "action:info" and "--action.json"
    ],
) -> None:
    """Describe or generate demonstrations."""
    action.run()


def _window(field: Field) -> str:
    """What a policy sees of an observation, as a person wants to read it."""
    shape = " x ".join(str(size) for size in field.shape)
    return f"[{shape}] {field.dtype}, " + (f"the last {field.history}" if field.history else "the newest")


def _short(value: Any) -> str:
    """A value as a person wants to read it: three decimals, one quantile a line."""
    if isinstance(value, dict) and all(isinstance(entry, list) for entry in value.values()):
        return "".join(f"\n  {name:>16} {_short(entry)}" for name, entry in value.items())
    if isinstance(value, list):
        return " ".join(_short(entry) for entry in value)
    return f"{value:.3f}" if isinstance(value, float) else str(value)
