"""The report in a terminal."""

import io
import math

import attrs
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from telemetry.report import build_report
from telemetry.report.terminal import spark
from tests.telemetry.report.simulated import simulated_run


def shown(run, width):
    console = Console(file=io.StringIO(), width=width)
    build_report(run).to_terminal(console)
    return console.file.getvalue()


def test_verdict_sections_and_warnings_are_all_there_in_a_narrow_terminal():
    run = simulated_run(seconds=3.0)
    report = build_report(run)

    text = shown(run, 80)

    assert max(map(len, text.splitlines())) <= 80
    for section in report.sections:
        assert section.title in text
    assert text.count("\n! ") == len(report.warnings)
    assert report.title in text


def test_what_is_not_available_is_said_once_with_its_reason():
    text = shown(simulated_run(seconds=2.0, on_gpu=False), 160)

    assert "n/a (no energy counter of the processor)" in text
    assert " None" not in text


def test_brackets_in_names_are_text_and_no_markup():
    run = simulated_run(seconds=1.0)
    window = attrs.evolve(run.windows[1], name="[bold]warm[/bold]")
    text = shown(attrs.evolve(run, windows=(run.windows[0], window)), 100)

    assert "[bold]warm[/bold]" in text


@given(st.lists(st.just(math.nan) | st.floats(0, 1e9), max_size=60))
def test_a_spark_has_a_character_per_value_and_only_nothing_looks_like_nothing(values):
    line = spark(values)

    assert len(line) == len(values)
    for value, mark in zip(values, line, strict=True):
        assert (mark == " ") == math.isnan(value)
        if value > 0:
            assert mark != "▁"
