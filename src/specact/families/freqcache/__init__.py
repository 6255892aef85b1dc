"""Flow policies whose prefix is computed again only where the picture has changed: FreqCache."""

from specact.lazy import attach

__getattr__, __all__ = attach(__name__, __file__)
