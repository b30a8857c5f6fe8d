"""The report's page in a real Chromium, opened from disk as a user opens it."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.watch.report import compare, report
from tests.recorded import Recording, write_run

selenium = pytest.importorskip("selenium", reason="selenium is not installed: make browser")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="needs chromium and chromedriver: make browser installs them",
)
NASTY = "</script><script>window.broken=1</script><img src=x onerror='window.broken=2'>"
PLOTS = ("step-time", "waits", "rate", "next", "queue", "loss", "ledger", "memory", "ranks")
DEADLINE_S = 60


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Reports of runs, by name, as addresses of files."""
    folder = tmp_path_factory.mktemp("pages")
    usual = Recording(
        ranks=3, steps=260, slow_rank=1, stalls=(120,), checkpoint_every=100, slower_from=200
    )
    write_run(folder / "a", usual)
    write_run(folder / "b", Recording(ranks=3, steps=260, seed=1, settings={"n_workers": 4}))
    write_run(
        folder / "nasty",
        Recording(steps=60, stalls=(30,), stall_file=NASTY, settings={NASTY: NASTY}),
    )
    write_run(folder / "begun", Recording(steps=0, ended=False))
    made = {
        "run": report(folder / "a").write(folder / "run.html"),
        "both": compare(folder / "a", folder / "b").write(folder / "both.html"),
        "nasty": report(folder / "nasty").write(folder / "a <name> & 100%.html"),
        "begun": report(folder / "begun").write(folder / "begun.html"),
    }
    return {name: path.as_uri() for name, path in made.items()}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in (
        "headless=new",
        "disable-gpu",
        "disable-dev-shm-usage",
        "disable-background-networking",
        "disable-component-update",
        "no-first-run",
        "no-proxy-server",
        "host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
        f"user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):
        options.add_argument(f"--{flag}")
    if os.geteuid() == 0:
        options.add_argument(
            "--no-sandbox"
        )  # Chromium refuses its sandbox to root, as in most containers
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_script_timeout(DEADLINE_S)
    yield driver
    driver.quit()


@pytest.fixture
def visit(browser: Any, pages: dict[str, str]) -> Callable[..., None]:
    """Opens a page in a window of some width and waits until its plots are there."""

    def go(name: str, width: int = 1280, scheme: str = "light") -> None:
        resize(browser, width)
        prefer(browser, scheme)
        browser.get_log("browser")
        browser.get(pages[name])
        drawn(browser)

    return go


def resize(browser: Any, width: int) -> None:
    phone = width < 600
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": phone}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": phone})


def prefer(browser: Any, scheme: str) -> None:
    """What the reader's system asks for."""
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)


def drawn(browser: Any) -> None:
    until(
        browser,
        lambda: browser.execute_script("return document.documentElement.dataset.drawn === 'all'"),
    )


def until(browser: Any, ready: Callable[[], bool]) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(browser, DEADLINE_S).until(lambda _: ready())


def lines_in(browser: Any, plot: str) -> int:
    """Lines, bars and points of a plot that have a shape."""
    inside = (
        "[...document.querySelectorAll(`[data-plot='${arguments[0]}'] .main-svg .overplot path`)]"
    )
    return int(
        browser.execute_script(
            f"return {inside}.filter(p => (p.getAttribute('d') || '').length > 5).length", plot
        )
    )


def nothing_wrong(browser: Any) -> None:
    assert browser.get_log("browser") == []
    assert (
        browser.execute_script(
            "return performance.getEntriesByType('resource').map(one => one.name)"
        )
        == []
    )


