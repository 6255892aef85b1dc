"""How a verb declares its options: a frozen dataclass, whose annotations are their ranges."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro

from specact.errors import ConfigError
from specact.records import check_fields

if TYPE_CHECKING:
    import ssl

    from specact.pair import Pair

T = TypeVar("T")

# `--help` leaves out what few need; `--help-all` shows it.
_BRIEF = bool({"-h", "--help"} & set(sys.argv))
_IF_ASKED: Any = tyro.conf.Suppress if _BRIEF else tyro.conf.OmitArgPrefixes

# A field whose own fields are options of the verb.
Flat = Annotated[T, tyro.conf.arg(name=""), tyro.conf.OmitArgPrefixes]
# The same, for options that only `--help-all` shows.
Rare = Annotated[T, tyro.conf.arg(name=""), _IF_ASKED]
# An option that need not be given; its help does not say "(default: None)".
Maybe = Annotated[T | None, tyro.conf.arg(help_behavior_hint="")]


@dataclass(frozen=True)
class Options:
    """Options that belong together; those of a verb, with its help as docstring, have a method ``run``.

    Raises:
        ConfigError: for a value that its annotation does not allow.
    """

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Parts(Options):
    """What a pair is made of, where it does not say so itself."""

    # draft of a pair of chunk policies, of a token policy or of a flow policy: a bundle, MODULE:NAME, a .toml file,
    # lerobot:PATH@HZ or openpi:ws://HOST:PORT#FILE.toml
    draft: Maybe[str] = None
    target: Maybe[str] = None  # target of a pair of chunk policies, or the flow policy of FLASH's block, likewise
    # how chunks of a token policy or a flow policy are drafted and verified, such as
    # specvla, kerv or flash
    decoding: str = ""

    def load(self, name: str) -> Pair[Any]:
        """The pair of this name; errors as of :func:`~specact.load.load_pair`."""
        from specact.load import load_pair

        return load_pair(name, draft=self.draft, target=self.target, decoding=self.decoding)


@dataclass(frozen=True)
class Access(Options):
    """What a server wants to see."""

    token_file: Maybe[Path] = None  # file with the server's bearer token; the variable SPECACT_TOKEN if not given
    ca: Maybe[Path] = None  # PEM file of the authority that signed the server's certificate, for wss

    @property
    def token(self) -> str | None:
        """The token; see :func:`read_token`."""
        return read_token(self.token_file)

    @property
    def tls(self) -> ssl.SSLContext | None:
        """The context for a certificate of one's own authority; None for the system's authorities."""
        from specact.remote.endpoint import tls_context

        return tls_context(self.ca)


def read_token(file: Path | None) -> str | None:
    """The token from a file, else from SPECACT_TOKEN, else None; never from the command line, which others can read.

    Raises:
        ConfigError: if the file cannot be read.
    """
    if file is None:
        return os.environ.get("SPECACT_TOKEN") or None
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read a token from {file}: {error}") from None
