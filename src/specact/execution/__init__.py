"""Execution of action chunks, and of verification outcomes that arrive late."""

from specact.imports import attach

__getattr__, __all__ = attach(__name__, __file__)
