"""User-defined families by name ``MODULE:NAME``: a pair of policies, or an exchange for a server."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from inspect import getattr_static
from pathlib import Path
from typing import Any, cast

from specact.errors import ConfigError, SpecactError
from specact.families.chunks.sources import is_policy
from specact.files import check_name, file_stem
from specact.pair import LoadedPair, Pair
from specact.plugins import load_object
from specact.wire.exchange import Exchange

_PAIR = (
    "name", "observation", "units", "execute", "overlap", "rate_hz", "drafter", "target", "verifier", "exchange",
)  # fmt: skip
_EXCHANGE = ("name", "fingerprint", "contract", "read", "answer")


class OwnPair:
    """A :class:`~specact.pair.LoadedPair` from a user-defined :class:`~specact.pair.Pair`, with defaults.

    Without an ``env`` it is empty. Without a ``fingerprint`` it is derived from the name, so that a calibration of
    earlier weights is not refused. Without a ``path`` its calibrations are in the folder ``MODULE.NAME`` of the current
    directory.

    Args:
        pair: the pair.
        source: its name.
    """

    def __init__(self, pair: Pair[Any], source: str) -> None:
        self._pair, self.source = pair, source
        self.env = str(getattr(pair, "env", ""))
        self.fingerprint = str(
            getattr(pair, "fingerprint", "") or hashlib.sha256(source.encode()).hexdigest()[:16],
        )
        self.path = Path(getattr(pair, "path", None) or file_stem(source))
        self.recommended_gates = dict(getattr(pair, "recommended_gates", {}))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pair, name)


def load_own_pair(source: str) -> LoadedPair[Any]:
    """The pair ``MODULE:NAME``: an object, or a class or function that makes one without arguments.

    Raises:
        ConfigError: if there is none, or it lacks a member of :class:`~specact.pair.Pair`.
    """
    kind = "pair of policies, see specact.pair.Pair"
    found = _instance(source, kind, lambda value: _missing_member(value, _PAIR) is None)
    lacking = _missing_member(found, _PAIR)
    if lacking is not None:
        raise ConfigError(f"{source!r} has no {lacking!r}; a pair has {', '.join(_PAIR)}, see specact.pair.Pair")
    check_name("pair", found.name)
    # Members are forwarded by __getattr__, which the type checker cannot see.
    return cast("LoadedPair[Any]", OwnPair(found, source))


def load_own_exchange(source: str) -> Exchange[Any] | None:
    """The exchange ``MODULE:NAME``, or that of a pair of this name; made as for :func:`load_own_pair`.

    Returns:
        The exchange; None if the name is that of a chunk policy.

    Raises:
        ConfigError: if there is none.
        BundleError: if the pair has no local target.
    """
    kind = "target: a chunk policy, a pair of policies or an exchange"
    found = _instance(
        source,
        kind,
        lambda value: is_policy(value) or None in (_missing_member(value, _PAIR), _missing_member(value, _EXCHANGE)),
    )
    if is_policy(found):
        return None
    if _missing_member(found, _PAIR) is None:
        found = found.exchange
    lacking = _missing_member(found, _EXCHANGE)
    if lacking is not None:
        raise ConfigError(
            f"{source!r} is {found!r:.100}. It must be a {kind}, see specact.chunk_policy, specact.pair.Pair and "
            f"specact.wire.exchange.Exchange; an exchange has {', '.join(_EXCHANGE)}"
        )
    check_name("exchange", found.name)
    return cast("Exchange[Any]", found)


def _instance(source: str, kind: str, fits: Callable[[Any], bool]) -> Any:
    found = load_object(source, _or_factory(kind), lambda value: fits(value) or callable(value))
    if fits(found):
        return found
    try:
        return found()
    except SpecactError:
        raise
    # Third-party code can raise anything.
    except Exception as error:
        raise ConfigError(
            f"{source.replace(':', '.')}() cannot be called: {type(error).__name__}: {error}. {source!r} must be a "
            f"{_or_factory(kind)}"
        ) from error


def _or_factory(kind: str) -> str:
    return f"{kind}, or a class or function that makes one without arguments"


def _missing_member(value: Any, members: tuple[str, ...]) -> str | None:
    """The first member that an object lacks, without evaluating properties; a class lacks them all."""
    missing = object()
    return next((m for m in members if isinstance(value, type) or getattr_static(value, m, missing) is missing), None)
