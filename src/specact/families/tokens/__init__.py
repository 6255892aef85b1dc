"""Policies that write actions token by token."""

from specact.imports import attach

__getattr__, __all__ = attach(__name__, __file__)
