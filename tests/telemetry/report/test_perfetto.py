"""The trace: what the viewers read, joined on one clock, and cut where it gets too long."""

import json
from collections import Counter

import pytest

from telemetry.sinks.perfetto import write_trace
from tests.telemetry.report.simulated import START_NS, WALL_NS, simulated_run

RUN = simulated_run(seconds=3.0)


def trace(tmp_path, **options):
    written = write_trace(RUN, tmp_path / "trace.json", **options)
    return json.loads((tmp_path / "trace.json").read_text(encoding="utf-8")), written


@pytest.fixture
def events(tmp_path):
    return trace(tmp_path)[0]["traceEvents"]


def test_every_step_is_a_slice_of_its_length_on_the_clock_of_the_wall(events):
    slices = [e for e in events if e["ph"] == "X" and e["tid"] == 1]

    assert len(slices) == len(RUN.steps)
    for found, t0, t1 in zip(slices, RUN.steps.t0_ns, RUN.steps.t1_ns, strict=True):
        # A float of Unix time in microseconds holds a quarter of one.
        assert found["ts"] == pytest.approx((WALL_NS + t0 - START_NS) / 1e3, abs=0.5)
        assert found["dur"] == (t1 - t0) / 1e3


def test_every_asynchronous_span_begins_and_ends_once(events):
    begins = Counter((e["cat"], e["id"]) for e in events if e["ph"] == "b")
    ends = Counter((e["cat"], e["id"]) for e in events if e["ph"] == "e")

    assert begins == ends
    assert max(begins.values()) == 1
    assert sum(1 for cat, _ in begins if cat == "request") == len(RUN.requests)


def test_counters_are_numbers_and_gauges_only(events):
    counters = [e for e in events if e["ph"] == "C"]

    assert {"nvml.power_mw", "sequences", "K/V blocks"} <= {e["name"] for e in counters}
    assert "nvml.energy_mj" not in {e["name"] for e in counters}
    assert all(isinstance(v, int | float) for e in counters for v in e["args"].values())


def test_a_trace_at_its_cap_says_how_much_was_cut_and_keeps_what_is_rare(tmp_path):
    whole, all_written = trace(tmp_path)
    cut, written = trace(tmp_path, max_events=500)

    assert all_written.num_cut == whole["otherData"]["num_events_cut"] == 0
    assert len(cut["traceEvents"]) == written.num_events == 500
    assert cut["otherData"]["num_events_cut"] == written.num_cut
    assert written.num_events + written.num_cut == all_written.num_events
    assert [e for e in cut["traceEvents"] if e.get("cat") == "window"]
