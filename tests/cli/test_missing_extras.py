"""What each verb says in an installation without its extra: the package, and what to install."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from specact.imports import EXTRAS

# A process in which no optional package can be found.
BASE_INSTALL = """
import sys
from specact.imports import EXTRAS

class Absent:
    optional = {module for packages in EXTRAS.values() for module in packages}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.optional:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from specact.cli.main import main
main()
"""


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["demo"], "sim"),
        (["data", "record", "--env", "ball", "--out", "OUT"], "sim"),
        (["train", "RECIPE", "--out", "OUT"], "train"),
        (["distil", "ball", "--out", "OUT"], "sim"),
        (["advise", "--bundle", "ball", "--budget-ms", "1"], "sim"),
        (["report", "OUT", "--out", "OUT.html"], "report"),
        (["tised", "sweep", "--bundle", "ball", "--levers", "steps", "--out", "OUT"], "sim"),
        (["serve", "ball"], "server"),
        (["play", "ball#target", "--record", "OUT"], "record"),
        (["data", "info", "DATA.hdf5"], "train"),
    ],
    ids=str,
)
def test_a_missing_extra_is_one_sentence(
    tmp_path: Path, environment: dict[str, str], words: list[str], extra: str
) -> None:
    (tmp_path / "data.hdf5").write_bytes(b"")
    (tmp_path / "r.toml").write_text('env = "ball"\n')
    places = {"OUT": "out", "DATA": "data", "RECIPE": "r.toml"}
    for name, place in places.items():
        words = [word.replace(name, str(tmp_path / place)) for word in words]
    done = subprocess.run(
        [sys.executable, "-c", BASE_INSTALL, *words], capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert f"pip install 'specact[{extra}]'" in done.stderr
    assert not (tmp_path / "out").exists()


def test_every_optional_package_is_known() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for extra, packages in EXTRAS.items():
        wanted = {requirement.split(">")[0].split("=")[0] for requirement in project["optional-dependencies"][extra]}
        assert wanted <= set(packages.values())
    assert set(EXTRAS) == set(project["optional-dependencies"]) - {"dev", "docs"}
