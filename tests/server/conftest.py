"""Servers that several tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.serving import Doubling, Here

from specact import Pair


@pytest.fixture
def doubling() -> Iterator[Here]:
    with Here(Doubling()) as server:
        yield server


@pytest.fixture(scope="module")
def served(ball: Pair[Any]) -> Iterator[Here]:
    """The target of ``ball``, one request per inference: answers are then exact."""
    with Here(ball.exchange, max_batch=1) as server:
        yield server
