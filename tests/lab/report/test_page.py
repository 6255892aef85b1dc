"""The report as a person meets it: in a real browser, on a screen and on a phone."""

from __future__ import annotations

import base64
import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
from tests.children import wait_for

from specact.files import write_json
from specact.lab.evaluation.film import HEIGHT_PX, WIDTH_PX
from specact.lab.report.report import Report, write_report
from specact.lab.report.runs import find_runs

if TYPE_CHECKING:
    from tests.browser import Browser

HOSTILE = '</script><script>document.title = "broken"</script><img src=x onerror=alert(1)>"&$title'


def measured_in_its_own_font(browser: Browser) -> None:
    """Figures are laid out in Matplotlib's own font and shown in the reader's, which is another one on each machine."""
    font = base64.b64encode(Path(mpl.get_data_path(), "fonts/ttf/DejaVuSans.ttf").read_bytes()).decode()
    loaded = browser.page.evaluate(
        f"""new FontFace('Own', Uint8Array.from(atob('{font}'), (c) => c.charCodeAt(0)).buffer).load().then((own) => {{
          document.fonts.add(own);
          document.querySelectorAll('svg.plot text').forEach((text) => {{ text.style.fontFamily = 'Own'; }});
          return document.fonts.check('10px Own');
        }})"""
    )
    assert loaded is True


def test_it_holds_together_on_a_screen(browser: Browser, written: Report) -> None:
    browser.open(written.page)
    measured_in_its_own_font(browser)
    assert browser.text("h1") == "Report on 3 runs of 1 bundle"
    for part in ("Methods", "Figures", "Runs", "Paired contrasts", "real sockets", "What is missing"):
        assert part in browser.text("main"), part
    assert browser.page.locator("svg.plot").count() == 8
    # Something is drawn in each of them, and nothing of it lies outside.
    assert browser.page.evaluate(
        "[...document.querySelectorAll('svg.plot')].every((plot) => plot.querySelectorAll('path').length > 5"
        " && plot.getBoundingClientRect().height > 100)"
    )
    assert (
        browser.page.evaluate(
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


def test_it_fits_a_phone(phone: Browser, written: Report) -> None:
    phone.open(written.page)
    width = "document.documentElement.scrollWidth"
    assert phone.page.evaluate(width) == 390
    # Wherever letters are wider.
    phone.page.evaluate("document.body.style.letterSpacing = '0.15em'")
    assert phone.page.evaluate(width) == 390
    phone.page.evaluate("document.body.style.letterSpacing = ''")
    measured_in_its_own_font(phone)
    texts = phone.page.locator("svg.plot text")
    assert min(texts.evaluate_all("(all) => all.map((text) => text.getBoundingClientRect().height)")) > 9
    assert phone.complaints == []


def test_it_is_dark_where_that_is_preferred_and_white_on_paper(browser: Browser, written: Report) -> None:
    browser.page.emulate_media(color_scheme="dark")
    browser.open(written.page)
    ground = "getComputedStyle(document.querySelector('svg.plot path')).fill"
    assert browser.page.evaluate(ground) == "rgb(25, 31, 38)"
    assert browser.page.locator("pre").first.is_hidden()
    browser.page.emulate_media(media="print")
    assert browser.page.evaluate(ground) == "rgb(255, 255, 255)"
    assert browser.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.page.locator("pre").first.is_visible(), "paper has no details to open"


def test_the_film_plays_pauses_and_can_be_searched_with_the_keyboard(browser: Browser, filmed: Report) -> None:
    browser.open(filmed.page)
    film = browser.page.locator(".film video")
    assert browser.page.locator(".film .screens p").count() == 3
    assert film.evaluate("(film) => film.paused && film.loop && film.muted && film.controls"), "it waits to be played"
    label = film.get_attribute("aria-label")
    assert label is not None and re.search(r"draft, (success|failure) after \d+\.\d s, 0% sent; adahi, ", label)
    moment = "(film) => film.currentTime"
    film.focus()
    browser.page.keyboard.press("Space")
    wait_for(lambda: film.evaluate(moment) > 0.5, "it plays")
    browser.page.keyboard.press("Space")
    assert film.evaluate("(film) => film.paused")
    stopped = film.evaluate(moment)
    browser.page.keyboard.press("ArrowRight")
    wait_for(lambda: film.evaluate(moment) > stopped, "it is searched")
    browser.page.keyboard.press("Home")
    wait_for(lambda: film.evaluate(moment) == 0.0, "it is at its beginning")
    assert film.evaluate("(film) => [film.error, film.readyState, film.videoWidth, film.videoHeight]") == [
        None, 4, WIDTH_PX, HEIGHT_PX,
    ]  # fmt: skip
    assert browser.complaints == []
    assert browser.requests == [filmed.page.as_uri()]
    assert filmed.page.stat().st_size < 1_000_000


def test_names_are_never_markup(browser: Browser, runs: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs / "table", tmp_path / "run"))
    run = find_runs([folder])[0][0]
    write_json(folder / "summary.json", run.summary | {"bundle": HOSTILE, "score": HOSTILE, "link": HOSTILE})
    manifest = run.manifest | {"command": HOSTILE, "machine": {HOSTILE: HOSTILE}}
    manifest["evaluation"] = run.evaluation | dict.fromkeys(("bundle", "env", "fingerprint"), HOSTILE)
    calibration = next((folder / "calibration").glob("*.json"))
    made = json.loads(calibration.read_text())
    made["settings"] |= {"name": HOSTILE, "options": [*made["settings"]["options"], [HOSTILE, HOSTILE]]}
    write_json(calibration, made)
    write_json(folder / "manifest.json", manifest)
    written = write_report([folder], tmp_path / "report.html", tmp_path / "files", lambda *_: None)
    browser.open(written.page)
    assert browser.text("h2") == HOSTILE
    assert browser.page.title() == "specact report"
    assert browser.page.locator("script, main img").count() == 0
    assert browser.complaints == []
    assert any("no films: unknown bundle" in gap.what for gap in written.missing[HOSTILE])
    assert all(path.parent == tmp_path / "files" for path in written.files)
