"""A file of names and tokens, one robot per line."""

from __future__ import annotations

from pathlib import Path

from specact.errors import ConfigError

SHORTEST_TOKEN = 16
_LONGEST_NAME, _MOST = 64, 10_000


def check_token(token: str) -> None:
    """Raises for a token that is too short, or that no device could send.

    Raises:
        ConfigError: if it has fewer than 16 characters, or others than printable ASCII.
    """
    if len(token) < SHORTEST_TOKEN:
        raise ConfigError(f"a token needs at least {SHORTEST_TOKEN} characters, this one has {len(token)}")
    if not (token.isascii() and token.isprintable()):
        raise ConfigError("a token must be one line of printable ASCII")


def read_tokens(file: Path) -> dict[str, str]:
    """Token by name.

    A line holds a name, white space, and the name's token; empty lines and those that begin with ``#`` are skipped.

    Raises:
        ConfigError: if the file cannot be read, or a line is not of this form, or a name or token occurs twice; the
            message never holds a token.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read tokens from {file}: {error}") from None
    found: dict[str, str] = {}
    taken: set[str] = set()
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            if len(words) != 2:
                raise ConfigError("a line must hold a name and its token, separated by a space")
            name, token = words
            if len(name) > _LONGEST_NAME or not name.isprintable():
                raise ConfigError(f"a name must have at most {_LONGEST_NAME} printable characters")
            check_token(token)
            if name in found:
                raise ConfigError(f"the name {name} occurs twice; give each robot its own line")
            if token in taken:
                raise ConfigError(f"the token of {name} is already used by another robot; give each robot its own")
        except ConfigError as error:
            raise ConfigError(f"{file}, line {number}: {error}") from None
        found[name] = token
        taken.add(token)
    if not 0 < len(found) <= _MOST:
        raise ConfigError(f"{file} holds {len(found)} tokens; it needs between 1 and {_MOST}")
    return found
