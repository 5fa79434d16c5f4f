import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm import RequestError
from nanovllm.workloads.arrivals import Arrival, poisson, read_trace, recorded, write_trace
from tests.bench.step_records import request


def arrivals(count=50, rate=4.0, seed=0):
    return poisson(count, rate=rate, num_prompt_tokens=8, num_output_tokens=3, seed=seed)


def test_equal_seeds_give_equal_arrivals_and_others_do_not():
    assert arrivals(seed=1) == arrivals(seed=1) != arrivals(seed=2)


def test_times_between_poisson_arrivals_are_exponential_with_the_mean_of_the_rate():
    due = [one.due_s for one in arrivals(4000, rate=4.0)]
    gaps = [after - before for before, after in itertools.pairwise(due)]

    assert due[0] == 0
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(0.25, rel=0.1)  # of an exponential: its mean


def test_at_an_infinite_rate_all_come_at_once():
    assert {one.due_s for one in arrivals(rate=float("inf"))} == {0.0}


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(RequestError, match="above 0 requests a second"):
        arrivals(rate=rate)


@given(st.lists(st.builds(Arrival, st.floats(0, 1e6), st.integers(1, 99), st.integers(1, 99))))
def test_a_trace_reads_back_as_it_was_written_in_order_of_time(tmp_path_factory, given_arrivals):
    path = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    write_trace(path, given_arrivals)
    if not given_arrivals:
        with pytest.raises(RequestError, match="has no requests"):
            read_trace(path)
        return

    assert read_trace(path) == tuple(sorted(given_arrivals, key=lambda one: one.due_s))


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[1, 2, 3]",
        '{"due_s": 0}',
        '{"due_s": -1, "num_prompt_tokens": 1, "num_output_tokens": 1}',
        '{"due_s": 0, "num_prompt_tokens": 0, "num_output_tokens": 1}',
        '{"due_s": "soon", "num_prompt_tokens": 1, "num_output_tokens": 1}',
    ],
)
def test_a_line_that_is_no_arrival_is_named(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"due_s": 0, "num_prompt_tokens": 1, "num_output_tokens": 1}\n' + line)

    with pytest.raises(RequestError, match="line 2"):
        read_trace(path)


def test_a_trace_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(RequestError, match="can't be read"):
        read_trace(tmp_path / "none.jsonl")


def test_what_an_engine_served_becomes_a_trace_that_starts_at_zero():
    served = [
        request(arrival_s=12.0, num_prompt_tokens=5, num_generated_tokens=2),
        request(arrival_s=10.0, num_prompt_tokens=7, num_generated_tokens=3),
        request(arrival_s=11.0, num_generated_tokens=0),  # aborted before it had a token
    ]

    assert recorded(served) == (Arrival(0.0, 7, 3), Arrival(2.0, 5, 2))
    assert recorded([]) == ()
