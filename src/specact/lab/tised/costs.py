"""Inference times of a sweep's settings on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from specact.families.codes.bundle import Bundle
from specact.gates.settings import GateSettings
from specact.lab.tised.drivers import (
    CodesDriver,
    FlowDriver,
    PairDriver,
    PairSide,
    RoundCall,
    RoundsDriver,
    SplitDriver,
    SplitSide,
    inference,
)
from specact.lab.tised.settings import Setting

_ROUNDS, _WARM_UP = 60, 10
_Part = tuple[FlowDriver | CodesDriver, bool] | RoundCall | SplitSide | PairSide


def measure_settings(settings: Sequence[Setting]) -> dict[str, list[float]]:
    """Median time of each setting's inferences at batch 1 on this machine [ms], by the setting's label.

    One time for a chunk policy, the draft's and the target's for a pair, the device's and the server's for a split
    target, and one per kind of round for a flow in rounds. Every network is measured once, so settings that share one
    have the same time; the measurements alternate.
    """
    parts = {setting.label: _parts(setting) for setting in settings}
    calls = {
        part: inference(part[0], inpainting=part[1]) if isinstance(part, tuple) else part.call()
        for part in dict.fromkeys(chain.from_iterable(parts.values()))
    }
    times_ms: dict[_Part, list[float]] = {part: [] for part in calls}
    for _ in range(_ROUNDS):
        for part, call in calls.items():
            started = time.perf_counter()
            call()
            times_ms[part].append(1e3 * (time.perf_counter() - started))
    return {
        label: [float(np.median(times_ms[part][_WARM_UP:])) for part in parts_of_setting]
        for label, parts_of_setting in parts.items()
    }


def _parts(setting: Setting) -> list[_Part]:
    if isinstance(setting.driver, RoundsDriver):
        reuse = setting.driver.rounds.reuse
        return [
            RoundCall(setting.driver.bundle, kind, reuse if kind == "reused" else None) for kind in setting.driver.kinds
        ]
    if isinstance(setting.driver, SplitDriver):
        return [SplitSide(setting.driver, "device"), SplitSide(setting.driver, "server")]
    if isinstance(setting.driver, PairDriver) and not isinstance(setting.driver.load(), Bundle):
        # The times do not depend on the gate and on late verdicts.
        ungated = replace(setting.driver, gate=GateSettings("never"), rate=None, late=False)
        return [PairSide(ungated, "draft"), PairSide(ungated, "target")]
    if isinstance(setting.driver, PairDriver):
        return [(CodesDriver(setting.driver.bundle, role), False) for role in ("draft", "target")]
    # Inpainting guidance of a flow policy computes a gradient.
    return [(setting.driver, setting.execution is not None and setting.execution.kind == "inpainting")]
