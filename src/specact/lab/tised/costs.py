"""What a setting's inference takes on this machine."""

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
    HalfOfPair,
    PairDriver,
    RoundOfKind,
    RoundsDriver,
    SplitDriver,
    StagesOn,
    inference,
)
from specact.lab.tised.settings import Setting

_ROUNDS, _WARM_UP = 60, 10
_Part = tuple[FlowDriver | CodesDriver, bool] | RoundOfKind | StagesOn | HalfOfPair


def measure_settings(settings: Sequence[Setting]) -> dict[str, list[float]]:
    """Median time of each setting's inferences at batch 1 on this machine [ms], by the setting's label.

    One for a chunk policy, the draft's and the target's for a pair, the device's and the server's for a split target,
    and for a flow in rounds one of each kind of round. Every network is measured once, so that settings that share one
    have the same time; all of them in turn, in rounds.
    """
    parts = {setting.label: _parts(setting) for setting in settings}
    calls = {
        part: inference(part[0], inpainting=part[1]) if isinstance(part, tuple) else part.call()
        for part in dict.fromkeys(chain.from_iterable(parts.values()))
    }
    taken: dict[_Part, list[float]] = {part: [] for part in calls}
    for _ in range(_ROUNDS):
        for part, call in calls.items():
            started = time.perf_counter()
            call()
            taken[part].append(1e3 * (time.perf_counter() - started))
    return {label: [float(np.median(taken[part][_WARM_UP:])) for part in own] for label, own in parts.items()}


def _parts(setting: Setting) -> list[_Part]:
    if isinstance(setting.driver, RoundsDriver):
        reuse = setting.driver.rounds.reuse
        return [
            RoundOfKind(setting.driver.bundle, kind, reuse if kind == "reused" else None)
            for kind in setting.driver.kinds
        ]
    if isinstance(setting.driver, SplitDriver):
        return [StagesOn(setting.driver, "device"), StagesOn(setting.driver, "server")]
    if isinstance(setting.driver, PairDriver) and not isinstance(setting.driver.load(), Bundle):
        # What the gate decides and whether verdicts may be late is not measured.
        own = replace(setting.driver, gate=GateSettings("never"), rate=None, late=False)
        return [HalfOfPair(own, "draft"), HalfOfPair(own, "target")]
    if isinstance(setting.driver, PairDriver):
        return [(CodesDriver(setting.driver.bundle, role), False) for role in ("draft", "target")]
    # Guidance costs a flow policy its gradient.
    return [(setting.driver, setting.execution is not None and setting.execution.kind == "inpainting")]
