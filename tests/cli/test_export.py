"""``specact export``, and what is done with a copy."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cli.conftest import Typed

from specact import SpeculativePolicy, load_pair
from specact.bundle.bundle import find_bundle
from specact.errors import BundleError
from specact.gates import Always
from specact.gates.calibration import find_calibration
from specact.lab.rollout.processes import serving
from specact.remote.client import Client
from specact.remote.endpoint import Endpoint
from specact.remote.target import remote_verifier


def test_a_bundle_is_exported_calibrated_and_seen_by_the_doctor(typed: Typed, tiny_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "deployed"
    facts = typed("export", tiny_run, "--out", out, "--json").summary
    bundle = load_pair(out)
    assert facts == {"path": str(out), "fingerprint": bundle.fingerprint, "parity": bundle.parts.manifest.parity}
    typed("export", tiny_run, "--out", out).refuses(str(out), "--out")

    words = ("--rate", "0.5", "--episodes", "2", "--rounds", "1", "--workers", "1", "--json")
    made = typed("calibrate", out, *words).summary
    assert made["fingerprint"] == bundle.fingerprint
    stored = find_calibration(bundle, "adahi", 0.5)
    assert stored is not None and stored.settings.threshold == made["settings"]["threshold"]

    findings = typed("doctor", out, "--json").summary
    assert set(findings) == {
        "specact", "python", "machine", "providers", "missing", "bundle", "fingerprint", "draft_ms", "target_ms",
        "period_ms", "execute",
    }  # fmt: skip
    assert findings["fingerprint"] == bundle.fingerprint and findings["period_ms"] == 50.0
    assert "CPUExecutionProvider" in findings["providers"]
    assert findings["draft_ms"] > 0 < findings["target_ms"]


def test_bundles_of_others_are_checked(typed: Typed, tiny_bundle: Path, tmp_path: Path) -> None:
    checks: Any = typed("bundle", "check", tiny_bundle, "kitchen-tokens", "--json").summary
    assert [Path(check["bundle"]).name for check in checks] == [tiny_bundle.name, "drafters", "kitchen-tokens"]
    assert checks[0]["networks"]["draft.onnx"]["memory_mib"] < 500 and checks[0]["kind"] == "pair"
    bad = Path(shutil.copytree(tiny_bundle, tmp_path / "bad"))
    (bad / "target.onnx").write_bytes(b"damaged")
    told = typed("bundle", "check", bad, tiny_bundle)
    assert told.status == 1 and "target.onnx" in told.remarks and "bad" not in told.out and "draft.onnx" in told.out


def test_a_single_policy(typed: Typed, tmp_path: Path) -> None:
    source, out = find_bundle("relocate-tokens"), tmp_path / "deployed"
    assert typed("export", "relocate-tokens", "--out", out, "--json").summary["path"] == str(out)
    files, wanted = ({path.relative_to(folder) for path in folder.rglob("*")} for folder in (out, source))
    assert files == wanted
    typed("export", source / "drafters", "--out", tmp_path / "x").refuses("drafters")
    typed("export", "metaworld-draft", "--device", "--out", tmp_path / "x").refuses("--device")
    assert [path.name for path in tmp_path.iterdir()] == ["deployed"]


@pytest.mark.parametrize(
    ("source", "left", "method"), [("relocate-tokens", "decoder", "ar"), ("TINY", "target", "hybrid")]
)
def test_a_copy_for_a_device(
    typed: Typed, tiny_bundle: Path, tmp_path: Path, source: str, left: str, method: str
) -> None:
    whole = tiny_bundle if source == "TINY" else find_bundle(source)
    out = tmp_path / "device"
    assert typed("export", whole, "--device", "--out", out).status == 0
    left_out = {path.name for path in whole.iterdir()} - {path.name for path in out.iterdir()}
    assert {Path(name).stem for name in left_out} == {left} and f"{left}.onnx" in left_out
    report = typed("doctor", out, "--json").summary
    assert report["fingerprint"] == typed("doctor", whole, "--json").summary["fingerprint"]
    assert report["draft_ms"] > 0.0 and "target_ms" not in report
    typed("serve", "--bundle", out).refuses(left)
    typed("eval", out, "--methods", method, "--episodes", "1", "--out", tmp_path / "run").refuses(left)


def test_a_device_acts_with_the_target_on_the_server(typed: Typed, tiny_bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "device"
    assert typed("export", tiny_bundle, "--device", "--out", out).status == 0
    device, whole = load_pair(out), SpeculativePolicy(load_pair(tiny_bundle), Always())
    with pytest.raises(BundleError, match="without its target"):
        SpeculativePolicy(device, Always())
    with serving(str(tiny_bundle)) as server:
        client = Client(Endpoint("ws", "127.0.0.1", server.port), device.exchange.contract)
        with client:
            client.connect(10.0)
            policy = SpeculativePolicy(device, Always(), verifier=remote_verifier(client, device, 5000.0, "device"))
            for step in range(5):
                seen = {"state": np.full(8, 0.1 * step, np.float32), "goal": np.zeros(2, np.float32)}
                np.testing.assert_array_equal(policy.act(seen), whole.act(seen))
    assert policy.counts["missed"] == 0 < policy.counts["verified"]
