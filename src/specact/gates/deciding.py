"""The gate of a robot by name: calibrated, under a controller, or random."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from specact.errors import ConfigError
from specact.families.load import AnyPair
from specact.gates.calibration import calibrated_gate, find_calibration
from specact.gates.controller import Budget, Controller
from specact.gates.gate import Gate
from specact.gates.settings import GateChoices, load_gate
from specact.plugins import is_plugin


def check_gate_options(given: Sequence[str], gates: Iterable[str]) -> None:
    """Refuses ``--gate-options`` without a user-defined gate.

    Raises:
        ConfigError: if options are given and every gate is built in.
    """
    if given and not any(map(is_plugin, gates)):
        raise ConfigError(
            "--gate-options is for a gate of your own, MODULE:GATE; the built-in ones have --reading, --alpha, "
            "--source, --uncertainty and --max-skips, of specact calibrate and eval"
        )


def deciding_gate(
    bundle: AnyPair,
    name: str,
    rate: float,
    budget: Budget | None,
    gate_options: tuple[str, ...] = (),
) -> Gate:
    """The calibrated gate of this rate, or one under a controller where there is a budget.

    Args:
        bundle: the pair.
        name: of the gate.
        rate: share of inferences to transmit.
        budget: budget for a controller, or None.
        gate_options: of a user-defined gate; those of its calibration if empty.

    Raises:
        ConfigError: if the gate is unknown, has no threshold to control or no such options, or the bundle has no
            calibration, or one with other options.
    """
    check_gate_options(gate_options, [name])
    choices = GateChoices(gate_options=gate_options)
    if load_gate(name).calibrated:
        if budget is not None:
            return Controller(choices.settings(name, bundle).build(bundle), budget)
        stored = find_calibration(bundle, name, rate)
        if gate_options and stored is not None and stored.settings.options != choices.settings(name, bundle).options:
            raise ConfigError(
                f"{name!r} was calibrated with the options {dict(stored.settings.options)}; leave out --gate-options, "
                "or calibrate again with these"
            )
        return calibrated_gate(bundle, name, rate)
    if budget is not None:
        raise ConfigError(f"--gate {name} has no threshold, so it cannot hold a budget; choose another gate")
    return replace(choices.settings(name, bundle), threshold=rate).build(bundle)
