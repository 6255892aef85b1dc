"""The verb that says how many robots a server holds, against a server of its own on loopback."""

from __future__ import annotations

import pytest
from tests.cli.conftest import Typed


def test_capacity_says_how_many_robots_a_server_holds(typed: Typed) -> None:
    wanted = ("capacity", "ball", "--rate-hz", "20", "--deadline-ms", "50", "--max-batch", "4")
    capacity, printed = typed(*wanted, "--json").summary, typed(*wanted)
    assert 0 < capacity["robots"] <= capacity["most_hz"] / 20.0
    assert capacity["base_ms"] >= 0.0 and capacity["per_request_ms"] >= 0.0
    # The rows are on both sides of the capacity, and of the same draws. What no server answers is not simulated.
    held = {row["robots"]: row["missed"] <= 0.01 for row in capacity["rows"]}
    assert held[capacity["robots"]]
    assert not held[capacity["robots"] + 1] or (capacity["robots"] + 1) * 20.0 > capacity["most_hz"]
    assert printed.status == 0 and "assumed:" in printed.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nothing-like-this",), "nothing-like-this"),
        (("ball", "--steps", "3"), "steps"),
        (("ball", "--rate-hz", "0"), "rate_hz"),
    ],
)
def test_capacity_refuses_what_cannot_be_served(typed: Typed, words: tuple[str, ...], said: str) -> None:
    typed("capacity", *words).refuses(said)
