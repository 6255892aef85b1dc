"""Networks of unknown origin: what is refused without harm to this process, and what is remembered."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.bundle.graphs import doubling, endless, huge, outside

from specact.bundle import vetting
from specact.bundle.manifest import digest_of
from specact.bundle.vetting import remember, vet
from specact.errors import BundleError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, in a process that knows nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(vetting, "_passed", set())
    return tmp_path / "cache"


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The processes that are started."""
    started, run = list[Any](), subprocess.run

    def counted(*args: Any, **options: Any) -> Any:
        started.append(args)
        return run(*args, **options)

    monkeypatch.setattr("specact.bundle.vetting.subprocess.run", counted)
    return started


def check(file: Path, seconds: int = 60) -> None:
    vet({file: digest_of(file)}, seconds)


def cut(path: Path) -> Path:
    path.write_bytes(doubling(path).read_bytes()[:-20])
    return path


@pytest.mark.parametrize("make", [cut, huge, endless, outside])
def test_a_harmful_network_is_refused(make: Callable[[Path], Path], tmp_path: Path, cache: Path) -> None:
    file = make(tmp_path / "network.onnx")
    (tmp_path.parent / "numbers.bin").write_bytes(bytes(8))
    with pytest.raises(BundleError, match=r"network\.onnx"):
        check(file, seconds=3)
    assert not list(cache.rglob("*"))


def test_a_known_network_costs_no_process(tmp_path: Path, children: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    files = {file: digest_of(file) for file in (doubling(tmp_path / "a.onnx"), doubling(tmp_path / "b.onnx"))}
    vet(files)
    vet(files)
    assert len(children) == 1
    monkeypatch.setattr(vetting, "_passed", set())  # another process
    vet(files)
    assert len(children) == 1
    remember([digest_of(endless(tmp_path / "c.onnx"))])
    check(tmp_path / "c.onnx")
    assert len(children) == 1


def test_without_a_cache_this_process_remembers(
    tmp_path: Path, children: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file is no folder")
    file = doubling(tmp_path / "a.onnx")
    check(file)
    check(file)
    assert len(children) == 1
    monkeypatch.setattr(vetting, "_passed", set())
    check(file)
    assert len(children) == 2


def test_no_process_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specact.bundle.vetting.sys.executable", str(tmp_path / "absent"))
    with pytest.raises(BundleError, match="process"):
        check(doubling(tmp_path / "a.onnx"))
