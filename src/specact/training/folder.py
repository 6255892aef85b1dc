"""The folder of a training run: it belongs to one recipe, and its log says how far each stage came."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specact.errors import ConfigError
from specact.files import write_json
from specact.training.loop import read_log


def claim(out: Path, recipe: dict[str, Any]) -> None:
    """Makes the run's folder, or checks that it belongs to the same recipe; policies and bundles may be added.

    Args:
        out: the folder.
        recipe: as plain values.

    Raises:
        ConfigError: if it holds a run of another recipe, or cannot be written.
    """
    wanted, file = json.loads(json.dumps(recipe)), out / "recipe.json"
    if file.exists():
        try:
            found = json.loads(file.read_text())
        except ValueError as error:
            raise ConfigError(f"{file} is damaged ({error}); choose another --out, or remove that folder") from None
        if _fixed(found) != _fixed(wanted) or any(
            wanted["policies"].get(name, policy) != policy for name, policy in found.get("policies", {}).items()
        ):
            raise ConfigError(f"{out} holds a run of another recipe; choose another --out, or remove that folder first")
    write_json(file, wanted)


def last_lines(out: Path) -> dict[str, Any]:
    """The last log line of every stage: its step, and the metrics there."""
    lines = read_log(out / "log.jsonl")
    return {line["stage"]: {key: line[key] for key in ("step", "train", "held_out")} for line in lines}


def _fixed(recipe: dict[str, Any]) -> dict[str, Any]:
    """What must not change between two runs of a folder."""
    return {key: value for key, value in recipe.items() if key not in ("policies", "bundles")}
