"""What ``specact run`` makes of its flags: the budget that a gate holds, and the audits that record_audit it."""

from __future__ import annotations

from typing import Any

from specact.cli.output import remarks
from specact.errors import ConfigError
from specact.families.load import AnyPair
from specact.gates import DriftAlarm
from specact.gates.audit import AuditEstimator, expected_true_skip
from specact.gates.calibration import find_calibration
from specact.gates.controller import Budget, LatencyBudget, LinkBudget, RateBudget
from specact.types import StepRecord
from specact.wire.sizes import exchange_bytes


def budget_of(
    hold: bool, rate: float, latency_ms: float | None, link_kbit: float | None, bundle: AnyPair, inferences_hz: float
) -> Budget | None:
    """What is to be held, if anything.

    Raises:
        ConfigError: if more than one thing is.
    """
    if hold + (latency_ms is not None) + (link_kbit is not None) > 1:
        raise ConfigError(
            "a gate can hold only one budget; give only one of --hold, --latency-budget-ms and --link-share-kbit"
        )
    if latency_ms is not None:
        return LatencyBudget(latency_ms / 1e3)
    if link_kbit is not None:
        return LinkBudget(link_kbit * 1e3 / 8.0, exchange_bytes(bundle.codec.dialect), inferences_hz)
    return RateBudget(rate) if hold else None


def audit_estimator(bundle: AnyPair, gate: str, rate: float | None) -> AuditEstimator:
    """With an alarm where a calibration says what is to be expected."""
    calibration = None if rate is None else find_calibration(bundle, gate, rate)
    # Families without a probability of rejection have a calibration that expects nothing of the audits.
    if rate is None or calibration is None or "rejections" not in calibration.model:
        return AuditEstimator()
    return AuditEstimator(DriftAlarm(expected_true_skip(calibration.model["rejections"], rate)))


def record_audit(audits: AuditEstimator, record: StepRecord) -> None:
    """Passes an inference to the estimator, and says at once if that raises the alarm."""
    if audits.take(record) and audits.alarm is not None:
        remarks.print(
            f"the true skip ratio has left its calibrated level of {audits.alarm.level:.2f}: "
            f"{true_skip_text(true_skip_of(audits))}; check sensors and policies, or calibrate again",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )


def true_skip_of(audits: AuditEstimator) -> dict[str, Any]:
    """What the audits found, as plain values."""
    found, alarm = audits.estimate(), audits.alarm
    return {
        "mean": found.mean,
        "low": found.low,
        "high": found.high,
        "audits": found.count,
        "missed": audits.missed,
        "expected": None if alarm is None else alarm.level,
        "alarm": None if alarm is None else alarm.raised,
    }


def true_skip_text(true_skip: dict[str, Any]) -> str:
    """The same for people."""
    if true_skip["mean"] is None:
        return f"unknown: no audit was answered, {true_skip['missed']} were missed"
    return (
        f"{true_skip['mean']:.2f} [{true_skip['low']:.2f}, {true_skip['high']:.2f}] of what is skipped, from "
        f"{true_skip['audits']} audits ({true_skip['missed']} missed); "
        + {None: "no alarm, for lack of a calibration that says what to expect", False: "no alarm", True: "ALARM"}[
            true_skip["alarm"]
        ]
    )
