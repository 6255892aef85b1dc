"""Networks of unknown origin: what is refused without harm to this process, and what is remembered."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.bundle.graphs import branching, by_batch, by_value, doubling, endless, huge, multiplied, outside

from specact.bundle import network, vetting
from specact.bundle.bundle import check_bundle, find_bundle, named_bundles
from specact.bundle.manifest import MANIFEST, digest_of
from specact.bundle.vetting import remember, vet
from specact.errors import BundleError
from specact.families.chunks.flow import load_flow
from specact.gates.learned import has_fitting_head
from specact.lab.train.split import split_bundle
from specact.load import load_pair, load_policy
from specact.systems.freqcache import load_refresh
from specact.systems.staged import load_staged


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


@pytest.mark.parametrize("make", [cut, huge, multiplied, branching, by_batch, by_value, endless, outside])
def test_a_harmful_network_is_refused(make: Callable[[Path], Path], tmp_path: Path, cache: Path) -> None:
    file = make(tmp_path / "network.onnx")
    (tmp_path.parent / "numbers.bin").write_bytes(bytes(8))
    with pytest.raises(BundleError, match=r"network\.onnx"):
        check(file, seconds=3)
    assert not list(cache.rglob("*"))


def test_whatever_lies_beside_a_network_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("json", "resource", "numpy", "onnxruntime"):
        (tmp_path / f"{module}.py").write_text("open('run', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    check(doubling(Path("network.onnx")))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", named_bundles())
def test_every_stored_bundle_passes(name: str) -> None:
    for manifest in find_bundle(name).rglob(MANIFEST):
        report = check_bundle(manifest.parent)
        assert report["networks"] and all(graph["inputs"] and graph["outputs"] for graph in report["networks"].values())


def described(path: Path) -> Any:
    """Of a user's own ONNX file."""
    doubling(path / "own.onnx")
    text = 'onnx = "own.onnx"\nchunk = 1\nactions = 2\nrate_hz = 10.0\nlow = [-1.0, -1.0]\nhigh = [1.0, 1.0]\n'
    (path / "own.toml").write_text(text + "[observation.x]\nshape = [2]\nhistory = 0\n")
    return load_policy(str(path / "own.toml"))


def staged(path: Path) -> Any:
    """Cut by somebody else."""
    split_bundle(path, path / "stages")
    vetting._passed.clear()
    shutil.rmtree(path.parent / "cache")
    return load_staged(path / "stages")


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("ball", lambda path: load_pair(path).target()), ("ball", lambda path: has_fitting_head(load_pair(path))),
        ("ball", staged), ("ball", described), ("ball-chase-flow", lambda path: load_policy(str(path))),
        ("metaworld-draft", lambda path: load_policy(str(path))),
        ("metaworld-flow", lambda path: load_refresh(path / "freqcache", load_flow(path))),
        ("pusht-flow", lambda path: load_pair(path, decoding="flash")),
        ("kitchen-tokens", lambda path: load_pair(path, decoding="specvla")),
    ],
)  # fmt: skip
def test_no_network_is_loaded_that_was_not_tried(
    name: str, load: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, opened, open_session = set[Path](), set[Path](), network.open_session
    monkeypatch.setattr(vetting, "try_out", lambda files, seconds: tried.update(files))

    def seen(file: Path, compute: Any) -> Any:
        opened.add(file)
        return open_session(file, compute)

    monkeypatch.setattr(network, "open_session", seen)
    load(Path(shutil.copytree(find_bundle(name), tmp_path / name)))
    assert opened and opened <= tried


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
