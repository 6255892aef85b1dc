"""The access log: one JSON object per line for each connection, disconnection and refusal."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any

from specact.errors import ConfigError

# Logged refusals of one code per second; the rest is counted, so that a flood does not fill the disk.
_MAX_REFUSALS_PER_S = 20
_log = logging.getLogger("specact.server")


class AccessLog(WatchedFileHandler):
    """Appends events to a file, and opens another of its name where log rotation has moved it away.

    Raises:
        ConfigError: if the file cannot be opened.
    """

    def __init__(self, file: Path) -> None:
        try:
            super().__init__(file, encoding="ascii")
        except OSError as error:
            raise ConfigError(f"cannot write the access log {file}: {error.strerror}") from None
        self._second, self._refused, self._full = 0, Counter[str](), False

    def write(self, event: str, **fields: Any) -> None:
        """Writes an event, in ASCII, so that a peer's name cannot inject lines."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self.emit(logging.makeLogRecord({"msg": json.dumps({"time": now, "event": event, **fields})}))

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

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        # A disk that is full costs lines, not robots.
        if not self._full:
            self._full = True
            _log.error("the access log %s lacks lines", self.baseFilename, exc_info=True)
