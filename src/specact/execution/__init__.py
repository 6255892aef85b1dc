"""How chunks of actions are played, and when the outcome of a verification is executed."""

from specact.lazy import attach

__getattr__, __all__ = attach(__name__, __file__)
