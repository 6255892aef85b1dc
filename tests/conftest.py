"""What several tests share: a tiny bundle, trained once, the command line as a process, and a look at leftovers."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch; subprocesses inherit it

import contextlib
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from tests.children import end_with_this_process, receive_signals
from tests.tiny import TINY, TINY_FLOW, made_once, quiet

import specact

if TYPE_CHECKING:
    from tests.browser import Browser

    from specact import Pair

receive_signals()
end_with_this_process()

# The examples of a property are the same in every run, on every machine. `scripts/check explore` looks for new ones.
settings.register_profile(
    "fixed", derandomize=True, deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "explore", settings.get_profile("fixed"), derandomize=False, max_examples=1000, print_blob=True
)
settings.load_profile("fixed")

# Rooms and fixtures that train or start processes: tests of them, or marked slow or nightly, are not fast.
ROOMS = ("tests/lab/", "tests/cli/", "tests/experiments/")
SLOW = {"tiny_run", "tiny_bundle", "tiny_flow", "specact_run", "serve", "server", "cluster", "trained", "target"}


@pytest.hookimpl(tryfirst=True)  # before the tests of a marker are selected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the fast tests, and those with a browser as nightly; puts the longest files first."""
    for item in items:
        needs = set(getattr(item, "fixturenames", ()))
        if needs & {"browser", "phone"}:
            item.add_marker("nightly")
        if not any((needs & SLOW, item.nodeid.startswith(ROOMS), *map(item.get_closest_marker, ("slow", "nightly")))):
            item.add_marker("fast")
    # A file runs in one process. These take minutes, and at the end the other process would have nothing left to do.
    items.sort(key=lambda item: item.path.name not in ("test_pages.py", "test_cluster.py"))


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def ball() -> Pair[Any]:
    return specact.load_pair("ball")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The folder that all processes of one test run share."""
    folder = tmp_path_factory.getbasetemp()
    return folder if worker_id == "master" else folder.parent


def trained(place: Path, recipe: str) -> Path:
    """A finished training run, with ``recipe.toml`` beside it."""

    def make(folder: Path) -> None:
        from specact.lab.train.recipe import load_recipe
        from specact.lab.train.train import train

        (folder / "recipe.toml").write_text(recipe)
        train(load_recipe(folder / "recipe.toml"), Path(), folder / "run", quiet)

    return made_once(place, make) / "run"


@pytest.fixture(scope="session")
def tiny_run(shared: Path) -> Path:
    """The run of :data:`TINY`. Read only: copy before damaging it."""
    return trained(shared / "tiny", TINY)


@pytest.fixture(scope="session")
def tiny_recipe(tiny_run: Path) -> Path:
    """The recipe of :func:`tiny_run`."""
    return tiny_run.parent / "recipe.toml"


@pytest.fixture(scope="session")
def tiny_bundle(tiny_run: Path) -> Path:
    """The tiny bundle. Read only."""
    return tiny_run / "bundles" / "tiny"


@pytest.fixture(scope="session")
def tiny_flow(shared: Path) -> Path:
    """A flow bundle that has learned next to nothing. Read only; its training run is two folders above it."""
    return trained(shared / "tiny-flow", TINY_FLOW) / "bundles" / "tiny-flow"


@pytest.fixture(scope="session")
def tiny_rtc(shared: Path) -> Path:
    """The same of ball-chase, trained for delays. Read only."""
    recipe = TINY_FLOW.replace('"ball"', '"ball-chase"').replace("tiny-flow", "tiny-rtc")
    return trained(shared / "tiny-rtc", f"{recipe}delays = 4\n") / "bundles" / "tiny-rtc"


@pytest.fixture
def known_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks are not tried in another process."""
    monkeypatch.setattr("specact.bundle.bundle.vet", lambda networks: None)


@pytest.fixture
def bundle_copy(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy of the tiny bundle, to be damaged."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "copy"))


@pytest.fixture(scope="session")
def command() -> list[str]:
    """``specact`` of this checkout, as the first words of a command line."""
    return [sys.executable, "-m", "specact"]


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """In which :func:`command` finds this checkout; wide enough that no message is wrapped."""
    source = str(Path(specact.__file__).parents[1])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "1000", "NO_COLOR": "1", "TERM": "dumb"}


@pytest.fixture(scope="session")
def specact_run(command: list[str], environment: dict[str, str]) -> Run:
    """Runs ``specact ARGUMENTS`` in a process of its own."""

    def run(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        words = [*command, *map(str, arguments)]
        return subprocess.run(
            words, capture_output=True, text=True, env=environment, cwd=cwd, timeout=1800, check=False
        )

    return run


@pytest.fixture
def plugs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, for modules whose names begin with ``plug_``; they are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("plug_")]:
        del sys.modules[name]


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fails if the test leaves a thread or an open file, socket or event behind."""
    threads, files = set(threading.enumerate()), _open_files()
    yield
    left = [thread.name for thread in threading.enumerate() if thread not in threads]
    assert not left, f"threads left: {left}"
    assert not _open_files() - files, f"open files left: {_open_files() - files}"


def _open_files() -> Counter[str]:
    """What the descriptors of this process stand for; sockets and pipes have numbers of their own, events have not."""
    counts = Counter[str]()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them is closed already
            counts[str(descriptor.readlink())] += 1
    return counts


@pytest.fixture
def browser() -> Iterator[Browser]:
    """A browser as wide as a desk's."""
    from tests.browser import running_browser

    with running_browser(1200) as running:
        yield running


@pytest.fixture
def phone() -> Iterator[Browser]:
    """A browser as narrow as a phone's."""
    from tests.browser import running_browser

    with running_browser(390) as running:
        yield running
