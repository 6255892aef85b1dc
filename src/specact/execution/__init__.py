"""Execution of action chunks, and of verification outcomes that arrive late."""

from specact.lazy import attach

__getattr__, __all__ = attach(__name__, __file__)
