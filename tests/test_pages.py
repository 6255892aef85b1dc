"""Each page is followed, command by command, as somebody would who reads it; and so is the reader itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.lab.envs.demonstrations import DATA
from tests.pages import ROOT, THIRD_PARTY, Block, blocks, follow, pages

pytestmark = pytest.mark.nightly

FOLLOWED = [page for page in pages() if any(block.language == "sh" for block in blocks(page))]


def own_gates(folder: Path) -> None:
    """A gate of one's own is calibrated, with its options, and evaluated like any other."""
    calibrations = {path.name: json.loads(path.read_text()) for path in folder.rglob("calibration/my_gate.*.json")}
    assert [["worst", True]] in [stored["settings"]["options"] for stored in calibrations.values()]
    assert len(calibrations) == 2 and list(folder.rglob("steps/my_gate.Bend"))


def own_families(folder: Path) -> None:
    """So is a family, by its own gate too; what is skipped there is not what the target would have done."""
    assert (folder / "my_family.pair/calibration/my_family.Nearness-0.50.json").is_file()
    (place,) = folder.rglob("summary.json")
    methods = json.loads(place.read_text())["methods"]
    assert methods["draft"]["sent"] == 0.0 < methods["adahi"]["sent"] < 1.0
    assert methods["hybrid"]["sent"] == 1.0 and methods["draft"]["action_change_loss"] > 0.0


# What holds in a page's folder at its end.
HOLDS: dict[str, Callable[[Path], None]] = {"how-to/gate": own_gates, "how-to/family": own_families}


def name(page: Path) -> str:
    return page.relative_to(ROOT).with_suffix("").as_posix().removeprefix("docs/")


@pytest.mark.parametrize("page", FOLLOWED, ids=name)
def test_a_page_is_followed(page: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    steps = [block for block in blocks(page) if block.reason is None]
    # Files of other pages, which this one names.
    before = [
        Block(path.name, "", path.read_text(), None)
        for path in THIRD_PARTY.iterdir()
        if path.is_file() and f"`{path.name}`" in page.read_text()
    ]
    left_out = follow(before + steps, tmp_path / "reader", environment, DATA if DATA.exists() else None)
    if left_out:
        pytest.skip(f"all but what needs demonstrations, which are not at {DATA} (SPECACT_DATA): {left_out}")
    if (holds := HOLDS.get(name(page))) is not None:
        holds(tmp_path / "reader")


def test_the_files_of_pages_are_those_of_the_third_party() -> None:
    shown = {block.file: block.text for page in pages() for block in blocks(page) if block.file}
    files = {path.name: path.read_text() for path in THIRD_PARTY.iterdir() if path.is_file()}
    assert {file: shown.get(file) for file in files} == files


PAGE = """
`my_file.txt`:

```text
ball 8600
```

```sh not-run="needs a robot"
false
```

```sh
specact serve "$(cut -d ' ' -f 1 my_file.txt)"      # in a terminal
specact doctor ball --server ws://127.0.0.1:8600 --requests 3
for gate in always never; do
    specact run ball --gate $gate --episodes 1 \\
        --stop-action 0 0
done
specact serve ball-chase-flow
```

```python
import specact

with specact.connect("ws://127.0.0.1:8600", deadline_ms=60_000.0) as target:
    assert target.spec.chunk == 16
```
"""


def test_a_reader_does_what_a_page_says(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    steps = [block for block in blocks(tmp_path / "page.md") if block.reason is None]
    assert follow(steps, tmp_path / "reader", environment) == []
    assert (tmp_path / "reader/my_file.txt").read_text() == "ball 8600\n"
    wrong = [Block(None, "sh", "specact serve ball\nspecact serve balk\n", None)]
    with pytest.raises(AssertionError, match=r"unknown bundle 'balk'"):
        follow(wrong, tmp_path / "wrong", environment)
    needs_data = [Block(None, "sh", "ls path/to/demonstrations\n", None)]
    assert follow(needs_data, tmp_path / "without", environment) == ["ls path/to/demonstrations\n"]
