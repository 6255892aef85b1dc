"""Policies over residual action codes of one frozen tokenizer."""

from specact.imports import attach

__getattr__, __all__ = attach(__name__, __file__)
