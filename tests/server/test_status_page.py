"""The status page as a person meets it: a real server, real robots, a real browser."""

import json
import re
from pathlib import Path
from urllib.parse import quote, urlsplit

from tests.browser import Browser
from tests.children import wait_for
from tests.serving import Doubling, Here, state

from specact.server import telemetry as server_telemetry
from specact.server.telemetry import Telemetry
from specact.wire.messages import Reply

PAGE = Path(server_telemetry.__file__).with_name("status.html")
TOKEN = "a token/with+odd=characters"
HOSTILE = "<img src=x onerror=alert(1)>"
REQUESTS, P99 = 2, 9  # columns of the robots' table


def pretend(browser: Browser, status: bytes) -> None:
    """Opens the page without a server: this is what it hears."""
    browser.page.add_init_script(f"window.fetch = async () => new Response({json.dumps(status.decode())})")
    browser.open(PAGE)
    wait_for(lambda: browser.text("#age"), "numbers are shown")


def column(browser: Browser, number: int) -> list[str]:
    """One column of the robots' table, as it is at one moment."""
    return browser.page.locator(f"#robots tbody tr > :nth-child({number + 1})").all_inner_texts()


def sort(browser: Browser, number: int) -> list[str]:
    """The column after a click on its head."""
    browser.page.locator("#robots thead button").nth(number).click()
    return column(browser, number)


def enter(browser: Browser, token: str) -> None:
    browser.page.fill("#token", token)
    browser.page.click("#ask button")


def url(server: Here) -> str:
    return f"http://127.0.0.1:{server.port}/"


def test_it_shows_the_server_and_its_robots_and_when_it_is_gone(browser: Browser) -> None:
    with Here(Doubling()) as server, server.connect() as calm, server.connect() as hostile:
        calm.hello(robot="ball-07"), hostile.hello(robot=HOSTILE)

        def work() -> None:
            for robot in (calm, calm, hostile):
                robot.ask(1, state(1.0), report={"steps": 1, "transmitted": 1})

        browser.open(url(server))
        wait_for(lambda: browser.shows("Ready requests are answered"), "the server is ready", work)
        assert browser.text("h1") == "doubling"
        assert sorted(column(browser, 0)) == sorted(["ball-07", HOSTILE])
        assert browser.page.locator("main img").count() == 0
        seen = sort(browser, REQUESTS)
        wait_for(lambda: column(browser, REQUESTS) != seen, "requests are counted", work)
        line = browser.page.locator("#rates path.first")
        wait_for(lambda: "L" in str(line.get_attribute("d")), "a line", work)
        wait_for(lambda: column(browser, 0) == ["ball-07", HOSTILE], "who asks most comes first", work)
        wait_for(lambda: re.search(r"ok\s+[1-9]\d*\s+100.0 %", browser.text("#outcomes")), "answers are counted", work)
        wait_for(lambda: re.search(r"total(\s+\d+\.\d+){3}", browser.text("#stages")), "stages are timed", work)
        wait_for(lambda: all(re.match(r"\d+\.\d+", cell) for cell in column(browser, P99)), "robots are timed", work)
        assert browser.shows("100.0 %"), "every step was transmitted"
        for robot in (calm, hostile):
            robot.connection.close()
        wait_for(lambda: browser.shows("No robot is connected"), "they have hung up")
        assert browser.complaints == [] and browser.text("#age").startswith("live")
    assert {urlsplit(request).netloc for request in browser.requests} == {urlsplit(url(server)).netloc}
    wait_for(lambda: browser.shows("Unreachable"), "it says so")
    wait_for(lambda: re.match(r"last numbers \d+ s old, from \d\d:\d\d:\d\d", browser.text("#age")), "how old they are")
    assert browser.text("h1") == "doubling" and browser.shows("Answers per second"), "the last numbers stay"
    with Here(Doubling(), port=server.port):
        wait_for(lambda: browser.shows("Ready"), "the page comes back by itself")


def test_it_asks_for_the_token_or_takes_it_from_the_address(browser: Browser) -> None:
    with Here(Doubling(), TOKEN) as server:
        browser.open(url(server))
        wait_for(lambda: browser.shows("Token needed"), "the token is asked for")
        assert browser.shows("Token of this server") and browser.text("main") == ""
        enter(browser, "not the token, but long enough")
        wait_for(lambda: browser.shows("Wrong token"), "it is refused")
        count = len(browser.requests)
        enter(browser, TOKEN)
        wait_for(lambda: browser.shows("Ready"), "it is accepted")
        assert "/v1/status" in browser.requests[count] and not browser.shows("Token")
        assert browser.page.input_value("#token") == ""
        assert browser.page.evaluate("document.cookie + JSON.stringify(localStorage)") == "{}"
        browser.open(url(server))
        wait_for(lambda: browser.shows("Ready"), "the tab remembers it")
        assert not any("odd" in request for request in browser.requests)
        for fragment in (quote(TOKEN, safe=""), quote(TOKEN, safe="+/=")):
            browser.page.evaluate("sessionStorage.clear()")
            browser.open("about:blank")
            browser.open(f"{url(server)}#token={fragment}")
            wait_for(lambda: browser.shows("Ready"), "it is accepted")
            assert browser.page.url == url(server)


def test_it_holds_256_robots_on_a_phone(phone: Browser) -> None:
    telemetry = Telemetry("a-bundle-with-a-name-that-is-longer-than-the-screen-of-a-phone-is-wide", range(3))
    keys = [telemetry.connected(f"robot-{number}") for number in range(255)]
    keys.append(telemetry.connected("W" * 64))
    for place, key in enumerate(keys[10:]):
        telemetry.record_reply("infer", Reply(0, 0.1, 0.5, 1.0 + place, 1, bytearray()), key)
    telemetry.record_error("infer", "expired", keys[0])
    pretend(phone, telemetry.status(ready=True))
    assert phone.shows("Robots (256)")
    assert phone.shows("the deadline passed in the queue")
    assert column(phone, 0)[:3] == ["robot-0", "robot-1", "robot-2"], "numbers count as numbers"
    for _ in range(2):
        tails = sort(phone, P99)
        assert tails[-10:] == ["\u2013"] * 10, "who has no value comes last, in both directions"
    assert tails[0] == "1.00"
    assert sort(phone, P99)[0] == "246"
    assert phone.page.evaluate("document.documentElement.scrollWidth") == 390
    assert phone.complaints == []
