"""Damage in the files of demonstrations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from specact.errors import DataError, SpecactError


@contextmanager
def reading(what: str, advice: str = "copy it again") -> Iterator[None]:
    """Turns every error of a decoder into a DataError: a damaged file fails in any way that a decoder can.

    Args:
        what: is read, for messages.
        advice: what to do about damage.
    """
    try:
        yield
    except (SpecactError, ModuleNotFoundError):
        raise
    except Exception as error:
        raise DataError(f"{what} is damaged or missing ({error}); {advice}") from error
