"""The control loop of a robot, and its sources of actions."""

from specact.imports import attach

__getattr__, __all__ = attach(__name__, __file__)
