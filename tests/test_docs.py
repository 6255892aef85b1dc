"""README and docs: links lead somewhere, tables have both their marks, and every command shown is one."""

import re
import shlex
from pathlib import Path

import pytest
from tests.pages import ROOT, blocks, commands, pages

from specact import __version__
from specact.cli import main as cli
from specact.errors import ConfigError
from specact.links.link import _MODIFIERS, LINKS

PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "pretrained/README")),
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "results"),
]
USERS = [page for page in PAGES if page in pages() or page.name in ("CONTRIBUTING.md", "SECURITY.md")]
REPORTS = sorted((ROOT / "docs" / "results").glob("*.md"))


def called(page: Path) -> list[str]:
    """What its scripts call of specact, run or not, and what tables have in a column of commands."""
    scripts = [block.text for block in blocks(page) if block.language in ("", "sh") and block.file is None]
    return [shlex.join(words) for text in scripts for words in commands(text)] + _in_tables(page)


def _in_tables(page: Path) -> list[str]:
    """The first command of each row, in tables with a column ``command``."""
    commands, column = list[str](), None
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            column = None
        elif column is None:
            column = cells.index("command") if "command" in cells else -1
        elif column >= 0 and (command := re.match("`(specact .+?)`", cells[column])):
            commands.append(command[1])
    return commands


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def parse(line: str) -> None:
    """Reads a command as ``specact`` would, and runs nothing."""
    try:
        cli.parse(shlex.split(line, comments=True)[1:])
    except ConfigError as error:  # settings load what they name, and a reader's own modules are not here
        assert "there is no module 'my_" in str(error)


@pytest.mark.parametrize("page", PAGES + REPORTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", _without_code(page.read_text(encoding="utf-8")))
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES + REPORTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_tests_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text(encoding="utf-8"))
    missing = [f"{file}::{test}" for file, test in named if f"def {test}" not in (ROOT / file).read_text()]
    assert missing == []
    assert named or page.name != "SECURITY.md"


def test_the_citation_is_of_this_version() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize("line", sorted({line for page in PAGES for line in called(page)}))
def test_commands_are_read_by_the_command_line(line: str) -> None:
    parse(line)


def test_pages_are_short() -> None:
    counts = {str(page): len(page.read_text().split()) for page in USERS if page.name != "README.md"}
    assert sum(counts.values()) <= 20_000, counts


def test_the_readme_is_short_and_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 700 and len(text.splitlines()) <= 120
    (example,) = re.findall(
        r"^```python\n((?:(?!```).)*?print\(action.round.*?)^```\n\n```text\n(.*?)^```$", text, re.S | re.M
    )
    exec(example[0], {})
    assert capsys.readouterr().out == example[1]


@pytest.mark.parametrize("page", REPORTS, ids=lambda page: page.name)
def test_reports_are_short(page: Path) -> None:
    """Their prose: tables, code, captions and numbers are looked up, not read."""
    said = _without_code(page.read_text(encoding="utf-8"))
    text = re.sub(r"^(\||!\[|\*[^*]).*$|<!--.*?-->|`.+?`", "", said, flags=re.MULTILINE)
    assert len(re.findall(r"[^\s]*[a-z][^\s]*", text)) <= (900 if page.name == "index.md" else 600)


def test_the_page_on_links_has_every_name_and_number() -> None:
    page = (ROOT / "docs/how-to/links.md").read_text(encoding="utf-8")
    rows = {cells[1].strip(" `"): cells for line in page.splitlines() if len(cells := line.split("|")) > 3}
    for name, link in LINKS.items():
        numbers = [float(number) for number in re.findall(r"[\d.]+", rows[name][2] + rows[name][3])]
        assert numbers == [link.rtt_ms, link.jitter_ms, *sorted({link.up_mbit_s, link.down_mbit_s})], name
    assert set(_MODIFIERS) <= set(rows)
