"""TISED: the equations of task time under inference speed-up and execution delay, and sweeps that measure it.

Times are in seconds. Where a function takes ``ArrayLike``, its arguments broadcast, and the result is a float64 array
``[...]`` of their common shape.
"""

from specact.imports import attach

__getattr__, __all__ = attach(__name__, __file__)
