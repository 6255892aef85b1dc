"""A target behind a socket."""

from specact.imports import attach

__getattr__, __all__ = attach(__name__, __file__)
