"""One tree of errors. Every message says what was wrong, what is allowed and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class SpecactError(Exception):
    """Base of every error raised on purpose by this package."""


class ConfigError(SpecactError):
    """A setting, name or recipe that cannot be used as given."""


class DataError(SpecactError):
    """Demonstrations that cannot be read, or that contradict themselves."""


class BundleError(SpecactError):
    """A bundle that is incomplete, damaged, or whose parts do not belong together."""


class ObservationError(SpecactError):
    """An observation the policy must not act on.

    Attributes:
        cause: ``absent`` (None), ``missing`` (a key), ``type``, ``shape``, ``not_finite``, or ``action`` where the
            observation is valid but the policies make no finite action of it.
    """

    def __init__(self, message: str, cause: str = "action") -> None:
        self.cause = cause
        super().__init__(message)

    def __reduce__(self) -> tuple[type[ObservationError], tuple[str, str]]:
        """How it comes back from a worker process."""
        return type(self), (str(self), self.cause)


class RenderError(SpecactError):
    """An environment that this machine cannot draw."""


class RemoteError(SpecactError):
    """A server that cannot be reached, or that refuses this device."""


class MissError(RemoteError):
    """A server did not answer one request in time, or with nothing to act on.

    Attributes:
        cause: as of a :class:`~specact.types.Miss`: ``deadline``, ``disconnected``, ``overloaded``, ``expired``,
            ``refused`` or ``invalid``.
    """

    def __init__(self, message: str, cause: str) -> None:
        self.cause = cause
        super().__init__(message)

    def __reduce__(self) -> tuple[type[MissError], tuple[str, str]]:
        """How it comes back from a worker process."""
        return type(self), (str(self), self.cause)


class WireError(SpecactError):
    """A message that breaks the protocol, or a request the server refuses.

    Attributes:
        code: one of :class:`specact.wire.checks.ErrorCode`.
    """

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)

    def __reduce__(self) -> tuple[type[WireError], tuple[str, str]]:
        """How it comes back from a worker process."""
        return type(self), (self.code, str(self))


class MissingExtraError(SpecactError):
    """An optional dependency that is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        self.package, self.extra = package, extra
        super().__init__(
            f"this needs the package {package!r}, which is not installed; run: pip install 'specact[{extra}]'"
        )

    def __reduce__(self) -> tuple[type[MissingExtraError], tuple[str, str]]:
        """How it comes back from a worker process."""
        return type(self), (self.package, self.extra)


class ContractError(SpecactError, AssertionError):
    """Something of a third party that does not do what :mod:`specact.contracts` expects of its kind."""


def unknown_name(kind: str, name: str, known: Iterable[str], *, plugins: bool = False) -> ConfigError:
    """A :class:`ConfigError` for a name that is not one of ``known``, suggesting the nearest one.

    Args:
        kind: what was to be named.
        name: the unknown name.
        known: those that exist.
        plugins: whether ``MODULE:NAME`` would have been possible.
    """
    names = sorted(known)
    near = get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    own = "; or MODULE:NAME for one of your own" if plugins else ""
    return ConfigError(f"unknown {kind} {name!r}{hint} Known: {', '.join(names)}{own}")
