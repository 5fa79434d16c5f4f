"""The canonical form of a run: small, append-only, readable when cut off anywhere."""

import json
import math

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry import RunFileError, SchemaVersionError, read_run
from telemetry.records import SCHEMA_VERSION, RunInfo, Step
from telemetry.run import StepTable
from telemetry.sinks.jsonl import (
    JsonlFile,
    JsonlMemory,
    encode_requests,
    encode_samples,
    encode_steps,
    read_lines,
)
from tests.telemetry.fake_engine import request_record, step_record

HEADER = {
    "type": "run",
    **attrs.asdict(
        RunInfo(SCHEMA_VERSION, "run-0", 10**18, 5 * 10**9, "live", 0.1, {"name": "fake"})
    ),
}


def as_bytes(*lines):
    return [json.dumps(line).encode() + b"\n" for line in lines]


def read(*lines):
    return read_lines(as_bytes(HEADER, *lines))


def as_ns(seconds):
    return round(seconds * 1e9)


counts = st.integers(0, 2**31 - 1)  # what a column of counts holds
times = st.floats(0, 1e6)
parts = st.floats(0, 10)


@st.composite
def step_records(draw):
    records = []
    start = draw(st.integers(0, 99))
    for index in range(start, start + draw(st.integers(1, 6))):
        start_s = draw(times)
        fields = {
            field: draw(counts)
            for field in (
                "num_rows",
                "num_prefill_tokens",
                "num_waiting",
                "num_free_blocks",
                "num_cached_blocks",
                "num_preempted",
            )
        }
        records.append(
            step_record(
                index,
                start_s=start_s,
                end_s=start_s + draw(parts),
                schedule_s=draw(parts),
                wait_s=draw(parts),
                mode=draw(st.sampled_from(["replay", "eager", "native"])),
                bucket=draw(st.none() | st.integers(1, 64)),
                fallback=draw(st.none() | st.text(max_size=8)),
                sampled=tuple(draw(st.lists(st.integers(0, 3), max_size=3))),
                **fields,
            )
        )
    return records


