"""The report as one HTML page: no other file, no network, and readable without its script."""

import json
import re
from importlib import resources
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup

from telemetry.report import draw, format
from telemetry.report.scale import LinearScale, LogScale
from telemetry.report.values import (
    Chart,
    HistogramChart,
    Lane,
    NotAvailable,
    Quantity,
    RangeChart,
    ShareChart,
    StackChart,
    Table,
    TimelineChart,
    Value,
    known,
    missing,
)

if TYPE_CHECKING:
    from telemetry.report.model import Report

_PAGE = resources.files("telemetry.report") / "page"


def render(report: "Report") -> str:
    """The page's text."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["bound"] = _bound
    page = environment.from_string(_text("report.html.j2"))
    return page.render(
        report=report,
        css=Markup(_text("report.css")),
        js=Markup(_text("report.js")),
        data=Markup(_data(report)),
        W=draw.WIDTH,
        H=draw.HEIGHT,
        draw_stack=draw.draw_stack,
        draw_histogram=draw.draw_histogram,
        draw_lane=draw.draw_lane,
        range_scale=draw.range_scale,
        share_scale=draw.share_scale,
        ticks_of=draw.ticks_of,
        time_ticks=draw.time_ticks,
        mark_percent=draw.mark_percent,
        human=format.human,
        scaled=format.scaled,
        tick=format.tick,
        known=known,
        missing=missing,
        is_missing=_is_missing,
        is_log=_is_log,
        is_quantity=_is_quantity,
        swatches=_swatches,
        is_numeric=_is_numeric,
        kind_of=_kind_of,
        kinds_of=_kinds_of,
    )


def _text(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")


def _bound(text: str) -> str:
    """Keep numbers and what they count on one line, by spaces that do not break."""
    return re.sub(r"(?<=\d) (?=\S)", "\N{NO-BREAK SPACE}", text)


def _is_missing(value: Value) -> bool:
    return isinstance(value, NotAvailable)


def _is_log(scale: LinearScale | LogScale) -> bool:
    return isinstance(scale, LogScale)


def _is_quantity(value: Value) -> bool:
    return isinstance(value, Quantity)


def _swatches(chart: StackChart) -> dict[str, str]:
    """The kind of each part, by the label that it has in the table."""
    return {part.label: part.kind for part in chart.parts}


def _is_numeric(table: Table, column: int) -> bool:
    """Whether a column holds numbers, to be set flush right."""
    return table.columns[column].unit != "" or any(
        isinstance(row[column], int | float | Quantity) for row in table.rows
    )


def _kind_of(chart: Chart) -> str:
    match chart:
        case StackChart():
            return "stack"
        case HistogramChart():
            return "histogram"
        case RangeChart():
            return "range"
        case ShareChart():
            return "share"
        case TimelineChart():
            return "timeline"


def _kinds_of(chart: TimelineChart) -> list[str]:
    """The kinds of its marks, each once, in order of appearance."""
    return list(dict.fromkeys(mark.kind for mark in chart.marks))


def _data(report: "Report") -> str:
    """What the script needs to zoom and to read values: the timelines' columns.

    "<" is written as an escape, so that no text can end the element that holds it.
    """
    charts = {
        chart.key: _timeline(chart)
        for section in report.sections
        for chart in section.charts
        if isinstance(chart, TimelineChart)
    }
    return json.dumps(charts, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _timeline(chart: TimelineChart) -> dict[str, Any]:
    return {
        "duration": chart.duration_s,
        "lanes": [_lane(lane) for lane in chart.lanes],
        "marks": [[round(m.start_s, 6), round(m.end_s, 6), m.label] for m in chart.marks],
        "spans": [[round(s.start_s, 6), round(s.end_s, 6)] for s in chart.spans],
    }


def _lane(lane: Lane) -> dict[str, Any]:
    """A lane by column: `x` are those with readings; low and high are only there if they differ."""
    scale = draw.lane_scale(lane)
    present = [(i, band) for i, band in enumerate(lane.bands) if band is not None]
    data: dict[str, Any] = {
        "label": lane.label,
        "unit": lane.unit,
        "columns": len(lane.bands),
        "scale": _scale(scale),
        "x": [i for i, _ in present],
        "mid": [_short(band.mid) for _, band in present],
    }
    if any(band.low != band.high for _, band in present):
        data["low"] = [_short(band.low) for _, band in present]
        data["high"] = [_short(band.high) for _, band in present]
    return data


def _scale(scale: LinearScale | LogScale) -> dict[str, Any]:
    return {"log": _is_log(scale), "low": scale.low, "high": scale.high}


def _short(value: float) -> float | int:
    """Five significant digits are more than a screen shows."""
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded == int(rounded) else rounded
