"""The budget that a gate of ``specact run`` holds, and the audits of its skipped steps."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from specact.cli.output import remark
from specact.errors import ConfigError
from specact.gates import DriftAlarm
from specact.gates.audit import AuditEstimator, expected_true_skip
from specact.gates.calibration import find_calibration
from specact.gates.controller import Budget, LatencyBudget, LinkBudget, RateBudget
from specact.pair import Pair
from specact.types import StepRecord
from specact.wire.messages import exchange_bytes


def read_budget(text: str, pair: Pair[Any], inferences_hz: float) -> Budget:
    """A budget as text: a share of inferences, ``0.4``, their mean time, ``30ms``, or a share of the link, ``100kbit``.

    Args:
        text: the budget; 100kbit are 100 kbit/s of requests and replies.
        pair: the pair.
        inferences_hz: inferences per second [Hz].

    Raises:
        ConfigError: if it is none of these, or out of range.
    """
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)(ms|kbit|)", text)
    if found is None:
        raise ConfigError(
            "--hold takes a share of inferences (0.4), their mean time (30ms) or a share of the link (100kbit), got "
            f"{text!r}"
        )
    amount = float(found[1])
    if found[2] == "ms":
        return LatencyBudget(amount / 1e3)
    if found[2] == "kbit":
        return LinkBudget(amount * 1e3 / 8.0, exchange_bytes(pair.exchange.contract), inferences_hz)
    return RateBudget(amount)


@dataclass(frozen=True)
class Audits:
    """Audits of the skipped steps, with an alarm if the gate's calibration predicts the true skip ratio."""

    estimator: AuditEstimator

    @classmethod
    def of(cls, pair: Pair[Any], gate: str, rate: float, budget: Budget | None) -> Audits:
        """Those of a pair and the name of its gate, which transmits at a rate or within a budget."""
        # The rate that holds a latency is unknown in advance, and with it the expected cost of skipping.
        rate = rate if budget is None else budget.rate
        calibration = None if isinstance(budget, LatencyBudget) else find_calibration(pair, gate, rate)
        # Calibrations of families without a rejection probability do not predict it.
        if calibration is None or "rejections" not in calibration.model:
            return cls(AuditEstimator())
        return cls(AuditEstimator(DriftAlarm(expected_true_skip(calibration.model["rejections"], rate))))

    def take(self, record: StepRecord) -> None:
        """Adds an inference, and prints a warning when that raises the alarm."""
        alarm = self.estimator.alarm
        if self.estimator.take(record) and alarm is not None:
            remark(
                f"the true skip ratio has left its calibrated level of {alarm.level:.2f}: "
                f"{true_skip_text(self.summary())}; check sensors and policies, or calibrate again",
                warn=True,
            )

    def summary(self) -> dict[str, Any]:
        """The estimate of the true skip ratio, as plain values."""
        found, alarm = self.estimator.estimate(), self.estimator.alarm
        known = {"expected": None, "alarm": None} if alarm is None else {"expected": alarm.level, "alarm": alarm.raised}
        counts = {"audits": found.count, "missed": self.estimator.missed}
        return {"mean": found.mean, "low": found.low, "high": found.high} | counts | known


def true_skip_text(true_skip: dict[str, Any]) -> str:
    """The values of :meth:`Audits.summary` as text."""
    if true_skip["mean"] is None:
        return f"unknown: no audit was answered, {true_skip['missed']} were missed"
    alarm = "no alarm, for lack of a calibration that says what to expect"
    if true_skip["alarm"] is not None:
        alarm = "ALARM" if true_skip["alarm"] else "no alarm"
    return (
        f"{true_skip['mean']:.2f} [{true_skip['low']:.2f}, {true_skip['high']:.2f}] of what is skipped, from "
        f"{true_skip['audits']} audits ({true_skip['missed']} missed); {alarm}"
    )
