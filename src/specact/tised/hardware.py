"""Hardware profiles: a factor kappa by which measured latencies are scaled to emulate another platform."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specact.errors import ConfigError, unknown_name
from specact.toml import build, read_toml


@dataclass(frozen=True)
class HardwareProfile:
    """An emulated platform.

    Attributes:
        name: its name in the file.
        kappa: its latency divided by that of the machine on which latency is measured, > 0.
        about: description, and whether kappa is measured, derived or chosen.

    Raises:
        ConfigError: for a kappa that is not positive and finite.
    """

    name: str
    kappa: float
    about: str

    def __post_init__(self) -> None:
        if not 0.0 < self.kappa < float("inf"):
            raise ConfigError(f"kappa of the hardware {self.name!r} must be positive and finite, got {self.kappa}")


@dataclass(frozen=True)
class _Profile:
    """The table of a profile in a file."""

    kappa: float
    about: str


def load_hardware(name: str) -> HardwareProfile:
    """Loads a profile.

    Args:
        name: one of :func:`named_hardware`; ``PATH.toml:NAME`` for a profile in a file; ``PATH.toml`` for a file with
            one profile.

    Raises:
        ConfigError: for an unknown name, or a file that cannot be used.
    """
    path, colon, chosen = (name, "", "") if name.endswith(".toml") else name.rpartition(":")
    if not path:
        return _find(named_hardware(), name)
    profiles = _read(Path(path))
    if colon:
        return _find(profiles, chosen)
    if len(profiles) != 1:
        raise ConfigError(
            f"{name} has {len(profiles)} profiles; choose one with {name}:NAME, NAME one of {_list(profiles)}"
        )
    return next(iter(profiles.values()))


def named_hardware() -> dict[str, HardwareProfile]:
    """The built-in profiles by name."""
    return _read(Path(__file__).with_name("hardware.toml"))


def _read(path: Path) -> dict[str, HardwareProfile]:
    tables = read_toml(path, "hardware profiles")
    if not tables:
        raise ConfigError(f"{path} has no hardware profile; a profile is a table [NAME] with kappa and about")
    try:
        entries = {name: build(_Profile, table, "hardware profiles", name) for name, table in tables.items()}
        return {name: HardwareProfile(name, float(entry.kappa), entry.about) for name, entry in entries.items()}
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _find(profiles: dict[str, HardwareProfile], name: str) -> HardwareProfile:
    if name not in profiles:
        raise unknown_name("hardware", name, profiles)
    return profiles[name]


def _list(profiles: dict[str, HardwareProfile]) -> str:
    return ", ".join(sorted(profiles))
