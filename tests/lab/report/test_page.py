"""The report as a person meets it: in a real browser, on a screen and on a phone."""

from __future__ import annotations

import base64
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
import pytest

from specact.files import write_json
from specact.lab.report.report import Written, write_report
from specact.lab.report.runs import find_runs

if TYPE_CHECKING:
    from tests.browser import Browser

HOSTILE = '</script><script>document.title = "broken"</script><img src=x onerror=alert(1)>"&$title'


@pytest.fixture(scope="module")
def filmed(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A report with a film; skipped where nothing can be drawn."""
    folder = tmp_path_factory.mktemp("filmed")
    shutil.copytree(runs / "table", folder / "table")
    written = write_report([folder], folder / "report.html", folder / "files", lambda *_: None)
    for gap in written.missing["ball"]:
        if "cannot draw" in gap.what:
            pytest.skip(gap.what)
    return written


def measured_in_its_own_font(browser: Browser) -> None:
    """Figures are laid out in Matplotlib's own font and shown in the reader's, which is another one on each machine."""
    font = base64.b64encode(Path(mpl.get_data_path(), "fonts/ttf/DejaVuSans.ttf").read_bytes()).decode()
    loaded = browser.evaluate(
        f"""new FontFace('Own', Uint8Array.from(atob('{font}'), (c) => c.charCodeAt(0)).buffer).load().then((own) => {{
          document.fonts.add(own);
          document.querySelectorAll('svg.plot text').forEach((text) => {{ text.style.fontFamily = 'Own'; }});
          return document.fonts.check('10px Own');
        }})"""
    )
    assert loaded is True


def test_it_holds_together_on_a_screen(browser: Browser, written: Written) -> None:
    browser.open(written.page)
    measured_in_its_own_font(browser)
    assert browser.text("h1") == "Report on 3 runs of 1 bundle"
    for part in ("Methods", "Figures", "Runs", "Paired contrasts", "real sockets", "What is missing"):
        assert part in browser.text("main"), part
    assert browser.count("svg.plot") == 8
    # Something is drawn in each of them, and nothing of it lies outside.
    assert browser.evaluate(
        "[...document.querySelectorAll('svg.plot')].every((plot) => plot.querySelectorAll('path').length > 5"
        " && plot.getBoundingClientRect().height > 100)"
    )
    assert (
        browser.evaluate(
            """[...document.querySelectorAll('svg.plot')].flatMap((plot) => {
          const box = plot.getBoundingClientRect();
          return [...plot.querySelectorAll('text')].filter((text) => {
            const own = text.getBoundingClientRect();
            return own.left < box.left - 1 || own.right > box.right + 1 || own.bottom > box.bottom + 1;
          }).map((text) => text.textContent);
        })"""
        )
        == []
    )
    assert browser.complaints == []
    assert browser.requests == [written.page.as_uri()]


def test_it_fits_a_phone(browser: Browser, written: Written) -> None:
    browser.open(written.page, width=390)
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
    # Wherever letters are wider.
    browser.evaluate("document.body.style.letterSpacing = '0.15em'")
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
    browser.evaluate("document.body.style.letterSpacing = ''")
    measured_in_its_own_font(browser)
    smallest = (
        "Math.min(...[...document.querySelectorAll('svg.plot text')].map((t) => t.getBoundingClientRect().height))"
    )
    assert browser.evaluate(smallest) > 9
    assert browser.complaints == []


def test_it_is_dark_where_that_is_preferred_and_white_on_paper(browser: Browser, written: Written) -> None:
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    browser.open(written.page)
    ground = "getComputedStyle(document.querySelector('svg.plot path')).fill"
    assert browser.evaluate(ground) == "rgb(25, 31, 38)"
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert browser.evaluate(ground) == "rgb(255, 255, 255)"
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_the_film_plays_pauses_and_can_be_searched(browser: Browser, filmed: Written) -> None:
    browser.open(filmed.page)
    assert browser.count(".film .screen") == 3
    assert browser.count(".screen canvas[hidden]") == 3, "nothing plays by itself"
    picture = "document.querySelector('.screen canvas').toDataURL()"
    browser.evaluate("document.querySelector('.film button').focus()")
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key=" ", code="Space", windowsVirtualKeyCode=32, text=" ")
    browser.until("Number(document.querySelector('.film input').value) > 3")
    first = browser.evaluate(picture)
    browser.until("Number(document.querySelector('.film input').value) > 8")
    assert browser.evaluate(picture) != first
    assert browser.text(".film button") == "Pause"
    browser.evaluate("document.querySelector('.film button').click()")
    assert browser.text(".film button") == "Play"
    browser.evaluate("document.querySelector('.film input').focus()")
    browser.call("Input.dispatchKeyEvent", type="keyDown", key="Home", code="Home", windowsVirtualKeyCode=36)
    browser.until("document.querySelector('.film input').value === '0'")
    browser.until("document.querySelector('.film output').textContent.startsWith('0.0 of')")
    assert browser.complaints == []
    assert browser.requests[0] == filmed.page.as_uri()
    assert all(request.startswith("data:image/webp;base64,") for request in browser.requests[1:])


def test_who_prefers_no_motion_gets_two_stills_a_second(browser: Browser, filmed: Written) -> None:
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
    browser.open(filmed.page)
    browser.evaluate("document.querySelector('.film button').click()")
    browser.until("Number(document.querySelector('.film input').value) > 0")
    assert int(browser.evaluate("document.querySelector('.film input').value")) % 5 == 0
    assert filmed.page.stat().st_size < 2_000_000


def test_names_are_never_markup(browser: Browser, runs: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs / "table", tmp_path / "run"))
    run = find_runs([folder])[0][0]
    write_json(folder / "summary.json", run.summary | {"bundle": HOSTILE, "score": HOSTILE, "link": HOSTILE})
    manifest = run.manifest | {"command": HOSTILE}
    manifest["evaluation"] = run.evaluation | {"bundle": HOSTILE}
    write_json(folder / "manifest.json", manifest)
    written = write_report([folder], tmp_path / "report.html", tmp_path / "files", lambda *_: None)
    browser.open(written.page)
    assert browser.text("h2") == HOSTILE
    assert browser.evaluate("document.title") == "specact report"
    assert browser.count("script") == 1 and browser.count("main img") == 0
    assert browser.complaints == []
    assert any("no films: unknown bundle" in gap.what for gap in written.missing[HOSTILE])
    assert all(path.parent == tmp_path / "files" for path in written.files)
