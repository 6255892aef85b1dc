"""A gate's threshold for a transmission rate, and the calibration file that stores it beside the weights.

The threshold for a rate rho is the (1 - rho) quantile of the score: ADAHI's equations 9 and 10 where the rejection
probability is an increasing function of the score; :mod:`specact.lab.evaluation.calibrate` has them as written, too.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.bundle.manifest import MAX_JSON_BYTES, read_part
from specact.errors import BundleError, ConfigError
from specact.files import file_stem, write_json
from specact.gates.audit import RunningMean
from specact.gates.controller import Controller, RateBudget, threshold_of
from specact.gates.gate import Gate
from specact.gates.learned import calibrate_command
from specact.gates.settings import OLD_NAMES, GateSettings, check_options, gate_settings, load_gate
from specact.pair import Pair
from specact.records import read_json
from specact.types import Decision

# A rate that differs by more from the wanted one is missed.
TOLERANCE = 0.03


def threshold_for_rate(scores: NDArray[np.float64], rate: float) -> tuple[float, float]:
    """Threshold and tie probability that transmit a share ``rate`` in [0, 1] of the steps with these scores ``[N]``.

    Raises:
        ConfigError: if there are no scores, since every step was forced.
    """
    if not len(scores):
        raise ConfigError("every step was transmitted by force, so there is no threshold to find; raise max_skips")
    return threshold_of(np.sort(scores).tolist(), rate)


@dataclass(frozen=True)
class Calibration:
    """A gate's settings for one pair of policies and one rate.

    Attributes:
        fingerprint, rate: of the bundle it was made for, and the requested transmission rate.
        held_out: on other episodes: ``rate``, ``episodes``, ``inferences``, the share ``free`` that the score decided.
        rounds: threshold and achieved rate of every round on states of the gated policy.
        model: fit of rejection over score, see :mod:`specact.lab.evaluation.calibrate`.
        made_by: the settings of the run that made it.
        decoding: of a token or flow policy, on which what is proposed and so the score depend; empty for the default.
    """

    fingerprint: str
    rate: float
    settings: GateSettings
    held_out: dict[str, float]
    rounds: list[dict[str, float]]
    model: dict[str, Any]
    made_by: dict[str, Any]
    decoding: str = ""

    def save(self, folder: Path) -> Path:
        """Writes ``GATE-RATE.json`` or ``GATE-RATE-DECODING.json`` into a folder."""
        path = folder / file_name(self.settings.name, self.rate, self.decoding)
        write_json(path, dataclasses.asdict(self))
        return path


def file_name(gate: str, rate: float, decoding: str = "") -> str:
    """Name of a calibration's file."""
    return f"{file_stem(gate)}-{rate:.2f}{decoding and '-'}{decoding}.json"


def _file_names(gate: str, *parts: Any) -> list[str]:
    """Its file's name today, and the one of earlier versions."""
    return [file_name(name, *parts) for name in (gate, OLD_NAMES.get(gate, gate))]


def read_calibration(path: Path, bundle: Pair[Any]) -> Calibration:
    """Reads a calibration and refuses one made for other weights.

    Raises:
        BundleError: if it is damaged, or its fingerprint is not the bundle's.
    """
    try:
        calibration = read_json(read_part(path, MAX_JSON_BYTES), Calibration, str(path), BundleError)
    except BundleError as error:
        raise _damaged(path, error) from None
    # The file's gate must be the requested one: a bundle must not substitute other code (a plug-in) for it.
    if path.name not in _file_names(calibration.settings.name, calibration.rate, calibration.decoding):
        under = f" under the decoding {calibration.decoding!r:.40}" if calibration.decoding else ""
        raise BundleError(
            f"{path} is a calibration of the gate {calibration.settings.name!r} at rate {calibration.rate:g}{under}, "
            "which its name does not say; make it again with: specact calibrate"
        )
    if calibration.fingerprint != bundle.fingerprint:
        raise BundleError(
            f"{path} was made for weights {calibration.fingerprint}, but the bundle {bundle.source.cli_args} has "
            f"{bundle.fingerprint}; calibrate again with: {calibrate_command(bundle, calibration.settings.name)}"
        )
    return calibration


def find_calibration(bundle: Pair[Any], gate: str, rate: float) -> Calibration | None:
    """The calibration stored in the bundle for this gate, rate and the decoding it was loaded with, or None."""
    if bundle.path is None:
        return None
    paths = (bundle.path / "calibration" / name for name in _file_names(gate, rate, bundle.source.decoding))
    return next((read_calibration(path, bundle) for path in paths if path.is_file()), None)


