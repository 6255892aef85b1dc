"""Flow policies whose drafted chunks are checked instead of denoised: Realtime-VLA FLASH."""

from specact.lazy import attach

__getattr__, __all__ = attach(__name__, __file__)
