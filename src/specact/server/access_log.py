"""The access log: one JSON object per line for each connection, disconnection and refusal."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from specact.errors import ConfigError

# Logged refusals of one code per second; the rest is counted, so that a flood does not fill the disk.
_MAX_REFUSALS_PER_S = 20
_log = logging.getLogger("specact.server")


class AccessLog:
    """Appends events to a file, or to none; with ``steps`` answered requests, too. Used on the event loop only.

    Raises:
        ConfigError: if the file cannot be opened.
    """

    def __init__(self, file: Path | None, steps: bool) -> None:
        self._file, self.steps = file, steps and file is not None
        self._output: IO[str] | None = None
        self._second, self._refused = 0, Counter[str]()
        self.reopen()

    def reopen(self) -> None:
        """Reopens the file, after log rotation.

        Raises:
            ConfigError: if it cannot be opened; the current one stays open.
        """
        if self._file is None:
            return
        try:
            output = self._file.open("a", buffering=1, encoding="ascii")
        except OSError as error:
            raise ConfigError(f"cannot write the access log {self._file}: {error.strerror}") from None
        self.close()
        self._output = output

    def close(self) -> None:
        """Closes the file."""
        if self._output is not None:
            self._output.close()
            self._output = None

    def write(self, event: str, **fields: Any) -> None:
        """Writes an event, in ASCII, so that a peer's name cannot inject lines."""
        if self._output is None:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        try:
            self._output.write(json.dumps({"time": now, "event": event, **fields}) + "\n")
        except OSError as error:
            _log.error("the access log %s ends here: %s", self._file, error.strerror)
            self._output = None

    def write_refusal(self, what: str, code: str, peer: str | None, why: str, robot: str | None = None) -> None:
        """Writes an error reply or a dropped connection, limited per second and code."""
        second = int(time.monotonic())
        if second != self._second:
            for other, count in self._refused.items():
                if count > _MAX_REFUSALS_PER_S:
                    self.write("refused", code=other, more=count - _MAX_REFUSALS_PER_S)
            self._second, self._refused = second, Counter()
        self._refused[code] += 1
        if self._refused[code] <= _MAX_REFUSALS_PER_S:
            self.write("refused", what=what, code=code, peer=peer, robot=robot, why=why[:200])
