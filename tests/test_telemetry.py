"""The inference engine tells nobody anything."""

import subprocess
import sys
from pathlib import Path

import pytest

LOADS = """
import sys, time
if sys.argv[1] == "specact":
    import specact
import onnxruntime
onnxruntime.InferenceSession(sys.argv[2])
time.sleep(0.5)
"""


def written(first: str, bundle: Path, home: Path, environment: dict[str, str]) -> list[Path]:
    """Files in a new home folder after a model was loaded."""
    home.mkdir()
    surroundings = {name: value for name, value in environment.items() if name not in ("ORT_DISABLE_TELEMETRY", "CI")}
    surroundings |= {"HOME": str(home), "XDG_CACHE_HOME": str(home)}
    subprocess.run(
        [sys.executable, "-B", "-c", LOADS, first, bundle / "draft.onnx"], env=surroundings, check=True, timeout=600
    )
    return [path for path in home.rglob("*") if path.is_file()]


def test_loading_a_policy_leaves_no_identifier_of_the_device(
    tiny_bundle: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """The wrong variant: the same engine without this package writes one, in versions that report at all."""
    assert not written("specact", tiny_bundle, tmp_path / "with", environment)
    if not written("bare", tiny_bundle, tmp_path / "without", environment):
        pytest.skip("this ONNX Runtime reports nothing by itself")
