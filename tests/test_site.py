"""The documentation site: the strict build passes, nothing comes from outside, nothing that is public is missing."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from tests.browser import running_browser
from tests.children import wait_for
from tests.test_public_api import FACES

from specact import __version__
from specact.cli.main import VERBS

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[1]
# What a browser fetches by itself. A link is followed by a reader.
FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "object": "data"}
OUTSIDE = re.compile(r"^(https?:)?//")


def mkdocs(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    (folder / "0.0.9").mkdir()
    (folder / "0.0.9" / "index.html").write_text("an earlier version")
    done = mkdocs("-m", "mkdocs", "build", "--strict", "--site-dir", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / __version__


class Read(HTMLParser):
    """What a page is made of: its anchors, links, fetched addresses and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors, self.links, self.fetched, self.styles = set[str](), set[str](), set[str](), list[str]()
        self._style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        said = {name: value or "" for name, value in attributes}
        self.anchors.add(said.get("id", ""))
        self._style = tag == "style"
        self.styles.append(said.get("style", ""))
        if tag == "a" and "href" in said:
            self.links.add(said["href"])
        # A canonical address would only name the page.
        if tag in FETCHED and FETCHED[tag] in said and said.get("rel") != "canonical":
            self.fetched.add(said[FETCHED[tag]])
        self.fetched.update(part.split()[0] for part in said.get("srcset", "").split(",") if part.strip())

    def handle_data(self, data: str) -> None:
        if self._style:
            self.styles.append(data)


@cache
def read(page: Path) -> Read:
    return Read(page.read_text(encoding="utf-8"))


def pages(site: Path) -> Iterator[Path]:
    # The page for missing addresses is for servers: its own addresses begin with a slash.
    return (page for page in site.rglob("*.html") if page.name != "404.html")


def test_every_link_within_the_site_leads_to_a_file_and_a_place_in_it(site: Path) -> None:
    lost = []
    for page in pages(site):
        for target in read(page).links | read(page).fetched:
            path, _, anchor = target.partition("#")
            if re.match(r"\w+:|//", target):
                continue
            file = (page.parent / unquote(path)).resolve() if path else page
            placed = file.suffix != ".html" or not anchor or not file.is_file()
            if not file.is_file() or not (placed or unquote(anchor) in read(file).anchors):
                lost.append(f"{page.relative_to(site)}: {target}")
    assert lost == []


def test_nothing_is_loaded_from_outside(site: Path) -> None:
    outside = [address for page in site.rglob("*.html") for address in read(page).fetched if OUTSIDE.match(address)]
    assert outside == []
    styles = [path.read_text(encoding="utf-8") for path in site.rglob("*.css")]
    styles += [style for page in pages(site) for style in read(page).styles]
    loaded = [address for style in styles for address in re.findall(r"(?:url\(|@import)\s*['\"]?([^'\")\s]+)", style)]
    assert [address for address in loaded if OUTSIDE.match(address)] == []
    # The theme's script would load what draws diagrams where a page has one, and figures of a repository that is named.
    hosts = {
        host for path in site.rglob("*.js") if "search_index" not in path.name
        for host in re.findall(r"[\"'`]https?://([\w.-]+)", path.read_text(encoding="utf-8"))
    }  # fmt: skip
    assert hosts <= {"unpkg.com", "api.github.com", "www.w3.org"}
    text = "".join(page.read_text(encoding="utf-8") for page in pages(site))
    assert 'class="mermaid"' not in text and 'data-md-component="source"' not in text


def test_a_reader_without_a_network_finds_something_in_a_file(site: Path) -> None:
    with running_browser(1300) as browser:
        for page in (
            "../index.html",
            "explain/concepts.html",
            "reference/specact.gates.html",
            "reference/commands.html",
        ):
            browser.open(site / page)
            wait_for(lambda: __version__ in browser.text(".md-version"), "the page shows its version")
        # Typed, not filled in: the page looks at what is there after each key.
        browser.page.locator("input[name=query]").press_sequentially("deadline")
        wait_for(lambda: browser.page.locator(".md-search-result__item").count() > 3, "search results")
        assert browser.complaints == []
        assert [address for address in browser.requests if not address.startswith("file:")] == []


# What of a page reaches beyond a screen so wide and cannot be scrolled to by itself, as tables and code can.
BEYOND = """(width) => {
  const scrolls = (node) =>
    node && (/auto|scroll/.test(getComputedStyle(node).overflowX) || scrolls(node.parentElement))
  const beyond = [...document.querySelectorAll(".md-content *, body > section *")].filter(
    (node) => node.getBoundingClientRect().right > width + 1 && !scrolls(node))
  const page = document.documentElement.scrollWidth
  return [...beyond.map((node) => node.outerHTML.slice(0, 80)), ...(page > width ? [`${page} px`] : [])]
}"""


@pytest.mark.parametrize("width", [400, 1400])
def test_no_page_is_wider_than_its_screen(site: Path, width: int) -> None:
    with running_browser(width) as browser:
        wide = []
        for page in pages(site):
            browser.open(page)
            wide += [f"{page.relative_to(site)}: {element}" for element in browser.page.evaluate(BEYOND, width)]
    assert wide == []


def test_versions_are_listed_and_the_newest_is_what_one_sees(site: Path) -> None:
    listed = json.loads((site.parent / "versions.json").read_text())
    assert [(row["version"], row["aliases"]) for row in listed] == [(__version__, ["latest"]), ("0.0.9", [])]
    assert f"url={__version__}/index.html" in (site.parent / "index.html").read_text()


def test_links_out_of_docs_lead_to_pages(site: Path) -> None:
    assert "architecture.html" in read(site / "develop/contributing.html").links
    assert "../index.html" in read(site / "develop/architecture.html").links
    # Files that no page includes are shown as they are.
    assert "../source/src/specact/policy.py.html" in read(site / "explain/concepts.html").links
    source = (site / "source/src/specact/policy.py.html").read_text(encoding="utf-8")
    assert "class SpeculativePolicy" in re.sub(r"<[^>]+>", "", source)
    assert "server/serve.py.html" in read(site / "source/src/specact/server.html").links


@pytest.mark.parametrize("face", FACES)
def test_every_public_name_has_its_place_in_the_reference(site: Path, face: str) -> None:
    names = importlib.import_module(face).__all__
    anchors = read(site / "reference" / f"{face}.html").anchors
    # A module that a package exports has a page of its own.
    pages = {page.stem.rpartition(".")[2] for page in (site / "reference").glob("*.html")}
    assert [name for name in names if f"{face}.{name}" not in anchors and name not in pages] == []


def test_every_command_has_its_place_in_the_reference(site: Path) -> None:
    page = site / "reference" / "commands.html"
    wanted = {f"specact-{verb}" for verb in (*VERBS, "tised-sweep", "data-info")}
    assert wanted <= read(page).anchors
    assert "--max-consecutive-misses" in page.read_text(encoding="utf-8")


def test_no_markup_is_left_over(site: Path) -> None:
    for page in pages(site):
        text = page.read_text(encoding="utf-8")
        if "<article" not in text or "source" in page.relative_to(site).parts:
            continue
        article = text[text.index("<article") : text.index("</article>")]
        text = re.sub(r"<(pre|code)\b.*?</\1>", "", article, flags=re.DOTALL)
        left = re.findall(r":(?:class|func|meth|mod|attr|data):|<autoref|&lt;autoref|```|\]\(|\"included\"", text)
        assert not left, page.name
