"""A real server process for the tests of the device's side."""

from collections.abc import Iterator

import pytest

from specact import Bundle, load_bundle
from specact.child import Child, serving


@pytest.fixture(scope="session")
def ball() -> Bundle:
    return load_bundle("ball")


@pytest.fixture(scope="module")
def server() -> Iterator[Child]:
    with serving("ball") as process:
        yield process
