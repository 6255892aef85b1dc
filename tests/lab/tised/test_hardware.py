"""Hardware profiles: those of the package, their reasons, and files of one's own."""

from pathlib import Path

import numpy as np
import pytest
from tests.lab.tised.published import (
    AGX_15W_OVER_RTX_4070,
    PI05,
    PI05_INFERENCE_S,
    PI05_STEPS,
    PI05_TASK_S,
    UR5E_DELAY_S,
)

from specact.errors import ConfigError
from specact.lab.tised.hardware import HardwareProfile, load_hardware, named_hardware


def test_the_profiles_of_the_package() -> None:
    profiles = named_hardware()
    assert len(profiles) >= 5
    assert profiles["this-machine"].kappa == 1.0
    for name, profile in profiles.items():
        assert profile == load_hardware(name)
        assert profile.about.split(":")[0] in ("measured", "derived", "chosen")


def test_the_derived_ratio_follows_from_the_published_tables() -> None:
    """Latency on the AGX, with N and the rest of a chunk as on the RTX 4070; see the file."""
    ratios = []
    for steps, inference in PI05_INFERENCE_S.items():
        known = PI05[steps]
        agx_s = PI05_TASK_S["AGX 50 W"][PI05_STEPS.index(steps)]
        ratios.append((agx_s / known.chunks - (known.chunk_s - inference)) / inference)
    assert ratios == pytest.approx([13.3, 9.5, 9.7], abs=0.06)
    assert load_hardware("agx-50w").kappa == pytest.approx(float(np.median(ratios)), abs=0.05)
    assert load_hardware("vla-rtx-4070").kappa * 0.004 == pytest.approx(PI05_INFERENCE_S[10], rel=0.01)


def test_the_power_modes_with_published_latencies_have_factors_within_them() -> None:
    line = np.polyfit(list(PI05_INFERENCE_S), list(PI05_INFERENCE_S.values()), 1)
    ratios = [delay_s / np.polyval(line, steps) for steps, delay_s in UR5E_DELAY_S.items()]
    assert sorted(ratios) == pytest.approx([2.4, 3.4], abs=0.06)
    assert load_hardware("agx-30w").kappa == pytest.approx(np.sqrt(np.prod(ratios)), abs=0.06)
    assert load_hardware("agx-15w").kappa == pytest.approx(np.sqrt(np.prod(AGX_15W_OVER_RTX_4070)), abs=0.05)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[board]\nkappa = 3\nabout = "measured: our board"\n')
    board = HardwareProfile("board", 3.0, "measured: our board")
    assert load_hardware(str(path)) == load_hardware(f"{path}:board") == board
    path.write_text(path.read_text() + '[rack]\nkappa = 0.25\nabout = "chosen"\n')
    assert load_hardware(f"{path}:rack").kappa == 0.25
    with pytest.raises(ConfigError, match=r"2 profiles; choose one with.*board, rack"):
        load_hardware(str(path))
    with pytest.raises(ConfigError, match="unknown hardware 'rock'; did you mean 'rack'"):
        load_hardware(f"{path}:rock")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no hardware profile"),
        ("[a", "not valid TOML"),
        ("a = 1", "a must be a table"),
        ("[a]\nkappa = 1", "has no 'about'"),
        ('[a]\nkapa = 1\nabout = ""', "'kapa'; did you mean 'kappa'"),
        ('[a]\nkappa = "fast"\nabout = ""', "kappa must be a number"),
        ('[a]\nkappa = true\nabout = ""', "kappa must be a number"),
        ('[a]\nkappa = 0\nabout = ""', "a.kappa must be"),
        ('[a]\nkappa = inf\nabout = ""', "finite number, got inf"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_hardware(str(path))


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'agx-30w'"):
        load_hardware("agx-30")
    with pytest.raises(ConfigError, match=r"unknown hardware 'mine\.tomlboard'"):
        load_hardware("mine.tomlboard")
    with pytest.raises(ConfigError, match=r"cannot read the hardware profiles .*No such file"):
        load_hardware(str(tmp_path / "none.toml"))
