"""Inference times of a sweep's settings on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from specact.families.codes.bundle import Bundle
from specact.gates.settings import LEARNED, GateSettings
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
    parts = {setting.label: parts_of(setting) for setting in settings}
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


def parts_of(setting: Setting) -> list[_Part]:
    """What is timed of a setting, in the order of its latencies."""
    if isinstance(setting.driver, RoundsDriver):
        reuse = setting.driver.rounds.reuse
        return [
            RoundCall(setting.driver.bundle, kind, reuse if kind == "reused" else None) for kind in setting.driver.kinds
        ]
    if isinstance(setting.driver, SplitDriver):
        return [SplitSide(setting.driver, "device"), SplitSide(setting.driver, "server")]
    if isinstance(setting.driver, PairDriver):
        # Of the gates a learned one alone takes time that counts, and late verdicts take none.
        ungated = replace(setting.driver, gate=GateSettings("never"), rate=None, late=False)
        gated = replace(ungated, gate=setting.driver.gate) if setting.driver.gate.name in LEARNED else ungated
        if not isinstance(setting.driver.load(), Bundle):
            return [PairSide(gated, "draft"), PairSide(ungated, "target")]
        draft = (CodesDriver(setting.driver.bundle, "draft"), False) if gated is ungated else PairSide(gated, "draft")
        return [draft, (CodesDriver(setting.driver.bundle, "target"), False)]
    # Inpainting guidance of a flow policy computes a gradient.
    return [(setting.driver, setting.execution is not None and setting.execution.kind == "inpainting")]
