"""The budget that a gate of ``specact run`` holds, and the audits of its skipped steps."""

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
    """The budget that the options ask for, or None.

    Args:
        hold: whether ``rate`` is held.
        rate: share of inferences to transmit.
        latency_ms: mean time of an inference [ms], or None.
        link_kbit: share of the link [kbit/s], or None.
        bundle: the pair.
        inferences_hz: inferences per second [Hz].

    Raises:
        ConfigError: if the options ask for more than one.
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
    """An estimator of the true skip ratio, with an alarm if the gate's calibration predicts that ratio.

    Args:
        bundle: the pair.
        gate: name of its gate.
        rate: share of inferences to transmit; None if unknown.
    """
    calibration = None if rate is None else find_calibration(bundle, gate, rate)
    # Calibrations of families without a rejection probability do not predict it.
    if rate is None or calibration is None or "rejections" not in calibration.model:
        return AuditEstimator()
    return AuditEstimator(DriftAlarm(expected_true_skip(calibration.model["rejections"], rate)))


def record_audit(audits: AuditEstimator, record: StepRecord) -> None:
    """Passes an inference to the estimator, and prints a warning when that raises the alarm."""
    if audits.take(record) and audits.alarm is not None:
        remarks.print(
            f"the true skip ratio has left its calibrated level of {audits.alarm.level:.2f}: "
            f"{true_skip_text(true_skip_of(audits))}; check sensors and policies, or calibrate again",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )


def true_skip_of(audits: AuditEstimator) -> dict[str, Any]:
    """The estimate of the true skip ratio, as plain values."""
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
    """The values of :func:`true_skip_of` as text."""
    if true_skip["mean"] is None:
        return f"unknown: no audit was answered, {true_skip['missed']} were missed"
    return (
        f"{true_skip['mean']:.2f} [{true_skip['low']:.2f}, {true_skip['high']:.2f}] of what is skipped, from "
        f"{true_skip['audits']} audits ({true_skip['missed']} missed); "
        + {None: "no alarm, for lack of a calibration that says what to expect", False: "no alarm", True: "ALARM"}[
            true_skip["alarm"]
        ]
    )
