"""Gates: which steps are worth the target's time."""

from specact.imports import attach

__getattr__, __all__ = attach(__name__, __file__)
