"""Hardware as a factor on latency: measured here, times kappa, stands for another platform on the same task."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from specact.errors import ConfigError, unknown_name

_FILE = "hardware.toml"


@dataclass(frozen=True)
class HardwareProfile:
    """A platform.

    Attributes:
        name: as in its file.
        kappa: > 0, its latency over that of the machine on which latency was measured.
        about: what it stands for, and whether kappa is measured, derived or chosen.
    """

    name: str
    kappa: float
    about: str

    def __post_init__(self) -> None:
        if not 0.0 < self.kappa < float("inf"):
            raise ConfigError(f"kappa of the hardware {self.name!r} must be positive and finite, got {self.kappa}")


def load_hardware(name: str) -> HardwareProfile:
    """A profile by name, or from a file.

    Args:
        name: one of :func:`named_hardware`; ``PATH.toml:NAME`` for one of a file's; ``PATH.toml`` for its only one.

    Raises:
        ConfigError: for an unknown name, or a file that cannot be used.
    """
    path, toml, chosen = name.rpartition(".toml")
    if not toml:
        return _one(named_hardware(), name)
    profiles = _read(Path(path + toml))
    if chosen:
        return _one(profiles, chosen.removeprefix(":"))
    if len(profiles) != 1:
        raise ConfigError(
            f"{name} has {len(profiles)} profiles; choose one with {name}:NAME, NAME one of {_list(profiles)}"
        )
    return next(iter(profiles.values()))


def named_hardware() -> dict[str, HardwareProfile]:
    """The profiles that come with the package, by name."""
    return _profiles(resources.files("specact.tised").joinpath(_FILE).read_text(), _FILE)


def _read(path: Path) -> dict[str, HardwareProfile]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read hardware profiles from {path}: {error}") from error
    return _profiles(text, str(path))


def _profiles(text: str, source: str) -> dict[str, HardwareProfile]:
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not valid TOML: {error}") from error
    if not found:
        raise ConfigError(f"{source} has no hardware profile; a profile is a table [NAME] with kappa and about")
    return {name: _profile(name, table, source) for name, table in found.items()}


def _profile(name: str, table: Any, source: str) -> HardwareProfile:
    allowed = {"kappa", "about"}
    if not isinstance(table, dict) or set(table) != allowed:
        got = ", ".join(table) if isinstance(table, dict) else repr(table)
        raise ConfigError(f"hardware {name!r} in {source} needs exactly kappa and about, got: {got}")
    kappa, about = table["kappa"], table["about"]
    if isinstance(kappa, bool) or not isinstance(kappa, int | float) or not isinstance(about, str):
        raise ConfigError(
            f"hardware {name!r} in {source}: kappa must be a number and about a string, got {kappa!r} and {about!r}"
        )
    return HardwareProfile(name, float(kappa), about)


def _one(profiles: dict[str, HardwareProfile], name: str) -> HardwareProfile:
    if name not in profiles:
        raise unknown_name("hardware", name, profiles)
    return profiles[name]


def _list(profiles: dict[str, HardwareProfile]) -> str:
    return ", ".join(sorted(profiles))
