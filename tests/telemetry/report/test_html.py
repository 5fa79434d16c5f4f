"""The page: whole without a network, well-formed, a table behind every chart, and small."""

import re
from html.parser import HTMLParser
from itertools import pairwise

import attrs
import pytest

from telemetry.report import build_report
from telemetry.report.sections.timeline import COLUMNS
from tests.telemetry.report.simulated import simulated_run

VOID = {"meta", "link", "br", "hr", "img", "input"}
DRAWN = {"path", "rect"}  # SVG's, which close themselves


def page(run, tmp_path):
    path = tmp_path / "report.html"
    build_report(run).to_html(path)
    return path.read_text(encoding="utf-8")


class Outline(HTMLParser):
    """Reads a page, and fails where an element is left open or closed twice."""

    def __init__(self, text):
        super().__init__()
        self.open, self.found, self.ids, self.links = [], [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.found.append((tag, attributes, tuple(self.open)))
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.links += [attributes[a] for a in ("href", "src") if a in attributes]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        assert tag in DRAWN, tag
        self.found.append((tag, dict(attributes), tuple(self.open)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def all(self, tag):
        return [attributes for found, attributes, _ in self.found if found == tag]


@pytest.fixture(scope="module", params=[True, False], ids=["gpu", "cpu"])
def text(request, tmp_path_factory):
    return page(simulated_run(seconds=4.0, on_gpu=request.param), tmp_path_factory.mktemp("page"))


def test_the_page_is_well_formed_and_every_id_is_there_once(text):
    outline = Outline(text)

    assert len(outline.ids) == len(set(outline.ids))
    assert outline.all("html") == [{"lang": "en"}]


def test_the_page_refers_to_nothing_outside_of_itself(text):
    outline = Outline(text)

    assert all(link.startswith("#") or link == "data:," for link in outline.links)
    assert {link.removeprefix("#") for link in outline.links if link.startswith("#")} <= set(
        outline.ids
    )
    assert not re.search(r"url\(|@import|https?://|fetch\(|XMLHttpRequest|import\(", text)
    policy = next(a for a in outline.all("meta") if "http-equiv" in a)
    assert policy["content"].startswith("default-src 'none'")


def test_headings_go_down_one_level_at_a_time(text):
    levels = [int(tag[1]) for tag, _, _ in Outline(text).found if re.fullmatch("h[1-6]", tag)]

    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))


def test_every_chart_has_a_caption_an_accessible_name_and_a_table_behind_it(text):
    figures = re.findall(r"<figure.*?</figure>", text, re.DOTALL)

    assert len(figures) >= 3
    for figure in figures:
        assert "<figcaption>" in figure
        assert re.search(r"<details.*<table.*</table>.*</details>", figure, re.DOTALL)
        for svg in re.findall(r"<svg[^>]*>", figure):
            assert 'role="img"' in svg and "aria-label=" in svg


def test_every_table_has_a_caption_and_scoped_heads(text):
    for table in re.findall(r"<table>.*?</table>", text, re.DOTALL):
        assert "<caption>" in table
        assert all("scope=" in head for head in re.findall(r"<th[^e>][^>]*>", table))


def test_text_from_the_run_can_not_become_markup(tmp_path):
    run = simulated_run(seconds=2.0)
    evil = "</script><script>alert(1)</script><img src=x>"
    info = attrs.evolve(run.info, model={"name": evil}, config={evil: evil})
    windows = (run.windows[0], attrs.evolve(run.windows[1], name=evil))
    text = page(attrs.evolve(run, info=info, windows=windows), tmp_path)

    outline = Outline(text)
    assert len(outline.all("script")) == 2
    assert not outline.all("img")


def test_a_page_stays_below_a_megabyte_once_every_column_of_its_timeline_is_full(tmp_path):
    """From there on it does not grow: an hour under load makes as large a page as a minute."""
    run = simulated_run(seconds=12.0, load=14.0)
    (timeline,) = next(s for s in build_report(run).sections if s.key == "timeline").charts

    assert sum(band is not None for band in timeline.lanes[0].bands) > 0.9 * COLUMNS
    assert len(page(run, tmp_path).encode()) < 1_000_000


def test_a_run_without_anything_in_it_still_makes_a_page(tmp_path):
    run = simulated_run(seconds=1.0, on_gpu=False)
    empty = attrs.evolve(
        run, steps=type(run.steps)(), requests=(), series={}, ledgers=(), events=(), windows=()
    )

    assert Outline(page(empty, tmp_path)).found


def test_figures_without_a_value_stand_together_by_their_reason(tmp_path):
    text = page(simulated_run(seconds=1.0, on_gpu=False), tmp_path)
    (energy,) = re.findall(r'<section id="energy".*?</section>', text, re.DOTALL)

    assert energy.count("no energy counter of the processor)") == 1
    assert "Energy, Energy per token, Mean power" in energy
