"""A headless Chromium that tests read pages with, as a person would."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import ConsoleMessage, Page, sync_playwright

_CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page, and what it did.

    Attributes:
        page: of Playwright.
        complaints: errors and warnings on the console, and exceptions.
        requests: addresses of everything the page asked for.
    """

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("websocket", lambda socket: self.requests.append(socket.url))

    def open(self, page: Path | str) -> None:
        """Opens a file or an address and waits until it is loaded."""
        self.page.goto(page.as_uri() if isinstance(page, Path) else page)

    def text(self, selector: str) -> str:
        """What a person reads there: nothing of what is hidden."""
        element = self.page.locator(selector)
        return element.inner_text() if element.is_visible() else ""

    def shows(self, text: str) -> bool:
        return text in self.text("body")

    def _note(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning", "assert"):
            self.complaints.append(message.text)


@contextmanager
def running_browser(width: int) -> Iterator[Browser]:
    """A browser of our own, with an empty profile, as wide as that [px]; narrow ones are phones.

    The test is skipped where there is no Chromium.
    """
    if _CHROMIUM is None:
        pytest.skip("needs chromium, chromium-browser or google-chrome")
    with sync_playwright() as driver:
        # Neither a proxy of the environment nor, for who is root, the sandbox.
        browser = driver.chromium.launch(
            executable_path=_CHROMIUM, args=["--disable-gpu", "--disable-dev-shm-usage", "--no-proxy-server"]
        )
        page = browser.new_page(viewport={"width": width, "height": 800}, is_mobile=width < 700)
        page.set_default_timeout(120_000.0)
        yield Browser(page)
        browser.close()
