"""Demonstrations for ``specact eval`` and ``specact calibrate`` without a simulator."""

from __future__ import annotations

from pathlib import Path

from specact.errors import ConfigError
from specact.families.codes.bundle import Bundle
from specact.families.load import AnyPair
from specact.lab.data.episodes import Episodes


def held_out(pair: AnyPair, recipe: Path | None, data: Path | None, env: str | None) -> Episodes:
    """Demonstrations that were held out in training; arguments and errors as for :func:`split_demonstrations`."""
    return split_demonstrations(pair, recipe, data, env)[1]


def split_demonstrations(
    pair: AnyPair, recipe: Path | None, data: Path | None, env: str | None
) -> tuple[Episodes, Episodes]:
    """Demonstrations that were trained on, and those that were held out.

    Args:
        pair: the pair.
        recipe: of these demonstrations; None for the pair's own.
        data: folder that the recipe's data paths are relative to, or None.
        env: the environment that the user named, see :func:`~specact.lab.envs.env_of`.

    Raises:
        ConfigError: if there is no recipe, or it names files and ``data`` is None.
        DataError: if they cannot be read.
    """
    if recipe is None:
        if not isinstance(pair, Bundle) or "recipe" not in pair.manifest:
            raise ConfigError(
                f"{pair.name} holds no recipe, so its demonstrations are unknown; name them with --recipe, the recipe "
                "of the draft, and --data, the folder of its files"
            )
        from specact.lab.evaluation.imitation import demonstration_split

        return demonstration_split(pair, data, env)
    from specact.lab.data.generate import demonstrations
    from specact.lab.envs import load_task
    from specact.lab.train.chunk_recipe import load_any_recipe

    asked, _ = load_any_recipe(recipe)
    if asked.data and data is None:
        raise ConfigError(f"{recipe} names files ({', '.join(asked.data)}); give their folder with --data FOLDER")
    made = demonstrations(
        None if asked.env is None else load_task(asked.env),
        [(data or Path()) / name for name in asked.data],
        asked.generate_episodes,
        asked.generate_noise,
        asked.seed,
        sources=asked.observations,
        rate_hz=asked.rate_hz,
    )
    return made.split(asked.held_out, asked.seed)