class TestRoundTrip:
    @settings(deadline=None, max_examples=40)
    @given(step_records())
    def test_steps_come_back_to_the_nanosecond(self, records):
        steps = read(encode_steps(records)).steps

        assert len(steps) == len(records)
        for record, step in zip(records, steps, strict=True):
            assert step.t0_ns == as_ns(record.start_s)
            assert step.t1_ns == as_ns(record.end_s)
            assert step.schedule_ns == as_ns(record.schedule_s)
            assert step.wait_ns == as_ns(record.wait_s)
            for name in ("index", "num_rows", "num_waiting", "num_cached_blocks", "num_preempted"):
                assert getattr(step, name) == getattr(record, name)
            assert (step.mode, step.bucket, step.fallback, step.sampled) == (
                record.mode,
                record.bucket,
                record.fallback,
                record.sampled,
            )

    def test_steps_that_were_written_out_of_order_come_back_in_order(self):
        records = [step_record(i, start_s=float(i), num_rows=i) for i in range(4)]
        steps = read(encode_steps(records[2:]), encode_steps(records[:2])).steps

        assert list(steps.index) == list(steps.num_rows) == [0, 1, 2, 3]
        assert list(steps.t0_ns) == [i * 10**9 for i in range(4)]

    def test_a_step_has_every_field_of_an_engines_record(self):
        record = step_record(0)
        told = {field.name.removesuffix("_s") for field in attrs.fields(type(record))}
        kept = {field.name.removesuffix("_ns") for field in attrs.fields(Step)}

        # Requests have lines of their own; begin and end are called t0 and t1.
        assert told - {"finished", "start", "end"} == kept - {"t0", "t1"}

    def test_tables_have_a_column_for_each_field_of_a_step(self):
        assert [f.name for f in attrs.fields(StepTable)] == [f.name for f in attrs.fields(Step)]

    @settings(deadline=None, max_examples=40)
    @given(
        st.lists(
            st.tuples(times, st.none() | times, st.none() | times, counts, st.text(max_size=5)),
            min_size=1,
            max_size=6,
        )
    )
    def test_requests_come_back(self, drawn):
        records = [
            request_record(
                name,
                seq_ids=tuple(range(i)),
                arrival_s=arrival,
                first_scheduled_s=scheduled,
                first_token_s=first,
                num_generated_tokens=num,
            )
            for i, (arrival, scheduled, first, num, name) in enumerate(drawn)
        ]
        requests = read(encode_requests(records)).requests

        for record, request in zip(records, requests, strict=True):
            assert request.request_id == record.request_id
            assert request.seq_ids == record.seq_ids
            assert request.arrival_ns == as_ns(record.arrival_s)
            assert request.num_generated_tokens == record.num_generated_tokens
            for ns, seconds in (
                (request.first_scheduled_ns, record.first_scheduled_s),
                (request.first_token_ns, record.first_token_s),
            ):
                assert ns == (None if seconds is None else as_ns(seconds))

    @settings(deadline=None, max_examples=40)
    @given(
        st.lists(
            st.tuples(counts, st.integers(0, 10**6), st.none() | counts), min_size=1, max_size=9
        )
    )
    def test_samples_come_back_in_order_of_time(self, drawn):
        rows = [(t0, t0 + took, (value, 7)) for t0, took, value in drawn]
        series = read(encode_samples("x", "fast", ("x.a", "x.b"), rows)).series

        expected = sorted(((t1, values[0]) for _, t1, values in rows), key=lambda pair: pair[0])
        assert list(series["x.a"].t_ns) == [t1 for t1, _ in expected]
        assert series["x.a"].values == [value for _, value in expected]
        assert series["x.b"].values == [7] * len(rows)

    def test_readings_at_windows_edges_join_the_series(self):
        window = {"type": "window", "id": 0, "name": "run", "t0_ns": 50, "parent": None}
        run = read(
            encode_samples("x", "fast", ("x.a",), [(100, 101, (2,)), (200, 201, (3,))]),
            {**window, "t1_ns": None, "begin": {"x.a": 1}, "end": {}},
            {**window, "t1_ns": 300, "begin": {"x.a": 1}, "end": {"x.a": 4}},
        )

        assert list(run.get("x.a").t_ns) == [50, 101, 201, 300]
        assert run.get("x.a").values == [1, 2, 3, 4]
        assert len(run.get("x.unknown")) == 0
        (window,) = run.windows
        assert window.change("x.a") == 3
        assert window.change("x.unknown") is None

    def test_times_of_a_run_are_wall_times_by_its_anchors(self):
        run = read({"type": "anchor", "mono_ns": 9 * 10**9, "wall_ns": 2 * 10**18})

        assert run.wall_ns(5 * 10**9 + 7) == 10**18 + 7  # near the start
        assert run.wall_ns(9 * 10**9 - 7) == 2 * 10**18 - 7  # near the anchor

    def test_a_counter_that_fell_has_no_change(self):
        window = {"type": "window", "id": 0, "name": "run", "t0_ns": 0, "parent": None}
        run = read({**window, "t1_ns": 9, "begin": {"x.mj": 9}, "end": {"x.mj": 2}})

        assert run.windows[0].change("x.mj") is None

    def test_steady_decoding_takes_few_bytes(self):
        """20 minutes at 100 steps a second stay under 10 MB."""
        records = [
            step_record(
                i, start_s=1e4 + i * 0.0100003, execute_s=9e-3 + i * 1e-7, sampled=(1, 2, 3)
            )
            for i in range(64)
        ]
        line = json.dumps(encode_steps(records), separators=(",", ":"))

        assert len(line) / len(records) * 120_000 < 10e6


class TestFiles:
    def test_lines_are_in_the_file_as_soon_as_they_are_written(self, tmp_path):
        sink = JsonlFile(tmp_path / "run.jsonl")
        sink.write(HEADER)

        assert (tmp_path / "run.jsonl").read_bytes().endswith(b"\n")
        assert sink.num_bytes == (tmp_path / "run.jsonl").stat().st_size
        assert read_run(tmp_path / "run.jsonl").info.run_id == "run-0"
        sink.close()
        sink.close()

    def test_what_is_no_json_is_written_as_text(self, tmp_path):
        sink = JsonlFile(tmp_path / "run.jsonl")
        sink.write({**HEADER, "config": {"path": tmp_path}})
        sink.close()

        assert read_run(tmp_path / "run.jsonl").info.config == {"path": str(tmp_path)}

    def test_memory_is_bounded_and_counts_what_it_drops(self):
        sink = JsonlMemory(max_bytes=20_000)
        sink.write(HEADER)
        for first in range(0, 3200, 32):
            sink.write(encode_steps([step_record(first + i) for i in range(32)]))
        sink.write({"type": "overhead", "t_ns": 0, "num_lines_dropped": sink.num_lines_dropped})
        run = read_lines(sink.lines())

        assert sum(map(len, sink._bulk)) <= 20_000
        assert sink.num_lines_dropped == 100 - len(run.steps) // 32
        assert run.steps.index[-1] == 3199  # the newest are kept
        assert any("dropped from memory" in note for note in run.notes)


