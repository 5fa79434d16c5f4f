"""The report: built from a run by a pure function, and written in three forms."""

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from telemetry.report import verdict
from telemetry.report.analysis import Analysis
from telemetry.report.format import human
from telemetry.report.sections.cache import cache
from telemetry.report.sections.energy import energy
from telemetry.report.sections.health import health
from telemetry.report.sections.latency import latency
from telemetry.report.sections.memory import memory
from telemetry.report.sections.method import method
from telemetry.report.sections.replay import replay
from telemetry.report.sections.steps import steps
from telemetry.report.sections.timeline import timeline
from telemetry.report.values import Figure, Section
from telemetry.run import Run

if TYPE_CHECKING:
    from rich.console import Console

# In the order in which they are read: what it held, whether that moved, then how fast and why.
SECTIONS = (memory, replay, timeline, steps, latency, cache, energy, health, method)


@attrs.frozen
class Report:
    """What a run says, as a value that knows no output format.

    Attributes:
        run_id: The run's name.
        title: What ran on what.
        subtitle: When, how long, with which versions.
        verdict: The run in one sentence.
        warnings: What to know before trusting it, the gravest first.
        headline: The figures to put first.
        sections: The parts, in order.
        footer: Which schema it was read from.
    """

    run_id: str
    title: str
    subtitle: str
    verdict: str
    warnings: tuple[str, ...]
    headline: tuple[Figure, ...]
    sections: tuple[Section, ...]
    footer: str

    @property
    def figures(self) -> Mapping[str, Figure]:
        """Every figure by its key."""
        return {f.key: f for section in self.sections for f in section.all_figures}

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one page that needs no other file and no network."""
        from telemetry.report.html import render  # delayed: jinja2 is needed for this form only

        Path(path).write_text(render(self), encoding="utf-8")

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the figures and tables for programs; `telemetry.report.data` documents the keys."""
        from telemetry.report.data import to_text  # delayed, as the other forms are

        Path(path).write_text(to_text(self), encoding="utf-8")

    def to_terminal(self, console: "Console | None" = None) -> None:
        """Print a summary; to standard output unless a console is given."""
        from telemetry.report.terminal import show  # delayed: rich is needed for this form only

        show(self, console)


def build_report(run: Run) -> Report:
    """Say what a run says. Pure: reads no file, no clock and no device."""
    analysis = Analysis.of(run)
    sections = tuple(section(analysis) for section in SECTIONS)
    figures = {f.key: f for section in sections for f in section.all_figures}
    return Report(
        run_id=run.info.run_id,
        title=verdict.title(run),
        subtitle=_subtitle(run, analysis),
        verdict=verdict.sentence(figures, analysis),
        warnings=tuple(verdict.warnings(analysis)),
        headline=verdict.headline(figures),
        sections=sections,
        footer=f"Run {run.info.run_id}, schema {run.info.v}. Every figure names its source; what "
        "is not known is n/a with the reason, never a zero.",
    )


def _subtitle(run: Run, analysis: Analysis) -> str:
    begin = datetime.fromtimestamp(run.info.start_wall_ns / 1e9, UTC)
    parts = [f"{begin:%Y-%m-%d %H:%M:%S} UTC", human(analysis.duration_s, "s")]
    engine = run.info.engine
    if engine.get("name"):
        version = engine.get("version")
        is_told = version and version != "unknown"  # as of a folder that was never installed
        parts.append(f"{engine['name']} {version}" if is_told else str(engine["name"]))
    for fact, label in (("driver_version", "driver"), ("cuda_version", "CUDA")):
        if run.info.device.get(fact):
            parts.append(f"{label} {run.info.device[fact]}")
    return " · ".join(parts)
