"""How a verb declares its options: a frozen dataclass, whose annotations are their ranges."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import tyro
from tyro.conf import Positional

from specact.errors import ConfigError
from specact.records import check_fields, read_record, read_toml

if TYPE_CHECKING:
    from specact.pair import Pair
    from specact.remote.endpoint import Endpoint
    from specact.wire.exchange import Contract

T = TypeVar("T")

# How every verb's options are read.
MARKERS = (tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff, tyro.conf.PositionalMetavarFromFieldName)
# The verbs that take options from a file, too.
CONFIGURED = ("serve", "run", "play", "doctor", "calibrate", "offline")
_POSITIONAL = get_args(Positional[str])[1]
# `--help` leaves out what few need; `--help-all` shows it.
_BRIEF = bool({"-h", "--help"} & set(sys.argv))
_IF_ASKED: Any = tyro.conf.Suppress if _BRIEF else tyro.conf.OmitArgPrefixes

# A field whose own fields are options of the verb.
Flat = Annotated[T, tyro.conf.arg(name=""), tyro.conf.OmitArgPrefixes]
# The same, for options that only `--help-all` shows.
Rare = Annotated[T, tyro.conf.arg(name=""), _IF_ASKED]
# The file of :func:`with_file`, which has read it.
ConfigFile = Annotated[Path | None, tyro.conf.arg(help_behavior_hint="", metavar="OPTIONS.toml")]
# An option that need not be given; its help does not say "(default: None)".
Maybe = Annotated[T | None, tyro.conf.arg(help_behavior_hint="")]


@dataclass(frozen=True)
class Options:
    """Options that belong together; those of a verb, with its help as docstring, have a method ``run``.

    A value that its annotation does not allow is a ConfigError.
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

    def endpoint(self, server: str, contract: Contract) -> Endpoint:
        """The address of a server for a target of this contract, with what the server wants to see."""
        from specact.families.chunks.remote import target_endpoint
        from specact.remote.endpoint import tls_context

        return target_endpoint(server, self.token, tls_context(self.ca), contract)


def with_file(verb: str, given: Sequence[str], load: Callable[[str], Any]) -> list[str]:
    """The words of a verb, and of those options in its TOML file ``--config FILE`` that are not given.

    Keys at the top are shared, and each verb takes its own; a table ``[VERB]`` is for one verb and goes first. ``load``
    gives a verb's options. Raises ConfigError for a file, key or value that cannot be used.
    """
    options, first, words = load(verb), list(given[:1]), list(given[1:])
    if not first or first[0] not in (members := _members(options)):
        members, first, words = {"": options}, [], list(given)
    options = members["".join(first)]
    words = [part for word in words for part in re.split("(?<=^--config)=", word)]
    at = words.index("--config") if "--config" in words else len(words)
    if at + 1 >= len(words) or "config" not in getattr(options, "__dataclass_fields__", ()):
        return list(given)
    file, words = Path(words[at + 1]), [*words[:at], *words[at + 2 :]]
    values, known = read_toml(file, dict[str, Any], "configuration"), _options_of(options)
    tables = {name: read_record(values.pop(name), dict, f"{file}: {name}") for name in CONFIGURED if name in values}
    shared, table = ({key.replace("-", "_"): raw[key] for key in raw} for raw in (values, tables.get(verb, {})))
    if strange := shared.keys() - known.keys():
        others = {name for other in CONFIGURED for name in _options_of(load(other))}
        shared = {name: value for name, value in shared.items() if name in known or name not in strange & others}
    fields = [(name, kind, None) for name, (kind, _) in known.items()]
    read_record(shared | table, msgspec.defstruct(verb, fields, forbid_unknown_fields=True), str(file))
    typed = {word.partition("=")[0].replace("_", "-") for word in words}
    for name, value in (shared | table).items():
        option = f"--{name.replace('_', '-')}"
        if known[name][1]:
            words = words if _has_bare(words, known) else [value, *words]
        elif option not in typed and value is not False:
            several = [option, *map(str, value)] if isinstance(value, list) else [f"{option}={value}"]
            words += [option] if value is True else several
    return first + words


def names_of(options: Any) -> list[str]:
    """The options of a verb, and the first words of a union."""
    named = (name for name, (_, bare) in _options_of(options).items() if not bare)
    return [*_members(options), *(f"--{name.replace('_', '-')}" for name in named)]


def _members(options: Any) -> dict[str, Any]:
    """The classes of a union of options, by the words that choose them."""
    return {marks[-1].name: kind for kind, *marks in map(get_args, get_args(options))}


def _has_bare(words: Sequence[str], known: dict[str, tuple[Any, bool]]) -> bool:
    """Whether a word is neither an option nor its value."""
    values = 0.0  # of the last option, still to come
    for word in words:
        kind = str(known.get(word[2:].replace("-", "_"), ("bool",))[0])
        if not word.startswith("--") and not values:
            return True
        values = values - 1 if not word.startswith("--") else math.inf if "tuple" in kind else "bool" not in kind
    return False


def _options_of(options: Any) -> dict[str, tuple[Any, bool]]:
    """The type of each option, as a file has it, and whether it is a word without a name."""
    kinds = dict[str, tuple[Any, bool]]()
    if members := _members(options):
        return {name: kind for member in members.values() for name, kind in _options_of(member).items()}
    for name, hint in get_type_hints(options, include_extras=True).items():
        kind, *marks = get_args(hint) if get_origin(hint) is Annotated else [hint]
        if is_dataclass(kind) or (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
            kinds |= _options_of(kind)
        elif name != "config":
            kinds[name] = (str if Path in (kind, *get_args(kind)) else hint), _POSITIONAL in marks
    return kinds


def read_token(file: Path | None) -> str | None:
    """The token from a file, else from SPECACT_TOKEN, else None; ConfigError if the file cannot be read.

    It is never an option itself, because other users of the machine can read command lines.
    """
    if file is None:
        return os.environ.get("SPECACT_TOKEN") or None
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read a token from {file}: {error}") from None