def test_every_plot_of_a_run_is_drawn_and_nothing_is_requested(
    browser: Any, visit: Callable[..., None]
) -> None:
    visit("run")
    found = {plot: lines_in(browser, plot) for plot in PLOTS}
    assert all(found.values()), found
    heading = browser.execute_script("return document.querySelector('.verdict h2').innerText")
    assert "of the time goes into waiting" in heading.replace("\N{NO-BREAK SPACE}", " ")
    described = "return [...document.querySelectorAll('[data-plot]')].map(e => e.getAttribute('aria-label'))"
    assert all(len(label) > 20 for label in browser.execute_script(described))
    assert (
        browser.execute_script(
            "return document.querySelectorAll('#step-time .shapelayer path').length"
        )
        >= 3
    )
    assert "steady from" in browser.execute_script(
        "return document.querySelector('#step-time svg:nth-of-type(2)').textContent"
    )
    sends = "return [...document.querySelectorAll('[data-plot]')].some(e => e._context.showSendToCloud !== false)"
    assert browser.execute_script(sends) is False  # no button that uploads a plot
    nothing_wrong(browser)


def test_the_page_cannot_reach_the_network_even_if_it_tried(
    browser: Any, visit: Callable[..., None]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        address = f"http://127.0.0.1:{server.getsockname()[1]}/"
        visit("begun")
        outcome = browser.execute_async_script(
            "const [address, done] = arguments; const image = new Image(); image.src = address;"
            "fetch(address, {mode: 'no-cors'}).then(() => done('went out'), () => done('refused'))",
            address,
        )
        assert outcome == "refused"
        with pytest.raises(BlockingIOError):
            server.accept()
    refused = browser.get_log("browser")
    assert refused
    assert all(
        "Content Security Policy" in entry["message"]
        or "Content-Security-Policy" in entry["message"]
        for entry in refused
    )


def fits_a_phone(browser: Any) -> None:
    """The page is no wider than a phone, and its plots are not cut off but redrawn to fit."""
    resize(browser, 375)
    widest = "Math.max(0, ...[...document.querySelectorAll('.main-svg')].map(e => e.getBoundingClientRect().right))"
    until(browser, lambda: browser.execute_script(f"return innerWidth === 375 && {widest} <= 375"))
    assert browser.execute_script(
        "return [document.documentElement.scrollWidth, document.body.scrollWidth]"
    ) == [
        375,
        375,
    ]


def colours(browser: Any) -> list[str]:
    """Of the page, of its text, and of the text of a plot."""
    return list(
        browser.execute_script(
            "const body = getComputedStyle(document.body);"
            "const tick = document.querySelector('#step-time .xtick text');"
            "return [body.backgroundColor, body.color, getComputedStyle(tick).fill]"
        )
    )


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_switch_changes_page_and_plots_and_both_are_readable(
    browser: Any, visit: Callable[..., None]
) -> None:
    visit("run")
    light = colours(browser)
    browser.find_element("id", "theme").click()
    dark = colours(browser)
    assert luminance(light[0]) > 0.8 > 0.1 > luminance(dark[0])
    assert all(one != other for one, other in zip(light, dark, strict=True))
    for back, *inks in (light, dark):
        assert all(contrast(back, ink) >= 4.5 for ink in inks)
    browser.find_element("id", "theme").click()
    assert colours(browser) == light
    nothing_wrong(browser)


def test_hostile_text_is_shown_and_never_run(browser: Any, visit: Callable[..., None]) -> None:
    visit("nasty")
    assert browser.execute_script("return window.broken") is None
    assert browser.execute_script("return document.querySelectorAll('script').length") == 4
    assert browser.execute_script("return document.querySelectorAll('main img').length") == 0
    assert NASTY in browser.execute_script("return document.body.textContent")
    assert lines_in(browser, "step-time")
    fits_a_phone(browser)
    nothing_wrong(browser)


def test_two_runs_are_drawn_side_by_side(browser: Any, visit: Callable[..., None]) -> None:
    visit("both")
    found = {
        plot: lines_in(browser, plot) for plot in ("rates", "spread", "both-steps", "both-waits")
    }
    assert all(found.values()), found
    assert browser.execute_script("return document.querySelectorAll('.two .verdict').length") == 2
    fits_a_phone(browser)
    nothing_wrong(browser)
