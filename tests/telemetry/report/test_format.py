"""Numbers as people read them, and the axes that they stand on."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.report.draw import ticks_of, time_ticks
from telemetry.report.format import human, short, tick
from telemetry.report.scale import LinearScale, LogScale
from telemetry.report.values import NotAvailable, Quantity


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.01234, "s", "12.3 ms"),
        (0.0009996, "s", "1.00 ms"),
        (0, "s", "0 s"),
        (90.0, "s", "90.0 s"),
        (3600.0, "s", "60.0 min"),
        (3e-10, "s", "0.300 ns"),
        (1536, "bytes", "1.50 KiB"),
        (17, "bytes", "17 B"),
        (-(3 << 30), "bytes", "-3.00 GiB"),
        (0.9876, "ratio", "98.8 %"),
        (1.0, "ratio", "100 %"),
        (0.000014, "ratio", "0.001 %"),
        (0.000000001, "ratio", "<0.001 %"),
        (0.25, "J/token", "250 mJ/token"),
        (8058.2, "J", "8,058 J"),
        (1234567, "count", "1,234,567"),
        (35.81, "count", "35.8"),
        (61.0, "celsius", "61.0 °C"),
        (9.996, "W", "10.0 W"),
        ("replay", "", "replay"),
        (Quantity(1980.0, "MHz"), "", "1,980 MHz"),
        (NotAvailable("no counter"), "J", "n/a (no counter)"),
    ],
)
def test_a_value_is_shown_with_three_digits_and_a_fitting_unit(value, unit, text):
    assert human(value, unit) == text


def test_what_is_not_available_is_never_shown_as_a_number():
    assert short(NotAvailable("no counter"), "J") == "n/a"


def test_ticks_claim_no_digits_that_they_do_not_have():
    assert [tick(v, "s") for v in (0.002, 2.5, 20.0)] == ["2 ms", "2.5 s", "20 s"]
    assert tick(1500.0, "MHz") == "1,500 MHz"


@given(st.floats(1e-6, 1e12), st.sampled_from([1.0, 1024.0, 2.0**30]))
def test_a_linear_scale_covers_its_values_without_wasting_most_of_itself(highest, grain):
    scale = LinearScale.from_zero(highest, grain=grain)

    assert scale.at(0) == 0
    assert 0.5 <= scale.at(highest) <= 1 or scale.high == pytest.approx(highest, rel=1.0)
    assert 2 <= len(scale.ticks()) <= 8
    assert all(0 <= scale.at(tick) <= 1 for tick in scale.ticks())


@settings(deadline=None)
@given(st.floats(1e-9, 1e9), st.floats(1.001, 1e9))
def test_a_log_scale_has_few_ticks_and_all_of_them_inside(low, ratio):
    scale = LogScale.around((low, low * ratio))

    assert 0 < scale.at(low) < scale.at(low * ratio) < 1
    assert len(scale.ticks()) <= 20
    assert all(low / 1.13 <= tick <= low * ratio * 1.13 for tick in scale.ticks())
    assert list(scale.ticks()) == sorted(scale.ticks())


def test_nothing_positive_lies_left_of_a_log_scale():
    assert LogScale(1.0, 10.0).at(0.0) == 0.0


def test_the_outermost_labels_of_an_axis_stay_inside_of_it():
    ticks = ticks_of(LinearScale(0.0, 10.0), "s")

    assert (ticks[0].align, ticks[-1].align) == ("start", "end")
    assert all(math.isfinite(tick.percent) for tick in ticks)


@pytest.mark.parametrize(
    ("duration_s", "first_and_last"),
    [(1200.0, ("0 min", "20 min")), (2.7, ("0 s", "2.5 s")), (0.3, ("0 ms", "300 ms"))],
)
def test_an_axis_of_time_has_one_unit(duration_s, first_and_last):
    texts = [tick.text for tick in time_ticks(duration_s)]

    assert (texts[0], texts[-1]) == first_and_last
    assert len({text.split()[1] for text in texts}) == 1
