"""Hardware profiles: a factor kappa by which measured latencies are scaled to emulate another platform."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specact.errors import ConfigError, unknown_name
from specact.records import Positive, Record, read_toml


@dataclass(frozen=True)
class HardwareProfile:
    """An emulated platform.

    Attributes:
        name: its name in the file.
        kappa: its latency divided by that of the machine on which latency is measured, > 0.
        about: description, and whether kappa is measured, derived or chosen.
    """

    name: str
    kappa: float
    about: str


class _Profile(Record, frozen=True):
    """The table of a profile in a file."""

    kappa: Positive
    about: str


def load_hardware(name: str) -> HardwareProfile:
    """Loads a profile.

    Args:
        name: one of :func:`named_hardware`; ``PATH.toml:NAME`` for a profile in a file; ``PATH.toml`` for a file with
            one profile.

    Raises:
        ConfigError: for an unknown name, or a file that cannot be used.
    """
    path, _, chosen = (name, "", "") if name.endswith(".toml") else name.rpartition(":")
    profiles = _read(Path(path)) if path else named_hardware()
    if not chosen:
        if len(profiles) != 1:
            names = ", ".join(sorted(profiles))
            raise ConfigError(f"{name} has {len(profiles)} profiles; choose one with {name}:NAME, NAME one of {names}")
        return next(iter(profiles.values()))
    if chosen not in profiles:
        raise unknown_name("hardware", chosen, profiles)
    return profiles[chosen]


def named_hardware() -> dict[str, HardwareProfile]:
    """The built-in profiles by name."""
    return _read(Path(__file__).with_name("hardware.toml"))


def _read(path: Path) -> dict[str, HardwareProfile]:
    tables = read_toml(path, dict[str, _Profile], "hardware profiles")
    if not tables:
        raise ConfigError(f"{path} has no hardware profile; a profile is a table [NAME] with kappa and about")
    return {name: HardwareProfile(name, table.kappa, table.about) for name, table in tables.items()}
