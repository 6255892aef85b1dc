"""The folder of a training run: its recipe, and the progress in its log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specact.errors import ConfigError
from specact.files import check_folder, write_json
from specact.lab.train.loop import read_log


def check_free(out: Path, recipe: dict[str, Any]) -> None:
    """Checks that a run of this recipe may use the folder, without writing; policies and bundles may be added.

    Args:
        out: the folder, which need not exist.
        recipe: as plain values.

    Raises:
        ConfigError: if it is not a folder, cannot be read or written, or holds a run of another recipe.
    """
    check_folder(out)
    file = out / "recipe.json"
    request = _plain(recipe)
    try:
        stored = json.loads(file.read_text()) if file.exists() else request
        differs = _fixed(stored) != _fixed(request) or any(
            request.get("policies", {}).get(name, policy) != policy
            for name, policy in stored.get("policies", {}).items()
        )
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}; check its permissions") from None
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{file} is damaged ({error}); choose another --out, or remove that folder") from None
    if differs:
        raise ConfigError(f"{out} holds a run of another recipe; choose another --out, or remove that folder first")


def claim(out: Path, recipe: dict[str, Any]) -> None:
    """Creates the run's folder and stores the recipe.

    Call it after all other checks, so that a refused run leaves no folder.

    Args:
        out: the folder.
        recipe: as plain values.

    Raises:
        ConfigError: as :func:`check_free`, or if it cannot be written.
    """
    check_free(out, recipe)
    write_json(out / "recipe.json", _plain(recipe))


def last_lines(out: Path) -> dict[str, Any]:
    """The last log line of every stage: its step and metrics."""
    lines = read_log(out / "log.jsonl")
    return {line["stage"]: {key: line[key] for key in ("step", "train", "held_out")} for line in lines}


def _fixed(recipe: dict[str, Any]) -> dict[str, Any]:
    """The settings that must not change when a run is resumed."""
    return {key: value for key, value in recipe.items() if key not in ("policies", "bundles")}


def _plain(recipe: dict[str, Any]) -> Any:
    """The recipe after a round trip through JSON."""
    return json.loads(json.dumps(recipe))
