import itertools

import pytest

from nanovllm import RequestError
from nanovllm.workloads.arrivals import Arrival, poisson
from nanovllm.workloads.open_loop import LoadReport, Objective, Served, run_load
from nanovllm.workloads.token_log import SequenceTimes
from tests.bench.step_records import request
from tests.engines import is_idle, tiny_llm


@pytest.fixture(scope="module")
def llm():
    with tiny_llm(attention_backend="torch") as engine:
        yield engine


def load(count, rate=float("inf"), num_output_tokens=4):
    return poisson(
        count, rate=rate, num_prompt_tokens=9, num_output_tokens=num_output_tokens, seed=0
    )


def test_every_request_of_a_load_is_answered_in_full(llm):
    report = run_load(llm, load(6))

    assert len(report.served) == 6
    assert report.num_failed == 0
    assert (report.num_prompt_tokens, report.num_output_tokens) == (6 * 9, 6 * 4)
    assert [one.num_samples for one in report.distributions().values()] == [6, 6, 6 * 3, 6]
    assert report.num_good == 6  # nothing is asked of them
    assert is_idle(llm)


def test_a_request_is_timed_from_when_it_was_due_and_not_before(llm):
    arrivals = load(5, rate=200)

    report = run_load(llm, arrivals)

    due = [one.due_s for one in report.served]
    for (before, after), (a, b) in zip(
        itertools.pairwise(due), itertools.pairwise(arrivals), strict=True
    ):
        assert after - before == pytest.approx(b.due_s - a.due_s)
    for one in report.served:
        assert one.record.arrival_s >= one.due_s
        assert one.ttft_s > 0
        assert one.e2el_s == pytest.approx(one.ttft_s + sum(one.times.gaps_s))


def test_no_more_than_so_many_are_in_flight(llm):
    most = 0

    def watch(step):
        nonlocal most
        most = max(most, step.num_rows)

    end = llm.subscribe(watch)
    report = run_load(llm, load(7), max_in_flight=2)
    end()

    assert len(report.served) == 7
    assert most == 2
    # Each is timed from when it was sent: waiting for others to end is not its latency.
    for one in report.served:
        assert one.due_s == one.record.arrival_s


def test_two_equal_loads_find_nothing_cached_of_each_other(llm):
    for _ in range(2):
        report = run_load(llm, [Arrival(0, 64, 2)])
        assert [one.record.num_prefix_hit_tokens for one in report.served] == [0]


def test_a_request_that_can_not_run_leaves_nothing_behind(llm):
    with pytest.raises(RequestError):
        run_load(llm, [Arrival(0, 8, 50), Arrival(0, 10_000, 2)])

    assert is_idle(llm)


def served(ttft_s, *gaps_s):
    tokens = [10 + ttft_s]
    for gap in gaps_s:
        tokens.append(tokens[-1] + gap)
    return Served(10.0, request(), SequenceTimes(tuple(tokens)))


def test_goodput_counts_the_requests_that_kept_all_of_the_objective():
    requests = (served(0.2, 0.01, 0.03), served(0.4, 0.01), served(0.2, 0.05), served(0.2))

    def good(objective):
        return LoadReport(requests, 0, 2.0, Objective.parse(objective)).num_good

    assert good("ttft:300") == 3
    assert good("tpot:30") == 3  # the mean of a request's gaps; one token has none
    assert good("ttft:300,tpot:30") == 2
    assert good("e2el:245") == 2


def test_figures_are_rates_over_the_whole_load():
    data = LoadReport((served(0.2, 0.1), served(0.3)), 1, 4.0, Objective(ttft_s=0.25)).as_data()

    assert data["requests_per_s"] == 0.5
    assert data["output_tokens_per_s"] == 3 / 4
    assert data["total_tokens_per_s"] == (3 + 8) / 4
    assert (data["num_good"], data["goodput_per_s"], data["num_failed"]) == (1, 0.25, 1)
    assert data["ttft"]["max_s"] == pytest.approx(0.3)


def test_an_objective_reads_in_milliseconds_and_says_so():
    objective = Objective.parse("ttft:500,e2el:3000")

    assert objective == Objective(ttft_s=0.5, e2el_s=3.0)
    assert str(objective) == "TTFT <= 500 ms, E2EL <= 3000 ms"
    assert str(Objective()) == "none"


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft:fast", "latency:5", "ttft:-1", "tpot:0", "ttft:nan"]
)
def test_an_objective_that_is_none_is_refused(text):
    with pytest.raises(RequestError, match="ttft:500,tpot:50,e2el:3000"):
        Objective.parse(text)
