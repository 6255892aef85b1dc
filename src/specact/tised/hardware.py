"""Hardware as a factor on latency: measured here, times kappa, stands for another platform on the same task."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specact.errors import ConfigError, unknown_name
from specact.toml import build, read_toml


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


@dataclass(frozen=True)
class _Profile:
    """What a file says of a platform."""

    kappa: float
    about: str


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
    return _read(Path(__file__).with_name("hardware.toml"))


def _read(path: Path) -> dict[str, HardwareProfile]:
    tables = read_toml(path, "hardware profiles")
    if not tables:
        raise ConfigError(f"{path} has no hardware profile; a profile is a table [NAME] with kappa and about")
    try:
        found = {name: build(_Profile, table, "hardware profiles", name) for name, table in tables.items()}
        return {name: HardwareProfile(name, float(said.kappa), said.about) for name, said in found.items()}
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _one(profiles: dict[str, HardwareProfile], name: str) -> HardwareProfile:
    if name not in profiles:
        raise unknown_name("hardware", name, profiles)
    return profiles[name]


def _list(profiles: dict[str, HardwareProfile]) -> str:
    return ", ".join(sorted(profiles))
