"""The page in a headless Chromium: no error, no request, readable in both themes and widths."""

import os
import shutil

import pytest

from telemetry.report import build_report
from tests.telemetry.report.simulated import simulated_run

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser():
    found = next((path for path in map(shutil.which, NAMES) if path), None)
    if found is None:
        pytest.skip("no Chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        # Without a sandbox of its own: a container gives it none, and the page is ours.
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    build_report(simulated_run(seconds=2.0)).to_html(path)
    return path.as_uri()


@pytest.fixture
def artefacts(tmp_path):
    """Where screenshots are kept: the folder that the environment names, or the test's own."""
    folder = os.environ.get("TEST_ARTEFACTS")
    if folder is None:
        return tmp_path
    os.makedirs(folder, exist_ok=True)
    return folder


class Opened:
    """The page in a tab, and everything that went wrong in it."""

    def __init__(self, browser, url, *, width=1280, scheme="light", **options):
        self.tab = browser.new_page(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,
            reduced_motion="reduce",  # what is scrolled to is there at once
            **options,
        )
        self.said, self.requests = [], []
        self.tab.on("console", lambda message: self.said.append(message.text))
        self.tab.on("pageerror", lambda error: self.said.append(str(error)))
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.goto(url)

    def run(self, script):
        return self.tab.evaluate(script)

    def lines(self):
        return self.run("[...document.querySelectorAll('.line')].map(p => p.getAttribute('d'))")


@pytest.mark.parametrize("width", [1280, 390], ids=["wide", "narrow"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_opens_without_an_error_a_request_or_a_sideways_scroll(
    browser, url, artefacts, scheme, width
):
    page = Opened(browser, url, width=width, scheme=scheme)

    assert page.said == []
    assert [request for request in page.requests if not request.startswith("data:")] == [url]
    assert page.run("document.documentElement.scrollWidth") == width
    background = page.run("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(251, 250, 247)", "dark": "rgb(19, 21, 23)"}[scheme]
    screenshot = page.tab.screenshot(path=f"{artefacts}/{scheme}-{width}.png", full_page=True)
    assert len(screenshot) > 50_000


def test_the_theme_can_be_switched_against_the_systems(browser, url):
    page = Opened(browser, url, scheme="dark")

    page.tab.get_by_role("button", name="Light theme").click()

    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(251, 250, 247)"
    assert page.tab.get_by_role("button", name="Dark theme").is_visible()


def test_a_timeline_is_read_and_zoomed_by_keyboard_alone(browser, url):
    page = Opened(browser, url)
    whole = page.lines()
    lane = page.tab.locator(".field").first

    lane.focus()
    for key in ("Home", "Shift+ArrowRight", "ArrowRight"):
        page.tab.keyboard.press(key)
    said = page.tab.locator("output").inner_text()
    page.tab.keyboard.press("+")
    zoomed = page.lines()
    page.tab.keyboard.press("Escape")

    assert "At" in said and "Step time" in said and "ms" in said
    assert page.tab.locator(".chip").first.is_visible()
    assert zoomed != whole
    assert page.tab.locator(".axis span").count() > 0
    assert page.said == []


def test_dragging_over_a_lane_shows_that_part_of_the_run(browser, url):
    page = Opened(browser, url)
    lane = page.tab.locator(".field").first
    lane.scroll_into_view_if_needed()
    box = lane.bounding_box()
    before = page.tab.locator(".timeline .axis").inner_text()

    page.tab.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 5)
    page.tab.mouse.down()
    page.tab.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 5)
    page.tab.mouse.up()

    assert page.tab.locator(".timeline .axis").inner_text() != before
    page.tab.get_by_role("button", name="Whole run").click()
    assert page.tab.locator(".timeline .axis").inner_text() == before


def test_without_its_script_the_page_still_shows_everything(browser, url):
    page = Opened(browser, url, java_script_enabled=False)

    assert page.tab.locator("svg path.line").first.get_attribute("d")
    assert not page.tab.locator(".tools").first.is_visible()
    assert page.tab.locator("h2").count() >= 9


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(browser, url, scheme):
    """WCAG asks for 4.5 between text and its ground."""
    page = Opened(browser, url, scheme=scheme)

    for selector in ("body", ".subtitle", ".lead", ".source", ".reason", ".key", ".lane small",
                     ".kicker", "thead th", ".warnings h2", "footer"):  # fmt: skip
        text, ground = page.run(
            f"""(() => {{ const e = document.querySelector({selector!r});
            let g = e; while (getComputedStyle(g).backgroundColor === 'rgba(0, 0, 0, 0)')
              g = g.parentElement;
            return [getComputedStyle(e).color, getComputedStyle(g).backgroundColor]; }})()"""
        )
        assert contrast(text, ground) >= 4.5, (selector, text, ground)


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(color):
    parts = [int(part) / 255 for part in color.removeprefix("rgb(").rstrip(")").split(",")]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
