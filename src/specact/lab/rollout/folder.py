"""The folder of a run: what was asked for, how far it came, and where; a stopped run resumes from it."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from specact import __version__
from specact.errors import ConfigError, DataError
from specact.files import write_json, write_whole

Row = dict[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """A folder that holds one run.

    Attributes:
        path: where.
        key: of the request in its manifest: what kind of run it is.
        file: the manifest's name.
    """

    path: Path
    key: str
    file: str = "manifest.json"

    def manifest(self) -> dict[str, Any]:
        """The stored manifest.

        Raises:
            ConfigError: if it cannot be read, or is of another kind of run.
        """
        file = self.path / self.file
        try:
            stored: dict[str, Any] = json.loads(file.read_text())
            stored[self.key]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{file} is damaged ({error}); choose another --out, or remove that folder") from None
        return stored

    def claim(
        self, request: Any, command: str = "", about: Callable[[], Mapping[str, Any]] = dict, free: Collection[str] = ()
    ) -> dict[str, Any]:
        """The manifest of this request: the stored one, or a new one.

        Args:
            request: what is asked for, as plain values.
            command: as it was typed.
            about: what else a new manifest says, measured now.
            free: parts of the request that may have changed since.

        Raises:
            ConfigError: if the folder holds another run, or a damaged manifest.
        """
        wanted = json.loads(json.dumps(request))
        if (self.path / self.file).exists():
            stored = self.manifest()
            if _without(stored[self.key], free) != _without(wanted, free):
                raise ConfigError(f"{self.path} holds another run ({stored.get('command')}); choose another --out")
            return stored
        machine = {
            "processor": platform.processor() or platform.machine(), "python": platform.python_version(),
            "numpy": np.__version__, "onnxruntime": onnxruntime.__version__,
        }  # fmt: skip
        manifest = {"command": command, "specact": __version__, self.key: wanted, **about(), "machine": machine}
        write_json(self.path / self.file, manifest)
        return manifest


def _without(request: Any, names: Collection[str]) -> Any:
    return {name: value for name, value in request.items() if name not in names} if names else request


@dataclass(frozen=True)
class JsonLines:
    """Rows in a file, a line of JSON each; a kill may leave a torn last line, which is no row.

    Attributes:
        file: which need not exist.
    """

    file: Path

    def read(self) -> list[Row]:
        """The complete rows; null is NaN.

        Raises:
            DataError: if one of them is damaged.
        """
        if not self.file.exists():
            return []
        text = self.file.read_text()
        try:
            rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        except ValueError as error:
            raise DataError(f"{self.file} is damaged ({error}); remove the damaged lines, or the folder") from None
        return [{name: float("nan") if value is None else value for name, value in row.items()} for row in rows]

    @contextmanager
    def adding(self) -> Iterator[Callable[[Row], None]]:
        """Opens the file behind its last complete row; yields what adds a row, with null for NaN."""
        if self.file.exists() and not (text := self.file.read_text()).endswith("\n"):
            write_whole(self.file, text[: text.rfind("\n") + 1].encode())
        with self.file.open("a") as lines:

            def add(row: Row) -> None:
                known = {name: None if value != value else value for name, value in row.items()}
                lines.write(json.dumps(known, allow_nan=False) + "\n")
                lines.flush()

            yield add
