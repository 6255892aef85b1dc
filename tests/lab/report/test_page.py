"""The report as a person meets it: in a real browser, on a screen and on a phone."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.children import wait_for

from specact.files import write_json
from specact.lab.evaluation.runs import find_runs
from specact.lab.report.film import HEIGHT_PX, WIDTH_PX
from specact.lab.report.report import write_report

if TYPE_CHECKING:
    from tests.browser import Browser

HOSTILE = '</script><script>document.title = "broken"</script><img src=x onerror=alert(1)>"&$title'


def test_it_holds_together_on_a_screen_in_the_dark_and_on_paper(browser: Browser, written: dict[str, Any]) -> None:
    browser.open(Path(written["page"]))
    assert browser.text("h1") == "Report on 3 runs of 1 bundle"
    plots = browser.page.locator("img.plot")
    assert plots.count() == 4
    assert plots.evaluate_all("(all) => all.every((plot) => plot.naturalWidth > 100 && plot.alt.length > 50)")
    assert browser.page.locator("pre").first.is_hidden()
    background = "getComputedStyle(document.body).backgroundColor"
    browser.page.emulate_media(color_scheme="dark")
    assert browser.page.evaluate(background) == "rgb(17, 21, 26)"
    browser.page.emulate_media(media="print")
    assert browser.page.evaluate(background) == "rgb(255, 255, 255)"
    assert browser.page.locator("pre").first.is_visible(), "paper has no details to open"
    assert browser.complaints == []
    assert browser.requests == [Path(written["page"]).as_uri()]


def test_the_film_plays_pauses_and_can_be_searched_with_the_keyboard(browser: Browser, filmed: dict[str, Any]) -> None:
    browser.open(Path(filmed["page"]))
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
    state = film.evaluate("(film) => [film.error, film.readyState, film.videoWidth, film.videoHeight]")
    assert state == [None, 4, WIDTH_PX, HEIGHT_PX]
    assert browser.complaints == []
    assert browser.requests == [Path(filmed["page"]).as_uri()]


def test_names_are_never_markup(browser: Browser, runs: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs / "table", tmp_path / "run"))
    run = find_runs([folder])[0][0]
    calibration = {HOSTILE: run.summary["calibration"]["adahi"]}
    texts = dict.fromkeys(("bundle", "score", "link"), HOSTILE)
    write_json(folder / "summary.json", run.summary | texts | {"calibration": calibration})
    manifest = run.manifest | {"command": HOSTILE, "machine": {HOSTILE: HOSTILE}}
    manifest["evaluation"] = run.evaluation | dict.fromkeys(("bundle", "env", "fingerprint"), HOSTILE)
    write_json(folder / "manifest.json", manifest)
    written = write_report([folder], tmp_path / "report.html", tmp_path / "files", lambda *_: None)
    browser.open(Path(written["page"]))
    assert browser.text("h2") == HOSTILE
    assert browser.page.title() == "specact report"
    assert browser.page.locator("script, main img:not(.plot)").count() == 0
    assert browser.complaints == []
    assert any("no films" in gap for gap in written["missing"][HOSTILE])
    assert all(path.parent == tmp_path / "files" for path in map(Path, written["files"]))