def calibrated_gate(bundle: Pair[Any], gate: str, rate: float) -> Gate:
    """A gate with the threshold of the bundle's stored calibration for a transmission rate in (0, 1).

    The gate is one of :data:`~specact.gates.settings.CALIBRATED`, or ``MODULE:GATE``.

    Raises:
        ConfigError: if the bundle has no calibration for it; the message names those it has.
        BundleError: if the calibration is damaged, or was made for other weights.
    """
    calibration = find_calibration(bundle, gate, rate)
    if calibration is None:
        if not load_gate(gate, bundle.exchange.contract.family).calibrated:
            raise ConfigError(f"the gate {gate!r} needs no calibration; make it itself, as specact.gates.Always()")
        folder = None if bundle.path is None else bundle.path / "calibration"
        stored = sorted(path.stem for path in folder.glob("*.json")) if folder is not None else []
        decoding = bundle.source.decoding
        raise ConfigError(
            f"the bundle {bundle.name!r} has no calibration of {gate!r} at rate {rate:.2f}"
            f"{f' under the decoding {decoding!r}' if decoding else ''}; it has {', '.join(stored) or 'none'}. "
            f"Make one with: {calibrate_command(bundle, gate)} --rate {rate:g}, or with specact offline "
            "calibrate where there is no simulator; or hold the rate online, without a calibration: specact run --hold"
        )
    try:
        return calibration.settings.build(bundle)
    except (ValueError, KeyError, TypeError) as error:  # values of types that no gate has
        raise _damaged(Path(file_name(gate, rate, calibration.decoding)), error) from None


class RateCheck:
    """Whether a gate asks as often as its calibration for a rate promises; if not, ``warning`` is a text that says so.

    The calibration's own rate on held-out episodes is compared first, then the decisions without audits, by a
    confidence sequence, which may be looked at after every one. A usual cause are states that no calibration has seen.
    """

    def __init__(self, gate: str, rate: float, calibration: Calibration | None) -> None:
        self.gate, self.rate, self.warning = gate, rate, ""
        self._mean = RunningMean()
        held_out = rate if calibration is None else calibration.held_out.get("rate", rate)
        if abs(held_out - rate) > TOLERANCE:
            self._warn(f"{held_out:.2f} when it was calibrated")

    def take(self, decision: Decision) -> bool:
        """Adds a decision; True if it is the first to show that the rate is missed."""
        if self.warning:
            return False
        self._mean.take(float(decision.transmit and decision.reason != "audit"))
        estimate = self._mean.estimate()
        if estimate.low <= self.rate + TOLERANCE and estimate.high >= self.rate - TOLERANCE:
            return False
        self._warn(f"{estimate.mean:.2f} in {estimate.count} inferences")
        return True

    def _warn(self, achieved: str) -> None:
        self.warning = (
            f"the gate {self.gate!r} misses its rate of {self.rate:g}: it asked at {achieved}; hold the rate online "
            f"with --hold {self.rate:g}, or calibrate on such states"
        )


def _damaged(path: Path, error: Exception) -> BundleError:
    return BundleError(f"{path} is not a calibration ({error}); make it again with: specact calibrate")


def deciding_gate(
    bundle: Pair[Any], name: str, rate: float, budget: RateBudget | None, gate_options: tuple[str, ...] = ()
) -> Gate:
    """The calibrated gate of this rate, or one under a controller where there is a budget.

    Its parameters are those of its calibration, unless options are given, see
    :func:`~specact.gates.settings.gate_settings`.

    Raises:
        ConfigError: if the gate is unknown, has no threshold to control or no such parameters, or the bundle has no
            calibration, or one with other parameters.
    """
    check_options(gate_options, [name], bundle.exchange.contract.family)
    settings = gate_settings(name, bundle, gate_options)
    if not load_gate(name).calibrated:
        if budget is not None:
            raise ConfigError(f"--gate {name} has no threshold, so it cannot hold a budget; choose another gate")
        return replace(settings, threshold=rate).build(bundle)
    if budget is not None:
        return Controller(settings.build(bundle), budget)
    stored = find_calibration(bundle, name, rate)
    if gate_options and stored is not None and stored.settings.options != settings.options:
        raise ConfigError(
            f"{name!r} was calibrated with the parameters {dict(stored.settings.options)}; leave out --gate-options, "
            "or calibrate again with these"
        )
    return calibrated_gate(bundle, name, rate)
