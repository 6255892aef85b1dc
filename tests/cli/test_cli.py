"""The command line as its users meet it: real processes, exit status, one sentence, pure JSON."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specact import __version__, load_bundle
from specact.bundle.bundle import find_bundle
from specact.cli.eval import Comparison, Details, Times
from specact.cli.main import VERBS
from specact.cli.options import Parts
from specact.errors import BundleError
from specact.gates.calibration import find_calibration
from specact.lab.data.readers import read

Run = Callable[..., subprocess.CompletedProcess[str]]

INTERVAL = {"mean", "low", "high"}
METHOD = {
    "success", "score", "control_steps", "inferences", "transmission_rate", "true_skip_ratio", "acceptance",
    "primary_rejection", "gated_loss", "action_change_loss", "gate_efficiency", "choice_efficiency", "draft_entropy",
    "target_entropy", "latency", "missed", "cost",
}  # fmt: skip
SUMMARY = {
    "env", "episodes", "seed", "bundle", "rate", "link", "score", "methods", "contrasts", "calibration", "gates",
    "seconds", "realtime",
}  # fmt: skip


def strictly(text: str) -> Any:
    """Parses JSON as the standard has it: without NaN and Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def assert_refused(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    said = [line for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in said if line.startswith("specact: ")]
    assert len(errors) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert said[-1] == errors[0]
    for part in parts:
        assert part in errors[0]


def test_help_names_every_verb(specact_run: Run) -> None:
    done = specact_run("--help")
    assert done.returncode == 0
    for verb in VERBS:
        assert verb in done.stdout


def test_it_says_its_version(specact_run: Run) -> None:
    done = specact_run("--version")
    assert (done.returncode, done.stdout) == (0, f"specact {__version__}\n")


def test_the_whole_help_of_eval_names_every_setting(specact_run: Run) -> None:
    done = specact_run("eval", "--help-all")
    assert done.returncode == 0
    for kind in (Comparison, Details, Times, Parts):
        for field in fields(kind):
            if field.name != "parts":
                assert re.search(rf"--{field.name.replace('_', '-')}[ ,]", done.stdout), field.name


def test_a_verb_imports_no_other_verb(environment: dict[str, str]) -> None:
    told = (
        "import sys; from specact.cli.main import main; sys.argv = ['specact', 'run', '--help']\n"
        "try: main()\n"
        "except SystemExit: print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, env=environment, timeout=600)
    imported = set(done.stdout.splitlines()[-1].split())
    assert "specact.cli.run" in imported, done.stderr
    # The token is read where the server reads it.
    others = {f"specact.cli.{name}" for name in VERBS if name not in ("run", "serve")}
    assert not [name for name in imported if name in others or name.startswith("specact.lab")]


def test_eval_writes_the_documented_summary(specact_run: Run, tiny_bundle: Path, tmp_path: Path) -> None:
    words = ["eval", "--bundle", tiny_bundle, "--out", tmp_path / "run", "--methods", "draft,hybrid,random",
             "--episodes", "3", "--workers", "1", "--draft-ms", "1", "--target-ms", "5", "--seed", "4",
             "--json"]  # fmt: skip
    done = specact_run(*words)
    assert done.returncode == 0, done.stderr
    summary = strictly((tmp_path / "run" / "summary.json").read_text())
    assert strictly(done.stdout) == summary
    assert set(summary) == SUMMARY
    assert (summary["env"], summary["episodes"], summary["seed"]) == ("ball", 3, 4)
    assert list(summary["methods"]) == ["draft", "hybrid", "random"]
    for m in summary["methods"].values():
        assert set(m) == METHOD
        assert set(m["success"]) == {"n", "k", "rate", "low", "high"}
        assert set(m["score"]) == INTERVAL
        assert set(m["acceptance"]) == {"codebooks", "all"}
        assert m["success"]["n"] == 3
        assert m["success"]["rate"] == m["success"]["k"] / 3
        assert 0 <= m["success"]["low"] <= m["success"]["rate"] <= m["success"]["high"] <= 1
        assert m["inferences"] == m["control_steps"] > 0
    assert summary["methods"]["hybrid"]["transmission_rate"] == 1.0
    manifest = strictly((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["command"].startswith("specact eval --bundle")
    assert manifest["evaluation"]["fingerprint"] == load_bundle(tiny_bundle).fingerprint

    # The same command again has nothing left to do; other settings are refused.
    again = specact_run(*words)
    assert again.returncode == 0
    assert strictly(again.stdout) | {"seconds": 0} == summary | {"seconds": 0}
    assert_refused(specact_run(*words, "--rate", "0.5"), "holds another run", "choose another --out")


def test_brackets_in_a_message_are_not_taken_for_markup(specact_run: Run, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text('env = "ball"\ngenerate_episodes = 2\n[tokenizer]\ncodse = 3\n')
    done = specact_run("train", tmp_path / "r.toml", "--out", tmp_path / "run")
    assert_refused(done, "unknown key in [tokenizer] 'codse'", "did you mean 'codes'?")


def test_brackets_and_colons_in_names_are_printed_as_they_are(specact_run: Run, tmp_path: Path) -> None:
    path = tmp_path / "[x] and :x:.npz"
    made = specact_run("data", "generate", "--env", "ball", "--out", path, "--episodes", "1")
    assert made.returncode == 0, made.stderr
    assert "[x] and :x:.npz" in made.stdout.replace("\n", "")
    told = specact_run("data", "info", tmp_path / "[" / "b].npz")
    assert_refused(told, "there is nothing at", f"{tmp_path}/[/b].npz")
    (tmp_path / "[").mkdir()
    shown = specact_run("data", "info", path.rename(tmp_path / "[" / "b].npz"))
    assert shown.returncode == 0 and f"{tmp_path}/[/b].npz" in shown.stdout, shown.stderr


def test_data_generate_and_info(specact_run: Run, tmp_path: Path) -> None:
    path = tmp_path / "made.npz"
    done = specact_run("data", "generate", "--env", "ball", "--out", path, "--episodes", "2", "--seed", "1", "--json")
    assert done.returncode == 0, done.stderr
    counts = strictly(done.stdout)
    assert counts == {"path": str(path), "kept": 2, "tried": counts["tried"], "steps": read(path).steps}
    assert counts["tried"] >= 2

    done = specact_run("data", "info", path, "--json")
    assert done.returncode == 0, done.stderr
    found = strictly(done.stdout)
    assert (found["episodes"], found["steps"], found["format"]) == (2, counts["steps"], "npz")
    assert found["shapes"] == {
        "state": [counts["steps"], 8],
        "action": [counts["steps"], 2],
        "goal": [counts["steps"], 2],
    }
    table = specact_run("data", "info", path)
    assert table.returncode == 0
    assert str(counts["steps"]) in table.stdout


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut short", b"not an archive at all"])
def test_data_info_of_a_bad_file(specact_run: Run, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.npz"
    path.write_bytes(content)
    assert_refused(specact_run("data", "info", path, "--json"), "bad.npz")


def test_data_info_of_contradicting_data_and_of_nothing(specact_run: Run, tmp_path: Path) -> None:
    path = tmp_path / "odd.npz"
    np.savez(path, state=np.zeros((5, 2), np.float32), action=np.zeros((4, 1), np.float32), episode_ends=np.array([5]))
    assert_refused(specact_run("data", "info", path), "odd.npz")
    assert_refused(specact_run("data", "info", tmp_path / "none.npz"), "none.npz")


def test_train_a_tiny_recipe(specact_run: Run, tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        'env = "ball"\ngenerate_episodes = 3\nchunk = 2\n[tokenizer]\ncodes = 4\nsteps = 20\nlatent = 4\n'
        "[policies.only]\nlayers = 1\nheads = 1\nwidth = 8\nhead_width = 0\nsteps = 5\nbatch = 8\n"
        '[bundles]\nmine = ["only", "only"]\n'
    )
    done = specact_run("train", recipe, "--out", tmp_path / "run", "--json")
    assert done.returncode == 0, done.stderr
    made = strictly(done.stdout)
    assert made["bundles"] == [str(tmp_path / "run" / "bundles" / "mine")]
    assert {name: line["step"] for name, line in made["metrics"].items()} == {"tokenizer": 20, "only": 5}
    assert (tmp_path / "run" / "only.safetensors").exists()
    recipe.write_text(recipe.read_text().replace("steps = 5", "steps = 6"))
    assert_refused(specact_run("train", recipe, "--out", tmp_path / "run"), "another recipe", "choose another --out")


def test_export_a_bundle_and_calibrate_it_and_ask_the_doctor(specact_run: Run, tiny_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "deployed"
    done = specact_run("export", tiny_run, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    facts = strictly(done.stdout)
    bundle = load_bundle(out)
    assert facts == {"path": str(out), "fingerprint": bundle.fingerprint, "parity": bundle.manifest.parity}
    assert_refused(specact_run("export", tiny_run, "--out", out), "exists already")
    assert_refused(specact_run("export", tiny_run, "--out", tmp_path / "x", "--bundle", "nope"), "'nope'", "tiny")

    done = specact_run("calibrate", "--bundle", out, "--rate", "0.5", "--episodes", "2", "--rounds", "1",
                       "--workers", "1", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = strictly(done.stdout)
    assert made["fingerprint"] == bundle.fingerprint
    stored = find_calibration(bundle, "deviation", 0.5)
    assert stored is not None
    assert stored.settings.threshold == made["settings"]["threshold"]

    done = specact_run("doctor", "--bundle", out, "--json")
    assert done.returncode == 0, done.stderr
    findings = strictly(done.stdout)
    assert set(findings) == {
        "specact", "python", "machine", "providers", "missing", "bundle", "fingerprint", "draft_ms", "target_ms",
        "period_ms",
    }  # fmt: skip
    assert findings["fingerprint"] == bundle.fingerprint
    assert "CPUExecutionProvider" in findings["providers"]
    assert findings["period_ms"] == 50.0
    assert findings["draft_ms"] > 0 < findings["target_ms"]


@pytest.mark.parametrize("name", ["relocate-tokens", "metaworld-draft"])
def test_export_of_a_single_policy(specact_run: Run, tmp_path: Path, name: str) -> None:
    source, out = find_bundle(name), tmp_path / "deployed"
    done = specact_run("export", name, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    assert strictly(done.stdout)["path"] == str(out)
    files = {path.relative_to(source) for path in source.rglob("*")}
    assert {path.relative_to(out) for path in out.rglob("*")} == files
    if name == "metaworld-draft":
        assert_refused(specact_run("export", name, "--device", "--out", tmp_path / "x"), "leave out --device")
        assert [path.name for path in tmp_path.iterdir()] == ["deployed"]


def test_export_of_a_token_policy_for_a_device(specact_run: Run, tmp_path: Path) -> None:
    out = tmp_path / "device"
    whole = strictly(specact_run("doctor", "--bundle", "relocate-tokens", "--json").stdout)
    done = specact_run("export", "relocate-tokens", "--device", "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    left = {path.name for path in find_bundle("relocate-tokens").iterdir()} - {path.name for path in out.iterdir()}
    assert left == {"decoder.onnx"}
    found = strictly(specact_run("doctor", "--bundle", out, "--json").stdout)
    assert found["fingerprint"] == whole["fingerprint"] and found["draft_ms"] > 0.0
    for words in (["serve"], ["eval", "--methods", "ar", "--episodes", "1", "--out", tmp_path / "run"]):
        assert_refused(specact_run(*words, "--bundle", out), "was exported without its decoder")


def test_export_of_what_is_no_policy(specact_run: Run, tmp_path: Path) -> None:
    drafters = find_bundle("relocate-tokens") / "drafters"
    assert_refused(specact_run("export", drafters, "--out", tmp_path / "x"), "is no policy", "export the policy")


def test_export_for_a_device(specact_run: Run, tiny_run: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    whole = load_bundle(tiny_bundle)
    for source, name in ((tiny_run, "of a run"), (tiny_bundle, "of a bundle")):
        out = tmp_path / name
        done = specact_run("export", source, "--device", "--out", out, "--json")
        assert done.returncode == 0, done.stderr
        assert strictly(done.stdout)["fingerprint"] == whole.fingerprint
        assert sorted(path.name for path in out.iterdir()) == ["draft.onnx", "manifest.json", "tokenizer.safetensors"]
    done = specact_run("doctor", "--bundle", out, "--json")
    assert done.returncode == 0, done.stderr
    assert "target_ms" not in strictly(done.stdout)
    for words in (["serve"], ["eval", "--methods", "hybrid", "--episodes", "1", "--out", tmp_path / "run"]):
        assert_refused(specact_run(*words, "--bundle", out), "was exported without its target")
    assert_refused(
        specact_run("export", tiny_bundle, "--bundle", "tiny", "--out", tmp_path / "x"),
        "is a bundle itself",
        "--bundle",
    )


def test_a_device_acts_with_the_target_on_the_server(specact_run: Run, tiny_bundle: Path, tmp_path: Path) -> None:
    from specact import SpeculativePolicy
    from specact.gates import Always
    from specact.lab.processes import serving
    from specact.remote.client import Client
    from specact.remote.target import remote_verifier
    from specact.remote.transport import Endpoint

    out = tmp_path / "device"
    assert specact_run("export", tiny_bundle, "--device", "--out", out).returncode == 0
    device = load_bundle(out)
    with pytest.raises(BundleError, match="was exported without its target, which runs on the server"):
        SpeculativePolicy(device, Always())
    with (
        serving(str(tiny_bundle)) as server,
        Client(Endpoint("ws", "127.0.0.1", server.port), device.codec.dialect) as client,
    ):
        client.connect(10.0)
        actors = [
            SpeculativePolicy(device, Always(), verifier=remote_verifier(client, device, 5000.0, "device")),
            SpeculativePolicy(load_bundle(tiny_bundle), Always()),
        ]
        for step in range(5):
            seen = {"state": np.full(8, 0.1 * step, np.float32), "goal": np.zeros(2, np.float32)}
            here, there = (actor.act(seen) for actor in actors)
            np.testing.assert_array_equal(here, there)
        assert actors[0].counts["missed"] == 0 < actors[0].counts["verified"]


def test_files_are_json_too(tiny_bundle: Path, tmp_path: Path) -> None:
    from specact.gates.calibration import Calibration
    from specact.gates.settings import GateSettings

    undefined = {"auroc": float("nan")}
    path = Calibration("f", 0.5, GateSettings("deviation"), {}, [], undefined, {}).save(tmp_path)
    assert strictly(path.read_text())["model"] == {"auroc": None}
