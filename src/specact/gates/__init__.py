"""Gates: which steps are worth the target's time."""

from specact.gates.baseline import Always, Never, Random
from specact.gates.deviation import ActionDeviation
from specact.gates.gate import Gate
from specact.gates.learned import Learned
from specact.gates.oracle import Oracle
from specact.gates.uncertainty import Uncertainty

__all__ = ["ActionDeviation", "Always", "Gate", "Learned", "Never", "Oracle", "Random", "Uncertainty"]
