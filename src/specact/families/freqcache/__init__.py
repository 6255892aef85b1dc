"""FreqCache: flow policies that recompute the prefix only where the camera image has changed."""

from specact.lazy import attach

__getattr__, __all__ = attach(__name__, __file__)
