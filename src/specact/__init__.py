"""Speculative action inference for robots.

A small *draft* policy acts on the robot; a large *target* policy is asked only when a gate finds the step worth it,
and its answer corrects the draft's action codes by exact speculative sampling (ADAHI).
"""

import os

# From 1.29 on ONNX Runtime reports to its makers unless told not to before it is loaded. A process that drives a robot
# opens no connection that nobody asked for; whoever wants the reports sets the variable to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from specact.imports import attach

__version__ = "0.2.0"
__getattr__, __all__ = attach(__name__, __file__)
