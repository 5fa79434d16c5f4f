"""The last minute of a run that still goes on."""

import io

import attrs
import pytest
from rich.console import Console

from telemetry import RunFileError
from telemetry.report.live import Tail, frame, render, watch
from tests.telemetry.report.golden_reports import FOLDER
from tests.telemetry.report.simulated import simulated_run

LINES = (FOLDER / "cpu.jsonl").read_bytes().splitlines(keepends=True)


def text_of(renderable):
    console = Console(file=io.StringIO(), width=100)
    console.print(renderable)
    return console.file.getvalue()


def test_a_file_is_followed_line_by_line_whatever_is_torn(tmp_path):
    path = tmp_path / "run.jsonl"
    whole = b"".join(LINES)
    tail = Tail(path)
    path.write_bytes(LINES[0])
    seen = [len(tail.run().steps)]
    for end in range(len(LINES[0]) + 700, len(whole) + 700, 700):  # most of these end inside a line
        with path.open("ab") as file:
            file.write(whole[path.stat().st_size : end])
        seen.append(len(tail.run().steps))

    assert seen == sorted(seen)
    assert seen[0] == 0
    assert tail.run().ended
    assert seen[-1] == 90


def test_what_is_long_past_is_forgotten_and_the_facts_are_kept(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"".join(LINES))

    short = Tail(path, window_s=1.0).run()

    assert 0 < len(short.steps) < 90
    assert short.info.model["name"] == "smollm2-135m"
    assert short.ledgers


def test_a_frame_shows_the_figures_of_the_window_alone():
    run = simulated_run(seconds=8.0)
    end_ns = run.last_ns
    in_window = [
        len(ids)
        for t1, ids in zip(run.steps.t1_ns, run.steps.sampled, strict=True)
        if t1 >= end_ns - 2 * 10**9
    ]

    rows = {row.label: row for row in frame(run, window_s=2.0).rows}

    assert float(rows["Tokens"].value.split()[0]) == pytest.approx(sum(in_window) / 2, rel=0.01)
    num_rows = run.steps.num_rows[-1]
    assert rows["Batch"].value == ("1 row" if num_rows == 1 else f"{num_rows} rows")
    assert rows["K/V blocks"].note.startswith("of 2,048")
    assert rows["GPU power"].value.endswith(" W")
    assert rows["Memory"].value == "42.0 GiB"


def test_a_run_without_a_step_yet_says_so():
    run = simulated_run(seconds=1.0)
    begun = attrs.evolve(
        run, steps=type(run.steps)(), requests=(), series={}, last_ns=run.info.start_mono_ns
    )

    assert "No step yet" in text_of(render(frame(begun)))


def test_watching_ends_with_the_run():
    run = simulated_run(seconds=1.0)
    going_on = attrs.evolve(run, ended=False)
    runs = iter([going_on, going_on, run])
    console = Console(file=io.StringIO(), width=100)
    slept = []

    watch(lambda: next(runs), console, sleep=slept.append)

    assert len(slept) == 2
    assert next(runs, None) is None
    assert run.info.model["name"] in console.file.getvalue()


def test_a_file_that_is_no_run_is_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("hello\nworld\n")

    with pytest.raises(RunFileError):
        Tail(path).run()
