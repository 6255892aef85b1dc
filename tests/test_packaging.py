"""The wheel: what is in it, and that it acts where nothing but the base dependencies is installed."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from specact.lab.processes import serving

ROOT = Path(__file__).parents[1]
BALL = "specact/pretrained/ball/"
PICKLES = (".pkl", ".pickle", ".pt", ".pth", ".ckpt", ".bin", ".joblib")

pytestmark = pytest.mark.skipif(
    not (ROOT / "pretrained/ball/manifest.json").is_file(),
    reason="pretrained/ball is missing; CONTRIBUTING.md says how to make it",
)

DEVICE = """
import importlib.util
import pathlib
import sys

import numpy as np

for package in ("torch", "fastapi", "gymnasium", "mujoco", "scipy", "matplotlib", "pyarrow"):
    assert importlib.util.find_spec(package) is None, f"{package} is installed; the base install must not bring it"

import specact

assert pathlib.Path(specact.__file__).is_relative_to(sys.prefix), f"tested {specact.__file__}, not the wheel"
try:
    specact.load_bundle("pusht")
except specact.errors.ConfigError as error:
    told = str(error)
    assert "unknown bundle 'pusht'" in told and "Known: ball" in told, told
    assert "pretrained/" in told and "scripts/make-pretrained" in told, told
else:
    raise AssertionError("the wheel brings ball and no other bundle")
bundle = specact.load_bundle("ball")
rng = np.random.default_rng(0)
transmitted = []
for gate in (specact.gates.Never(), specact.gates.Always(), specact.gates.ActionDeviation(threshold=0.3)):
    policy = specact.SpeculativePolicy(bundle, gate, seed=0)
    policy.reset(episode=0)
    records = {}
    for _ in range(200):
        observation = {name: rng.normal(size=field.shape) for name, field in bundle.observation.fields.items()}
        action = policy.act({key: value.astype(np.float32) for key, value in observation.items()})
        assert action.dtype == np.float32 and action.ndim == 1 and np.isfinite(action).all()
        records[policy.record.address.step] = policy.record.decision.transmit
    transmitted.append(sum(records.values()) / len(records))
never, always, deviation = transmitted
assert (never, always) == (0.0, 1.0) and 0.0 < deviation <= 1.0, transmitted
"""


REMOTE = """
import sys

import numpy as np

import specact
from specact.remote.transport import Endpoint
from specact.remote.client import Client
from specact.remote.target import remote_verifier

bundle = specact.load_bundle("ball")
for scheme, sampling in (("ws", "device"), ("ws", "server"), ("http", "server")):
    with Client(Endpoint(scheme, "127.0.0.1", int(sys.argv[1])), bundle.codec.dialect) as client:
        client.connect(10.0)
        verifier = remote_verifier(client, bundle, 5000.0, sampling)
        policy = specact.SpeculativePolicy(bundle, specact.gates.Always(), verifier=verifier)
        for _ in range(20):
            policy.act({name: np.zeros(field.shape) for name, field in bundle.observation.fields.items()})
        assert policy.counts["missed"] == 0 and policy.counts["verified"] == 8, policy.counts
"""


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
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_ball_bundle_ships_and_is_small(wheel: Path) -> None:
    bundle = {entry.filename: entry.file_size for entry in zipfile.ZipFile(wheel).infolist() if BALL in entry.filename}
    assert {BALL + part for part in ("manifest.json", "tokenizer.safetensors", "draft.onnx", "target.onnx")} <= set(
        bundle
    )
    assert sum(bundle.values()) <= 6_000_000


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
    execute(python, "-I", "-c", DEVICE, cwd=tmp_path)
    execute(tmp_path / "venv/bin/specact", "--help", cwd=tmp_path)
    with serving("ball") as server:
        execute(python, "-I", "-c", REMOTE, str(server.port), cwd=tmp_path)
