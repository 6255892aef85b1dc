"""Gates: which steps are worth the target's time."""

from specact.gates.audit import Shadow
from specact.gates.baseline import Always, Never, Random
from specact.gates.controller import Controller, LatencyBudget, LinkBudget, RateBudget
from specact.gates.deviation import ActionDeviation
from specact.gates.drift import DriftAlarm
from specact.gates.gate import Gate
from specact.gates.learned import Learned
from specact.gates.oracle import Oracle
from specact.gates.uncertainty import Uncertainty

__all__ = [
    "ActionDeviation",
    "Always",
    "Controller",
    "DriftAlarm",
    "Gate",
    "LatencyBudget",
    "Learned",
    "LinkBudget",
    "Never",
    "Oracle",
    "Random",
    "RateBudget",
    "Shadow",
    "Uncertainty",
]
