"""Emulation of a slower device: limits a process to a share of one core with the kernel's CPU bandwidth control."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from specact.errors import ConfigError
from specact.records import PositiveShare, check_arguments

# Short, so that a control period of 20 ms spans several: a process is throttled once it has used a period's share.
_PERIOD_US = 5_000
_LEAST_US = 1_000  # the kernel's
_MOUNTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/cpu"))


@contextmanager
def device_share(share: PositiveShare | None) -> Iterator[None]:
    """Limits this process and its future children together to a share of one core.

    This slows everything, not only networks: reading observations, messages, Python. Processes that were started
    before, such as a simulated world, are not limited.

    Args:
        share: of one core, above 0 and at most 1; None for no limit.

    Raises:
        ConfigError: for another share, or where this process may not create control groups (or is not on Linux).
    """
    if share is None:
        yield
        return
    check_arguments(device_share, {"share": share})
    group = _group(share)
    try:
        yield
    finally:
        with suppress(OSError):
            (group.parent / "cgroup.procs").write_text(str(os.getpid()))
            group.rmdir()


def _group(share: float) -> Path:
    """Makes a control group with this share, of version 2 or 1, and enters it."""
    period_us = max(_PERIOD_US, round(_LEAST_US / share))
    quota_us = max(_LEAST_US, round(share * period_us))
    # Maximum weight: other processes must not take from the share.
    limits: tuple[dict[str, object], ...] = (
        {"cpu.max": f"{quota_us} {period_us}", "cpu.weight": 10_000},
        {"cpu.cfs_period_us": period_us, "cpu.cfs_quota_us": quota_us, "cpu.shares": 262_144},
    )
    reasons = []
    for mount, files in zip(_MOUNTS, limits, strict=True):
        group = mount / f"specact-{os.getpid()}"
        try:
            group.mkdir()
        except OSError as error:
            reasons.append(f"{mount}: {error.strerror}")
            continue
        try:
            for name, value in files.items():
                if not (group / name).exists():
                    raise FileNotFoundError(2, f"no {name}")
                (group / name).write_text(str(value))
            (group / "cgroup.procs").write_text(str(os.getpid()))
            return group
        except OSError as error:
            reasons.append(f"{mount}: {error.strerror}")
            with suppress(OSError):
                group.rmdir()
    raise ConfigError(
        "--device-share needs Linux and the right to make control groups for the processor, which this machine does "
        f"not give ({'; '.join(reasons)}); run as root, or leave it out"
    )
