"""The wheel: what is in it, and that it acts where nothing but the base dependencies is installed."""

from __future__ import annotations

import runpy
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specact.lab.rollout.processes import serving

ROOT = Path(__file__).parents[1]
BALL, FLOW = "specact/pretrained/ball/", "specact/pretrained/ball-chase-flow/"
PICKLES = (".pkl", ".pickle", ".pt", ".pth", ".ckpt", ".bin", ".joblib")

pytestmark = pytest.mark.nightly

SMOKE = ROOT / "scripts/smoke.py"


def execute(*command: Path | str, cwd: Path) -> None:
    """Runs a command; its output is shown if it fails."""
    done = subprocess.run(command, cwd=cwd, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    execute(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    # A package's public names are read from its stub, pages from their templates.
    sources = [path for ending in ("*.py", "*.pyi", "*.html", "*.css") for path in (ROOT / "src/specact").rglob(ending)]
    expected = {str(path.relative_to(ROOT / "src")) for path in sources}
    assert expected <= names
    assert "specact/py.typed" in names
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"specact"}
    for legal in ("LICENSE", "NOTICE"):
        assert any(name.endswith(f".dist-info/licenses/{legal}") for name in names)


def test_two_bundles_ship_whole_and_small(wheel: Path) -> None:
    entries = zipfile.ZipFile(wheel).infolist()
    shipped = {entry.filename: entry.file_size for entry in entries if "/pretrained/" in entry.filename}
    for folder in (BALL, FLOW):
        here = ROOT / folder.removeprefix("specact/")
        assert {str(path.relative_to(here)) for path in here.rglob("*") if path.is_file()} == {
            name.removeprefix(folder) for name in shipped if name.startswith(folder)
        }
    assert all(name.startswith((BALL, FLOW)) for name in shipped)
    assert sum(shipped.values()) <= 6_000_000


def test_no_pickles(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert [name for name in archive.namelist() if name.endswith(PICKLES)] == []
        for name in archive.namelist():
            # Whatever the file is called, a pickle begins with 0x80 and its protocol and ends with a full stop.
            content = archive.read(name)
            assert not (content[:1] == b"\x80" and content[1:2] in b"\x02\x03\x04\x05" and content[-1:] == b"."), name


def test_acts_with_the_base_dependencies_only(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv/bin/python"
    # This environment's pip installs into the new one: nothing to bootstrap there.
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check")
    execute(*pip, "-c", ROOT / "constraints.txt", wheel, cwd=tmp_path)
    # -I: neither the checkout, through PYTHONPATH, nor the user's packages are visible.
    execute(python, "-I", SMOKE, "device", cwd=tmp_path)
    for option in ("--help", "--version"):
        execute(tmp_path / "venv/bin/specact", option, cwd=tmp_path)
    with serving("ball") as server:
        execute(python, "-I", SMOKE, "client", str(server.port), cwd=tmp_path)


@pytest.fixture(scope="module")
def dist() -> Any:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "scripts/dist.py")))


PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "some-plugin"
version = "1.0"
description = "One."
readme = "README.md"
license = "Apache-2.0"
license-files = ["LICENSE"]
"""


def test_only_what_is_committed_is_published(dist: Any, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "some_plugin").mkdir(parents=True)
    for name, text in {"pyproject.toml": PROJECT, "README.md": "One.", "LICENSE": "None."}.items():
        (project / name).write_text(text)
    (project / "some_plugin/__init__.py").write_text("one = 1\n")
    identity = ("-c", "user.name=T", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    for command in (("init", "-q"), ("add", "."), (*identity, "commit", "-qm", "One")):
        execute("git", *command, cwd=project)
    archive, wheel = dist.build(project, tmp_path / "first")
    dist.check(project, archive, wheel)
    assert [file.read_bytes() for file in dist.build(project, tmp_path / "second")] == [
        archive.read_bytes(), wheel.read_bytes(),
    ]  # fmt: skip
    with zipfile.ZipFile(wheel, "a") as zipped:
        zipped.writestr("some_plugin/stray.py", "two = 2\n")
    with pytest.raises(dist.DistributionError, match=r"stray\.py differs from what is committed"):
        dist.check(project, archive, wheel)
    (project / "some_plugin/__init__.py").write_text("one = 2\n")
    with pytest.raises(dist.DistributionError, match=r"__init__\.py differs from what is committed"):
        dist.check(project, *dist.build(project, tmp_path / "third"))
