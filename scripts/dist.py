"""Builds what is published into dist/, checks it and tries it in bare environments: make dist.

Every project, specact and those in plugins/, is built twice: a source archive from the checkout, and a wheel from that
archive. Both times must give the same bytes. The wheels are installed for each interpreter of the variable PYTHONS
("python3.11 python3.12 python3.13" if not set) that is there, first with the base dependencies alone, and do what
scripts/smoke.py says.
"""

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

from packaging.metadata import Metadata

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
PYTHONS = "python3.11 python3.12 python3.13"
# Nothing of the caller's environment may stand in for what an installation lacks.
BARE = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SPECACT"))}


class DistributionError(Exception):
    """What is wrong with a distribution."""


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """What a command prints, with an error where it fails."""
    done = subprocess.run(command, cwd=cwd, env=BARE, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise DistributionError(f"{' '.join(map(str, command))}\nended with status {done.returncode}:\n{done.stdout}")
    return done.stdout


def committed(project: Path) -> dict[str, bytes]:
    """Content of a project's files at HEAD, by path."""
    archive = subprocess.run(("git", "archive", "HEAD"), cwd=project, check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {file.name: tar.extractfile(file).read() for file in tar if file.isfile()}


def build(project: Path, into: Path) -> tuple[Path, Path]:
    """A source archive of a project, and a wheel from it."""
    into.mkdir(parents=True)
    # The time of the files within is that of the commit, so that two builds of one commit are the same.
    BARE.setdefault("SOURCE_DATE_EPOCH", run("git", "log", "-1", "--format=%ct", cwd=project).strip())
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", into, project)
    (archive,), (wheel,) = into.glob("*.tar.gz"), into.glob("*.whl")
    return archive, wheel


def check(project: Path, archive: Path, wheel: Path) -> None:
    """Whether both hold what is committed and nothing else, licence and notice among it, and valid metadata."""
    known = committed(project)
    contents = {hashlib.sha256(content).digest() for content in known.values()}
    with tarfile.open(archive) as tar:
        sources = {file.name.partition("/")[2]: tar.extractfile(file).read() for file in tar if file.isfile()}
    metadata = {"source archive": sources.pop("PKG-INFO")}
    # The repository's, which hatchling puts into every archive.
    sources.pop(".gitignore", None)
    for name, content in sources.items():
        if known.get(name) != content:
            raise DistributionError(f"{archive.name}: {name} differs from what is committed; commit or remove it")
    with zipfile.ZipFile(wheel) as zipped:
        files = {name: zipped.read(name) for name in zipped.namelist()}
    (described,) = (name for name in files if name.endswith(".dist-info/METADATA"))
    metadata["wheel"] = files[described]
    for name, content in files.items():
        generated = name.startswith(described.removesuffix("METADATA")) and "/licenses/" not in name
        if not generated and hashlib.sha256(content).digest() not in contents:
            raise DistributionError(f"{wheel.name}: {name} differs from what is committed; commit or remove it")
        if "/tests/" in f"/{name}":
            raise DistributionError(f"{wheel.name} holds a test, {name}")
    for kind, raw in metadata.items():
        parsed = Metadata.from_email(raw, validate=True)
        if lacking := {"LICENSE", *({"NOTICE"} & known.keys())} - set(parsed.license_files or ()):
            raise DistributionError(f"the {kind} of {project.name} lacks {', '.join(lacking)} among its license-files")
        if parsed.license_expression is None or not parsed.description or not parsed.summary:
            raise DistributionError(f"the {kind} of {project.name} lacks a license, a readme or a description")
    for name in parsed.license_files or ():
        if f"{described.removesuffix('METADATA')}licenses/{name}" not in files:
            raise DistributionError(f"{wheel.name} lacks {name}")


def interpreters() -> dict[str, str]:
    """Version by command, of those that can be run."""
    found = {}
    for python in os.environ.get("PYTHONS", PYTHONS).split():
        try:
            found[python] = run(python, "-I", "-c", "import sys; print('%d.%d.%d' % sys.version_info[:3])").strip()
        except (DistributionError, OSError):
            print(f"  {python} was not found: not tried")
    if not found:
        raise DistributionError(
            "no interpreter was found; name those to try: make dist PYTHONS='python3.11 /path/to/python3.13'"
        )
    return found


def try_out(python: str, version: str, wheels: list[Path], folder: Path) -> None:
    """Installs the wheels into new environments and runs them."""
    ours, *plugins = wheels
    run(python, "-m", "venv", "--without-pip", folder)
    there, specact = folder / "bin/python", folder / "bin/specact"
    pip = (sys.executable, "-m", "pip", "--python", there, "install", "-q", "--disable-pip-version-check")
    pinned = (*pip, "-c", ROOT / "constraints.txt")
    run(*pinned, ours, cwd=folder)
    run(there, "-I", ROOT / "scripts/smoke.py", "device", cwd=folder)
    run(specact, "--help", cwd=folder)
    told = run(specact, "--version", cwd=folder).strip()
    if told.split()[1] != ours.name.split("-")[1]:
        raise DistributionError(f"{ours.name} says that it is {told}")
    run(*pinned, f"{ours}[server]", cwd=folder)
    run(there, "-I", ROOT / "scripts/smoke.py", "server", cwd=folder)
    for wheel in plugins:
        with zipfile.ZipFile(wheel) as zipped:
            (described,) = (name for name in zipped.namelist() if name.endswith(".dist-info/METADATA"))
            needs = Metadata.from_email(zipped.read(described)).requires_python
            packages = {name.partition("/")[0] for name in zipped.namelist() if name.endswith("/__init__.py")}
        if needs is not None and version not in needs:
            print(f"  {wheel.name} needs Python {needs}: not tried on {version}")
            continue
        # What it plugs into brings gigabytes; together they are tested in an environment of their own.
        run(*pip, "--no-deps", wheel, cwd=folder)
        for package in packages:
            run(there, "-I", "-c", f"import importlib.util as u; assert u.find_spec({package!r})", cwd=folder)


def main() -> None:
    began = time.monotonic()
    shutil.rmtree(DIST, ignore_errors=True)
    projects = [ROOT, *sorted(file.parent for file in ROOT.glob("plugins/*/pyproject.toml"))]
    with tempfile.TemporaryDirectory() as scratch:
        wheels = []
        for number, project in enumerate(projects):
            built, again = build(project, Path(scratch, f"{number}a")), build(project, Path(scratch, f"{number}b"))
            if [file.read_bytes() for file in built] != [file.read_bytes() for file in again]:
                raise DistributionError(f"two builds of {project.name} differ")
            check(project, *built)
            DIST.mkdir(exist_ok=True)
            for file in built:
                shutil.copy(file, DIST)
                digest = hashlib.sha256(file.read_bytes()).hexdigest()
                print(f"  {file.name}  {file.stat().st_size / 1e6:.2f} MB  sha256 {digest}")
            wheels.append(DIST / built[1].name)
        for python, version in interpreters().items():
            try_out(python, version, wheels, Path(scratch, f"environment-{version}"))
            print(f"  tried on Python {version}")
    print(f"  {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except DistributionError as failure:
        sys.exit(f"error: {failure}")
