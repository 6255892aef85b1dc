"""Drafters as a manifest describes them: what does not fit the target is refused before a robot moves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from specact.errors import BundleError, ConfigError
from specact.families.chunks.policy import ChunkSpec
from specact.families.tokens.policy import TokenBundle, load_tokens
from specact.observation import Field, ObservationSpec
from specact.systems.tokens import DrafterBundle, load_drafters


@pytest.fixture(scope="module")
def target() -> TokenBundle:
    """It sees a state of 30 numbers, and writes actions of 9, the last two of them a gripper."""
    return load_tokens("kitchen-tokens")


def shipped(target: TokenBundle) -> DrafterBundle:
    return load_drafters(target.path / "drafters", target)


def filter_of(numbers: int) -> dict[str, Any]:
    return {"motion": "walk", "q": [1.0] * numbers, "r": [1.0] * numbers}


Edit = Callable[[dict[str, Any]], object]
GROUPS = r"groups must number the 9 dimensions of an action from 0 on without gaps"
PATH = r"path must be at least 2 different indices into the state, from 0 to 29; got"
FILTERS = r"filters must have exactly one of each motion, under its name: velocity and walk; got"
REFUSED: dict[str, tuple[Edit, str]] = {
    "no filters": (lambda said: said.update(filters={}), FILTERS),
    "a filter by another name": (lambda said: said["filters"].update(velocity=said["filters"]["walk"]), FILTERS),
    "a filter of another robot": (
        lambda said: said["filters"].update(walk=filter_of(7)),
        r"filters must be of the 9 dimensions of an action, got \{'velocity': 9, 'walk': 7\}",
    ),
    "no groups": (lambda said: said.update(groups=[]), GROUPS),
    "groups with a gap": (lambda said: said.update(groups=[0] * 7 + [2, 2]), GROUPS),
    "a gripper's group with others": (lambda said: said.update(groups=[0] * 9), GROUPS),
    "a gripper elsewhere": (
        lambda said: said.update(strict=[99], groups=list(range(9))),
        r"strict dimensions must lie between 0 and 8, got \[99\]",
    ),
    "a path of one number twice": (lambda said: said.update(path=[3, 3]), PATH),
    "a path beyond the state": (lambda said: said.update(path=[0, 999]), PATH),
    "a path from the end": (lambda said: said.update(path=[0, -1]), PATH),
    "no tree": (lambda said: said.update(top=0), "top"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_do_not_fit_the_target_are_refused(target: TokenBundle, tmp_path: Path, case: str) -> None:
    """They would end a run in its middle: at the first retrieval, rejection or tree."""
    edit, sentence = REFUSED[case]
    folder = tmp_path / "drafters"
    shutil.copytree(target.path / "drafters", folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    edit(manifest["spec"]["settings"])
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=sentence) as caught:
        load_drafters(folder, target)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("field", [None, Field((30,), history=0), Field((5, 6))], ids=["none", "newest", "matrix"])
def test_a_path_needs_a_state_that_is_a_vector_with_a_history(target: TokenBundle, field: Field | None) -> None:
    others = {"goal": Field((7,))} if field is None else {"state": field}
    spec: ChunkSpec = structs.replace(target.spec, observation=ObservationSpec(others))
    with pytest.raises(ConfigError, match=r"path .* but the target sees no vector of that name with a history"):
        shipped(target).settings.check(spec)
