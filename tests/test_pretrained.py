"""The bundles that are shipped: whole, small enough, calibrated for their own weights, and as good as they claim."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specact import calibrated_gate, load_pair
from specact.bundle.manifest import joint_fingerprint
from specact.errors import ConfigError
from specact.gates import ActionDeviation, Learned
from specact.gates.calibration import file_name, read_calibration
from specact.gates.settings import gate_settings
from specact.lab.train.recipe import CodesRecipe, load_recipe
from specact.records import read_record

PRETRAINED = Path(__file__).parents[1] / "pretrained"
ENVIRONMENTS = ("ball", "kitchen", "pusht", "relocate")
# Others are made where they are needed, see pretrained/README.md.
ABSENT = json.loads((PRETRAINED / "absent.json").read_text())

PRESENT = sorted(path.parent for path in PRETRAINED.glob("*/manifest.json") if path.parent.name not in ABSENT)
CALIBRATIONS = sorted(file for path in PRESENT for file in path.glob("calibration/*.json"))
LEARNED = ["ball", "ball-distilled", "kitchen", "pusht", "relocate"]


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_bundle_loads_and_is_calibrated_for_its_own_weights(name: str) -> None:
    bundle = load_pair(PRETRAINED / name)
    gate = calibrated_gate(bundle, "adahi", rate=0.6)
    assert isinstance(gate, ActionDeviation) and bundle.name == name
    assert (gate.source, gate.reading) == ("executed", bundle.recommended_gates.get("reading", "euclidean"))
    assert max(bundle.parts.manifest.parity.values()) < 2e-4


@pytest.mark.parametrize("file", CALIBRATIONS, ids=lambda file: f"{file.parents[1].name}-{file.stem}")
def test_every_stored_calibration_is_the_one_that_an_evaluation_asks_for_and_holds_its_rate(file: Path) -> None:
    """Else it is calibrated anew in every run."""
    bundle = load_pair(file.parents[1])
    calibration = read_calibration(file, bundle)
    stored = calibration.settings
    assert calibration.held_out["rate"] == pytest.approx(calibration.rate, abs=0.03)
    assert file.name == file_name(stored.name, calibration.rate)
    assert stored.without_threshold() == gate_settings(stored.name, bundle)


@pytest.mark.parametrize("name", LEARNED)
def test_a_learned_gate_belongs_to_its_pair_and_knows_more_than_chance(name: str) -> None:
    bundle = load_pair(PRETRAINED / name)
    for rate in (0.6,) if name.startswith("kitchen") else (0.4, 0.6):
        assert isinstance(calibrated_gate(bundle, "learned", rate), Learned)
    stored = json.loads((bundle.parts.path / "calibration" / "learned-0.60.json").read_text())
    assert stored["model"]["auroc"] > 0.8  # chance is 0.5; no deviation reaches 0.7 on any pair


def test_a_distilled_draft_shares_target_and_tokenizer_with_its_pair() -> None:
    made, pair = (load_pair(PRETRAINED / name).parts.manifest for name in ("ball-distilled", "ball"))
    assert made.distilled["from"] == load_pair("ball").fingerprint
    assert [made.fingerprints[part] == pair.fingerprints[part] for part in ("target", "tokenizer", "draft")] == [
        True, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "draft"), [("pusht-camera", {"image", "agent"}), ("pusht-camera-state", {"state"})])
def test_a_camera_pair_sees_what_its_recipe_says(name: str, draft: set[str]) -> None:
    bundle = load_pair(PRETRAINED / name)
    assert set(bundle.parts.spec.target.fields) == {"image", "agent"} and set(bundle.parts.spec.draft.fields) == draft
    assert bundle.parts.spec.target["image"].window_shape == (2, 96, 96, 3)
    recipe = load_recipe(PRETRAINED.parent / "recipes" / "pusht-camera.toml")
    # What was not given has no value in TOML; what has come since has its default, and one key has gone.
    stored = json.loads(
        json.dumps(bundle.parts.manifest.recipe),
        object_hook=lambda table: {
            name: value for name, value in table.items() if value is not None and name != "precision"
        },
    )
    assert read_record(stored, CodesRecipe, "recipe") == recipe
    assert max(bundle.parts.manifest.parity.values()) < 2e-4
    # One tokenizer for all PushT pairs, so their codes mean the same.
    first, second = (pair.parts.manifest.fingerprints["tokenizer"] for pair in (bundle, load_pair("pusht")))
    assert first == second


def test_the_notice_says_of_every_bundle_what_it_was_trained_on() -> None:
    """A bundle's name stands in one heading, above the data that its recipe names and their licence."""
    text = (PRETRAINED.parent / "NOTICE").read_text()
    named: list[str] = []
    for heading, entries in re.findall(r"^((?:[a-z][a-z-]+[ \n])+)((?:    .+\n)+)", text, re.MULTILINE):
        noticed = heading.split()
        named += noticed
        (data,) = re.findall(r"^    Data: (.+)$", entries, re.MULTILINE)
        assert re.search(r"^    Licence: \S", entries, re.MULTILINE) and "Made by: " in entries
        recipes = [
            json.loads((PRETRAINED / name / "manifest.json").read_text())["recipe"]
            for name in noticed
            if (PRETRAINED / name).is_dir()
        ]
        assert not recipes or {file for recipe in recipes for file in recipe["data"] or ["generated"]} == set(
            data.split()
        )
    assert {path.name for path in PRETRAINED.iterdir() if path.is_dir()} <= set(named)
    assert len(named) == len(set(named))


def test_the_list_of_bundles_is_that_of_the_folder() -> None:
    """Made by the script that it names."""
    listing: Any = SimpleNamespace(**runpy.run_path(str(PRETRAINED.parent / "scripts/list-pretrained.py")))
    text = (PRETRAINED / "README.md").read_text()
    assert text == listing.page()
    for folder in PRESENT:
        assert f"| `{folder.name}` |" in text
    assert listing.fingerprint(PRETRAINED / "ball") == load_pair("ball").fingerprint


@pytest.mark.parametrize("name", ABSENT)
def test_who_wants_an_absent_bundle_is_told_how_to_make_it(name: str) -> None:
    if (PRETRAINED / name).is_dir():
        parts = json.loads((PRETRAINED / name / "manifest.json").read_text())["fingerprints"]
        assert joint_fingerprint(*parts.values()) == ABSENT[name]["fingerprint"]
    else:
        with pytest.raises(ConfigError, match=rf"not in this checkout; make it with scripts/make-pretrained {name}$"):
            load_pair(name)


def test_an_absent_bundle_comes_from_the_history(tmp_path: Path) -> None:
    """Of a repository like this one, with the content that it had when it was removed."""
    script, manifest = tmp_path / "scripts/make-pretrained", tmp_path / "pretrained/some-sampled/manifest.json"
    for file in (script, manifest):
        file.parent.mkdir(parents=True)
    script.write_text((PRETRAINED.parent / "scripts/make-pretrained").read_text())
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/some.toml").touch()

    def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, cwd=tmp_path, check=False, capture_output=True, text=True)

    identity = ("-c", "user.name=T", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    for text in ("first", "last", None):
        if text is None:
            manifest.unlink()
        else:
            manifest.write_text(text)
        for command in (("init", "-q"), ("add", "-A"), (*identity, "commit", "-qm", str(text))):
            assert run("git", *command).returncode == 0
    assert run("bash", script, "some-sampled").returncode == 0
    assert manifest.read_text() == "last"
    refused = run("bash", script, "other-sampled")
    assert (refused.returncode, refused.stderr) == (2, "error: no recipe makes other-sampled; recipes/ holds them\n")
