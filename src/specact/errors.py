"""The exceptions of the package. Every message says what was wrong, what is allowed and what to do."""

from __future__ import annotations

import copyreg
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


class SpecactError(Exception):
    """Base of every error raised on purpose by this package."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Serialisation between processes, with the attributes of subclasses."""
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class ConfigError(SpecactError):
    """An invalid setting, name or recipe."""


class DataError(SpecactError):
    """Demonstrations that cannot be read or are inconsistent."""


class BundleError(SpecactError):
    """A bundle that is incomplete, damaged or inconsistent."""


class ObservationError(SpecactError):
    """An unusable observation.

    Its cause is ``absent`` (None), ``missing`` (a key), ``type``, ``shape``, ``not_finite``, or ``action`` if it is
    valid but the policies' action is not finite.
    """

    def __init__(self, message: str, cause: str = "action") -> None:
        self.cause = cause
        super().__init__(message)


class StallError(SpecactError):
    """A robot whose own code did not return in time; the robot was stopped."""


class RenderError(SpecactError):
    """An environment that this machine cannot render."""


class RemoteError(SpecactError):
    """A server that cannot be reached or refuses this device."""


class RefusedError(RemoteError):
    """A server that refuses this device, or is not the one expected: to try again would change nothing."""


class MissError(RemoteError):
    """A request without a usable reply before its deadline; the cause is that of a :class:`~specact.types.Miss`."""

    def __init__(self, message: str, cause: str) -> None:
        self.cause = cause
        super().__init__(message)


class WireError(SpecactError):
    """A message that violates the protocol, or a request that the server refuses, with an ``ErrorCode``."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


class MissingExtraError(SpecactError):
    """An optional dependency that is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        self.package, self.extra = package, extra
        super().__init__(f"{package} is not installed; run: pip install 'specact[{extra}]'")


class ContractError(SpecactError, AssertionError):
    """A third-party object that violates a contract of :mod:`specact.contracts`."""


def unknown_name(kind: str, name: str, known: Iterable[str], *, plugins: bool = False) -> ConfigError:
    """A :class:`ConfigError` for a name that is not ``known``, suggesting the nearest; or MODULE:NAME with plugins."""
    near = get_close_matches(name, names := sorted(known), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    suffix = "; or MODULE:NAME for one of your own" if plugins else ""
    return ConfigError(f"unknown {kind} {name!r}{hint} Known: {', '.join(names)}{suffix}")
