"""Fixed examples of every message."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from tests.wire.dialects import messages


@pytest.fixture
def examples() -> dict[str, dict[str, Any]]:
    """One message of each type with every field there is; damage them at will."""
    return messages()


@pytest.fixture(scope="session")
def frames() -> Callable[[ModuleType], list[bytes]]:
    """The same, encoded by a codec."""
    return lambda codec: [codec.encode(fields) for fields in messages().values()]
