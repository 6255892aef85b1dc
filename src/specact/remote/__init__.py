"""The device's client of a server."""

from specact.imports import attach

__getattr__, __all__ = attach(__name__, __file__)
