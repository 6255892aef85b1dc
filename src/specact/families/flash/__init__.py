"""Realtime-VLA FLASH: flow policies that verify drafted chunks instead of denoising."""

from specact.lazy import attach

__getattr__, __all__ = attach(__name__, __file__)
