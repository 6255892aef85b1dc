"""Drafters as a manifest describes them: what does not fit the target is refused before a robot moves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from specact.errors import BundleError, ConfigError
from specact.families.chunks.policy import ChunkSpec
from specact.families.tokens.policy import TokenBundle, load_tokens
from specact.observation import Field, ObservationSpec
from specact.systems.tokens import load_drafters


@pytest.fixture(scope="module")
def target() -> TokenBundle:
    """It sees a state of 30 numbers, and writes actions of 9, the last two of them a gripper."""
    return load_tokens("kitchen-tokens")


GROUPS = r"groups must number the 9 dimensions of an action from 0 on without gaps"
PATH = r"path must be at least 2 different indices into the state, from 0 to 29; got"
FILTERS = r"filters must have exactly one of each motion, under its name: velocity and walk; got"
WALK = {"motion": "walk", "q": [1.0] * 7, "r": [1.0] * 7}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"filters": {}}, FILTERS), ({"filters": {"walk": WALK, "velocity": WALK}}, FILTERS),
        ({"filters": {"walk": WALK}, "kept": True}, r"the 9 dimensions of an action, got \{'velocity': 9, 'walk': 7"),
        ({"groups": []}, GROUPS), ({"groups": [0] * 9}, GROUPS),
        ({"strict": [99], "groups": list(range(9))}, r"strict dimensions must lie between 0 and 8, got \[99\]"),
        ({"path": [3, 3]}, PATH), ({"path": [0, 999]}, PATH), ({"path": [0, -1]}, PATH), ({"top": 0}, "top"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_the_target_are_refused(
    target: TokenBundle, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    """They would end a run in its middle: at the first retrieval, rejection or tree."""
    folder = tmp_path / "drafters"
    shutil.copytree(target.path / "drafters", folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    settings = manifest["spec"]["settings"]
    kept = settings["filters"] if changes.get("kept") else {}
    settings |= {name: kept | value if kept else value for name, value in changes.items() if name != "kept"}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=said) as caught:
        load_drafters(folder, target)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("field", [None, Field((30,), history=0), Field((5, 6))], ids=["none", "newest", "matrix"])
def test_a_path_needs_a_state_that_is_a_vector_with_a_history(target: TokenBundle, field: Field | None) -> None:
    others = {"goal": Field((7,))} if field is None else {"state": field}
    spec: ChunkSpec = structs.replace(target.spec, observation=ObservationSpec(others))
    with pytest.raises(ConfigError, match=r"path .* but the target sees no vector of that name with a history"):
        load_drafters(target.path / "drafters", target).settings.check(spec)
