"""Hardware profiles: those of the package, and files of one's own."""

from pathlib import Path

import pytest

from specact.errors import ConfigError
from specact.lab.tised.sweep import HardwareProfile, load_hardware, named_hardware


def test_profiles_of_the_package_and_of_a_file_of_ones_own(tmp_path: Path) -> None:
    assert load_hardware("this-machine")[1].kappa == 1.0
    assert all(each.about.split(":")[0] in ("measured", "derived", "chosen") for each in named_hardware().values())
    path = tmp_path / "mine.toml"
    path.write_text('[board]\nkappa = 3\nabout = "measured: our board"\n')
    board = "board", HardwareProfile(3.0, "measured: our board")
    assert load_hardware(str(path)) == load_hardware(f"{path}:board") == board
    path.write_text(path.read_text() + '[rack]\nkappa = 0.25\nabout = "chosen"\n')
    assert load_hardware(f"{path}:rack")[1].kappa == 0.25
    for name, named in ((str(path), "rack"), (f"{path}:rock", "rack"), ("agx-30", "agx-30w"), ("no.toml", "no.toml")):
        with pytest.raises(ConfigError, match=named):
            load_hardware(name)


@pytest.mark.parametrize(
    ("text", "named"),
    [("", "profile"), ('[a]\nkapa = 1\nabout = ""', "kappa"), ('[a]\nkappa = 0\nabout = ""', "kappa")],
)
def test_a_damaged_file_is_refused(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=named):
        load_hardware(str(path))
