"""The budget that a gate of ``specact run`` holds, and the audits of its skipped steps."""

from __future__ import annotations

import re
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

_HELD = re.compile(r"([\d.]+)(ms|kbit|)")


def read_budget(text: str, pair: Pair[Any], inferences_hz: float) -> Budget:
    """A budget as text: a share of inferences, ``0.4``, their mean time, ``30ms``, or a share of the link, ``100kbit``.

    Args:
        text: the budget; 100kbit are 100 kbit/s of requests and replies.
        pair: the pair.
        inferences_hz: inferences per second [Hz].

    Raises:
        ConfigError: if it is none of these, or out of range.
    """
    found = _HELD.fullmatch(text)
    if found is None or found[1].count(".") > 1 or found[1] == ".":
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


def audit_estimator(pair: Pair[Any], gate: str, rate: float | None) -> AuditEstimator:
    """An estimator of the true skip ratio, with an alarm if the gate's calibration predicts that ratio.

    Args:
        pair: the pair.
        gate: name of its gate.
        rate: share of inferences to transmit; None if unknown.
    """
    calibration = None if rate is None else find_calibration(pair, gate, rate)
    # Calibrations of families without a rejection probability do not predict it.
    if rate is None or calibration is None or "rejections" not in calibration.model:
        return AuditEstimator()
    return AuditEstimator(DriftAlarm(expected_true_skip(calibration.model["rejections"], rate)))


def record_audit(audits: AuditEstimator, record: StepRecord) -> None:
    """Passes an inference to the estimator, and prints a warning when that raises the alarm."""
    if audits.take(record) and audits.alarm is not None:
        remark(
            f"the true skip ratio has left its calibrated level of {audits.alarm.level:.2f}: "
            f"{true_skip_text(true_skip_of(audits))}; check sensors and policies, or calibrate again",
            warn=True,
        )


def true_skip_of(audits: AuditEstimator) -> dict[str, Any]:
    """The estimate of the true skip ratio, as plain values."""
    found, alarm = audits.estimate(), audits.alarm
    return {
        "mean": found.mean, "low": found.low, "high": found.high, "audits": found.count, "missed": audits.missed,
        "expected": None if alarm is None else alarm.level, "alarm": None if alarm is None else alarm.raised,
    }  # fmt: skip


def true_skip_text(true_skip: dict[str, Any]) -> str:
    """The values of :func:`true_skip_of` as text."""
    if true_skip["mean"] is None:
        return f"unknown: no audit was answered, {true_skip['missed']} were missed"
    alarm = "no alarm, for lack of a calibration that says what to expect"
    if true_skip["alarm"] is not None:
        alarm = "ALARM" if true_skip["alarm"] else "no alarm"
    return (
        f"{true_skip['mean']:.2f} [{true_skip['low']:.2f}, {true_skip['high']:.2f}] of what is skipped, from "
        f"{true_skip['audits']} audits ({true_skip['missed']} missed); {alarm}"
    )
