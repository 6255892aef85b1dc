"""Hardware profiles: those of the package, their reasons, and files of one's own."""

from pathlib import Path

import numpy as np
import pytest
from tests.lab.tised import published

from specact.errors import ConfigError
from specact.lab.tised.hardware import HardwareProfile, load_hardware, named_hardware


def test_the_profiles_of_the_package() -> None:
    profiles = named_hardware()
    assert len(profiles) >= 5 and profiles["this-machine"].kappa == 1.0
    for name, profile in profiles.items():
        assert profile == load_hardware(name)
        assert profile.about.split(":")[0] in ("measured", "derived", "chosen")


def test_the_derived_ratios_follow_from_the_published_tables() -> None:
    """Latency on the AGX, with N and the rest of a chunk as on the RTX 4070; see the file."""
    ratios = []
    for steps, inference in published.PI05_INFERENCE_S.items():
        known = published.PI05[steps]
        agx_s = published.PI05_TASK_S["AGX 50 W"][published.PI05_STEPS.index(steps)]
        ratios.append((agx_s / known.chunks - (known.chunk_s - inference)) / inference)
    assert ratios == pytest.approx([13.3, 9.5, 9.7], abs=0.06)
    assert load_hardware("agx-50w").kappa == pytest.approx(float(np.median(ratios)), abs=0.05)
    assert load_hardware("vla-rtx-4070").kappa * 0.004 == pytest.approx(published.PI05_INFERENCE_S[10], rel=0.01)
    line = np.polyfit(list(published.PI05_INFERENCE_S), list(published.PI05_INFERENCE_S.values()), 1)
    ratios = [float(delay_s / np.polyval(line, steps)) for steps, delay_s in published.UR5E_DELAY_S.items()]
    assert load_hardware("agx-30w").kappa == pytest.approx(np.sqrt(np.prod(ratios)), abs=0.06)
    assert load_hardware("agx-15w").kappa == pytest.approx(np.sqrt(np.prod(published.AGX_15W_OVER_RTX_4070)), abs=0.05)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[board]\nkappa = 3\nabout = "measured: our board"\n')
    board = HardwareProfile("board", 3.0, "measured: our board")
    assert load_hardware(str(path)) == load_hardware(f"{path}:board") == board
    path.write_text(path.read_text() + '[rack]\nkappa = 0.25\nabout = "chosen"\n')
    assert load_hardware(f"{path}:rack").kappa == 0.25
    for name, named in ((str(path), "rack"), (f"{path}:rock", "rack"), ("agx-30", "agx-30w"), ("no.toml", "no.toml")):
        with pytest.raises(ConfigError, match=named):
            load_hardware(name)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "profile"), ("[a", "TOML"), ("a = 1", "a"), ("[a]\nkappa = 1", "about"),
        ('[a]\nkapa = 1\nabout = ""', "kappa"), ('[a]\nkappa = true\nabout = ""', "kappa"),
        ('[a]\nkappa = 0\nabout = ""', "kappa"), ('[a]\nkappa = inf\nabout = ""', "inf"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=named):
        load_hardware(str(path))