SOME_RUN = as_bytes(
    HEADER,
    {"type": "sensors", "t_ns": 1, "sensors": [{"name": "x.a", "unit": "count", "source": "é"}]},
    encode_steps([step_record(i, start_s=float(i)) for i in range(4)]),
    encode_requests([request_record()]),
    encode_samples("x", "fast", ("x.a",), [(100, 101, (2,)), (200, 201, (None,))]),
    {"type": "event", "t_ns": 7 * 10**9, "kind": "gc", "data": {"duration_ns": 5}},
    {"type": "end", "t_ns": 8 * 10**9},
)


class TestBrokenFiles:
    @settings(deadline=None, max_examples=200)
    @given(st.integers(0, sum(map(len, SOME_RUN))))
    def test_any_prefix_is_a_run_or_too_short_to_be_one(self, size):
        """As a killed process leaves it."""
        data = b"".join(SOME_RUN)[:size]
        lines = data.splitlines(keepends=True)
        if size < len(SOME_RUN[0]) - 1:
            with pytest.raises(RunFileError, match="not a run"):
                read_lines(lines)
            return
        run = read_lines(lines)
        whole = sum(1 for i in range(len(SOME_RUN)) if size >= len(b"".join(SOME_RUN[: i + 1])) - 1)

        assert run.ended == (whole == len(SOME_RUN))
        assert any("torn" in note for note in run.notes) == (len(lines) > whole)
        assert any("not closed" in note for note in run.notes) != run.ended
        assert len(run.steps) == (4 if whole >= 3 else 0)

    def test_a_broken_line_before_the_last_is_an_error_that_names_it(self):
        lines = [SOME_RUN[0], b'{"type": "ev\n', SOME_RUN[-1]]

        with pytest.raises(RunFileError, match="line 2"):
            read_lines(lines)

    @pytest.mark.parametrize(
        "line",
        [
            [1, 2],
            {"no": "type"},
            {"type": "steps", "n": 2},
            {"type": "steps", **encode_steps([step_record(0)]), "n": 3},
            {"type": "event", "kind": "gc"},
            {"type": "sensors", "t_ns": 0, "sensors": [{"unit": "count"}]},
        ],
    )
    def test_a_line_that_is_not_as_the_format_says_is_an_error(self, line):
        with pytest.raises(RunFileError, match="line 2"):
            read(line)

    def test_lines_and_keys_of_later_writers_are_passed_over(self):
        run = read({"type": "moon"}, {"type": "end", "t_ns": 9 * 10**9, "phase": 3})

        assert run.ended
        assert run.duration_ns == 4 * 10**9

    def test_another_version_is_refused_by_number(self):
        with pytest.raises(SchemaVersionError, match=r"version 2 .*version 1"):
            read_lines(as_bytes({**HEADER, "v": 2}))

    @pytest.mark.parametrize(
        "data", [b"", b"\n", b"\x00\x00", b"no json", b"[]\n", b'{"type": "end"}\n', b'{"v": 1}\n']
    )
    def test_what_is_no_run_is_refused(self, data, tmp_path):
        (tmp_path / "x.jsonl").write_bytes(data)

        with pytest.raises(RunFileError, match=r"x\.jsonl"):
            read_run(tmp_path / "x.jsonl")

    def test_a_header_without_its_fields_is_refused(self):
        with pytest.raises(RunFileError, match="lacks"):
            read_lines(as_bytes({"type": "run", "v": 1}))


def test_columns_share_their_memory_with_numpy():
    np = pytest.importorskip("numpy")
    steps = read(encode_steps([step_record(i, start_s=float(i)) for i in range(4)])).steps

    assert np.frombuffer(steps.t0_ns, "int64").tolist() == [0, 10**9, 2 * 10**9, 3 * 10**9]
    assert steps[2].t1_ns == 2 * 10**9 + 10**6
    assert math.isclose(steps[2].schedule_ns, 1e4)
