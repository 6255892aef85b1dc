"""The equations of task time under inference speed-up and execution delay.

All arguments may be arrays that broadcast; results are float64 arrays ``[...]`` of their common shape. Times are in
seconds.
"""

from specact.lazy import attach

__getattr__, __all__ = attach(__name__, __file__)
