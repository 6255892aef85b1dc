"""FLASH's study: what its rounds cost, and a policy in closed loop at two episodes."""

from __future__ import annotations

import pytest
from experiments.flash import cost_of, flow_pair
from experiments.flash.methods import METHODS

from specact.errors import ConfigError
from specact.systems.flash import Rounds

COSTS = {
    name: {"ms": ms}
    for name, ms in {
        "full_10": 10.0, "full_2": 3.0, "check": 2.0, "failed": 11.0, "given": 1.5, "given_failed": 10.5, "stale": 1.0,
        "block": 0.25,
    }.items()
}  # fmt: skip


def metrics(full: float, failed: float, sent: float = 1.0, actions: float = 4.0) -> dict[str, float]:
    return {"full": full, "failed": failed, "transmission_rate": sent, "actions_per_round": actions}


@pytest.mark.parametrize(
    ("name", "found", "wanted"),
    [
        ("full", metrics(1.0, 0.0), 10.0 / 4),
        ("full_2", metrics(1.0, 0.0), 3.0 / 4),
        # A fifth of the rounds full at once, a tenth failed, the rest accepted.
        ("flash", metrics(0.3, 0.1), (0.2 * 10.0 + 0.1 * 11.0 + 0.7 * 2.0) / 4),
        ("flash_stale", metrics(0.3, 0.1), (0.2 * 10.0 + 0.1 * 11.0 + 0.7 * 1.0) / 4),
        ("flash_last", metrics(0.3, 0.1), (0.2 * 10.0 + 0.1 * 10.5 + 0.7 * 1.5) / 4),
        # The block runs on the device every time, and the target checks what it is given.
        ("flash_device", metrics(0.3, 0.1), (0.2 * 10.0 + 0.1 * 10.5 + 0.7 * 1.5 + 0.25) / 4),
        ("block", metrics(0.0, 0.0, 0.0), 0.25 / 4),
        ("unchecked", metrics(0.3, 0.0, 0.3), (0.25 + 0.3 * 10.0) / 4),
    ],
)
def test_every_round_is_charged_and_failed_ones_in_full(name: str, found: dict[str, float], wanted: float) -> None:
    rounds = METHODS[name].composition
    assert isinstance(rounds, Rounds)
    assert cost_of(rounds, found, COSTS) == pytest.approx(wanted)


def test_what_has_no_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="ball"):
        flow_pair("ball")
