"""``specact run`` with a budget to hold and audits, against a real server on loopback."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specact import load_bundle
from specact.lab.processes import ServerProcess, serving
from specact.wire.sizes import exchange_bytes

Run = Callable[..., subprocess.CompletedProcess[str]]

ROBOT = """
import numpy as np

class Walker:
    def __init__(self):
        self.rng = np.random.default_rng(0)

    def observe(self):
        return {"state": self.rng.normal(0.0, 0.3, 8), "goal": np.array([0.2, 0.1])}

    def act(self, action):
        pass
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving("ball") as child:
        yield child


def test_a_rate_is_held_without_a_calibration_and_audits_are_summed_up(
    specact_run: Run, server: ServerProcess, tmp_path: Path
) -> None:
    (tmp_path / "walker.py").write_text(ROBOT)
    shared = ("run", "--bundle", "ball", "--server", f"ws://127.0.0.1:{server.port}", "--robot", "walker:Walker",
              "--deadline-ms", "2000", "--rate-hz", "400", "--hold")  # fmt: skip
    done = specact_run(*shared, "--rate", "0.35", "--audit-rate", "0.3", "--seconds", "2", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["held_rate"] == 0.35
    assert abs(summary["transmission_rate"] - 0.35) * summary["inferences"] <= 101.0
    found = summary["true_skip"]
    assert found["audits"] > 0 and found["missed"] == 0
    assert 0.0 <= found["low"] <= found["mean"] <= found["high"] <= 1.0
    assert found["expected"] is None and found["alarm"] is None

    # Observations of pure noise are not what the gate was calibrated on, and at the calibrated rate that is said. The
    # alarm needs some thousand steps, for which a machine with other work takes longer.
    for seconds in ("5", "20", "60"):
        done = specact_run(*shared, "--rate", "0.6", "--audit-rate", "0.9", "--seconds", seconds, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        if "ALARM" in done.stdout:
            break
    assert "ALARM" in done.stdout and "calibrated level of 0.39" in done.stderr


def test_late_verdicts_are_counted(specact_run: Run, server: ServerProcess) -> None:
    done = specact_run(
        "run", "--bundle", "ball", "--server", f"ws://127.0.0.1:{server.port}", "--execution", "late", "--gate",
        "always", "--deadline-ms", "5000", "--episodes", "1", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    late = summary["late"]
    assert late["wanted"] == summary["inferences"]
    assert 0 < late["in_time"] <= late["transmitted"] <= late["wanted"]
    assert late["in_time"] <= late["replaced"] <= 5 * late["in_time"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--hold", "--latency-budget-ms", "10"), "one budget"),
        (("--gate", "never", "--hold"), "no threshold"),
        (("--link-share-kbit", "100", "--sampling", "server"), "ws://"),
        (("--link-share-kbit", "-1"), "must be positive"),
        (("--latency-budget-ms", "0"), "must be positive"),
        (("--audit-rate", "1"), "[0, 1)"),
        (("--execution", "late", "--audit-rate", "0.1"), "--execution late cannot be combined"),
    ],
)
def test_what_cannot_be_held_is_refused_before_anything_moves(
    specact_run: Run, flags: tuple[str, ...], message: str
) -> None:
    done = specact_run("run", "--bundle", "ball", "--server", "ws://127.0.0.1:1", *flags)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr


def test_the_bytes_of_an_exchange_are_its_arrays_and_a_little_more() -> None:
    bundle = load_bundle("ball")
    spec, arrays = bundle.spec, 4 * (8 + 2)
    arrays += spec.codebooks * spec.codes * (8 + 4 * spec.chunk * spec.actions)
    assert arrays < exchange_bytes(bundle.codec.dialect) < arrays + 500
