"""What came of fleets: success over their size, its contrasts, and the queue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.report import Report


def report(results: Mapping[str, Any]) -> Report:
    """All."""
    return Report([])
