"""Links between a robot and its server: simulated, recorded, and shaped for real sockets."""

from specact.imports import attach

__getattr__, __all__ = attach(__name__, __file__)
