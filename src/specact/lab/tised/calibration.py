"""Calibration of gates for a sweep: on states of the gated policy in the moving world, with the link's delays."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import numpy as np

from specact.gates.settings import GateSettings
from specact.lab.evaluation.calibrate import calibration_episodes, find_threshold
from specact.lab.rollout.steps import REASONS
from specact.lab.tised.drivers import PairDriver
from specact.lab.tised.trial import PLACE, Row, Trial, run_trial
from specact.types import Decision

ROUNDS = 3


@dataclass(frozen=True)
class GateSearch:
    """A gate to be calibrated at one place of a sweep.

    Attributes:
        trial: any episode there; its driver is a pair whose gate holds a rate.
        episodes: per round, and again for the held-out check.
    """

    trial: Trial
    episodes: int


def calibrate_gate(search: GateSearch) -> Row:
    """Finds the gate's threshold; returns a row with the place, the gate, and the rates on held-out episodes.

    The calibrated rate is that of the gate's decisions. With late verdicts a step is not sent while another request is
    in flight, so over a long link less is sent than the gate wants: ``held_out_sent``.
    """
    trial, driver = search.trial, search.trial.driver
    assert isinstance(driver, PairDriver) and driver.rate is not None, "the sweep asks for no other"
    sent: list[bool] = []

    def roll(settings: GateSettings, number: int) -> dict[str, np.ndarray]:
        steps: list[tuple[Decision, bool]] = []
        for episode in calibration_episodes(number, ROUNDS, search.episodes):
            trial_of_episode = replace(trial, driver=replace(driver, gate=settings), episode=episode)
            run_trial(trial_of_episode, on_decision=lambda decision, wanted: steps.append((decision, wanted)))
        sent[:] = [decision.transmit for decision, _ in steps]
        return {
            "score": np.array([decision.score for decision, _ in steps]),
            "reason": np.array([REASONS.index(decision.reason) for decision, _ in steps]),
            "transmitted": np.array([wanted for _, wanted in steps]),
        }

    search_result = find_threshold(driver.gate, driver.rate, ROUNDS, roll)
    return {name: trial.row[name] for name in PLACE} | {
        "rate": driver.rate,
        "held_out_rate": float(search_result.checked["transmitted"].mean()),
        "held_out_sent": float(np.mean(sent)),
        "episodes": search.episodes,
        "inferences": len(sent),
        "rounds": [{"threshold": made.settings.threshold, "rate": made.rate} for made in search_result.rounds],
        "gate": asdict(search_result.settings),
    }


def gate_of(row: Row) -> GateSettings:
    """The calibrated gate of a row."""
    gate = dict(row["gate"])
    options = tuple((name, value) for name, value in gate.pop("options"))
    return GateSettings(**gate, options=options)
