"""What the packaged policies did before: stored rollouts of every family and system, played again."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.pins.adapter import differences, plain
from tests.pins.cases import CASES, STORED, WIRED, wired


def test_every_case_is_stored_and_nothing_else() -> None:
    assert {path.stem for path in STORED.iterdir()} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_pinned(name: str) -> None:
    stored = json.loads((STORED / f"{name}.json").read_text())
    values = plain(CASES[name](stored["variant"]))
    differing = differences(stored["values"], values)
    assert not differing, "\n".join([f"{len(differing)} values differ, the first of them:", *differing[:20]])


@pytest.mark.parametrize("source", WIRED)
def test_the_wire_changes_nothing(source: str) -> None:
    count = 0
    for local, remote in wired(source):
        assert remote
        for outcome in remote.values():
            count += 1
            np.testing.assert_array_equal(outcome.actions, local.actions)
            np.testing.assert_array_equal(outcome.origins, local.origins)
            assert (outcome.verified, outcome.accepted, outcome.kept) == (local.verified, local.accepted, local.kept)
    assert count > 2
