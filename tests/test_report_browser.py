"""The report's page in a real Chromium, opened from disk as a user opens it."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.watch.report import report
from tests.recorded import Recording, write_run

selenium = pytest.importorskip("selenium", reason="selenium is not installed: make browser")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="needs chromium and chromedriver: make browser installs them",
)
NASTY = "</script><script>window.broken=1</script><img src=x onerror='window.broken=2'>"
FIGURES = ("step-time", "waits", "rate", "next", "queue", "loss", "first-batch", "memory", "ranks")
RUNS = {
    "run": Recording(
        ranks=3, steps=260, slow_rank=1, stalls=(120,), checkpoint_every=100, slower_from=200
    ),
    "nasty": Recording(steps=60, stalls=(30,), stall_file=NASTY, settings={NASTY: NASTY}),
    "begun": Recording(steps=0, ended=False),
}


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
    if os.geteuid() == 0:  # Chromium refuses its sandbox to root, as in most containers
        options.add_argument("--no-sandbox")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_script_timeout(60)
    yield driver
    driver.quit()


@pytest.fixture
def visit(browser: Any, tmp_path: Path) -> Callable[..., None]:
    """Open the report of a run in a window of a given width."""

    def go(name: str, width: int = 1280, scheme: str = "light") -> None:
        phone = width < 600
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": phone}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        browser.get_log("browser")
        write_run(tmp_path / name, RUNS[name])
        # Scripts of the page run before `get` returns, and plotly draws in them.
        browser.get(report(tmp_path / name).write(tmp_path / "a <name> & 100%.html").as_uri())

    return go


def shapes(browser: Any, figure: str) -> int:
    """Return how many lines, bars and points a figure has."""
    found = f"[...document.querySelectorAll('#{figure} .main-svg .overplot path')]"
    drawn = f"{found}.filter(path => (path.getAttribute('d') || '').length > 5).length"
    return int(browser.execute_script(f"return {drawn}"))


def assert_clean(browser: Any) -> None:
    assert browser.get_log("browser") == []
    requests = "return performance.getEntriesByType('resource').map(one => one.name)"
    assert browser.execute_script(requests) == []


def test_headline_and_every_figure_are_shown_without_error_or_request(
    browser: Any, visit: Callable[..., None]
) -> None:
    visit("run")
    found = {figure: shapes(browser, figure) for figure in FIGURES}
    assert all(found.values()), found
    heading = browser.execute_script("return document.querySelector('.verdict h2').innerText")
    assert "waiting for data" in heading
    labels = "return document.querySelector('#step-time .infolayer').textContent"
    assert "steady since" in browser.execute_script(labels)
    uploads = "return document.querySelectorAll('[data-title*=Share], [data-title*=cloud]').length"
    assert browser.execute_script(uploads) == 0
    assert_clean(browser)


def test_the_page_cannot_reach_the_network_even_if_a_script_tried(
    browser: Any, visit: Callable[..., None]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        visit("begun")
        outcome = browser.execute_async_script(
            "const [address, done] = arguments; const image = new Image(); image.src = address;"
            "fetch(address, {mode: 'no-cors'}).then(() => done('sent'), () => done('refused'))",
            f"http://127.0.0.1:{server.getsockname()[1]}/",
        )
        assert outcome == "refused"
        with pytest.raises(BlockingIOError):
            server.accept()


def test_hostile_text_is_shown_and_never_run(browser: Any, visit: Callable[..., None]) -> None:
    visit("nasty")
    assert browser.execute_script("return window.broken") is None
    assert browser.execute_script("return document.querySelectorAll('main img').length") == 0
    assert NASTY in browser.execute_script("return document.body.textContent")
    assert shapes(browser, "step-time")
    assert_clean(browser)
