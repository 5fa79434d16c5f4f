"""What an unmodified benchmark of an app gains."""

import pytest

from tests.pytest_plugin.app_suite import TEST, benchmarks_of, run_suite, write_suite

pytest.importorskip("pytest_benchmark")
pytest_plugins = ["pytester"]


def test_an_unmodified_test_gains_rows_whose_samples_are_requests_tokens_and_rounds(pytester):
    write_suite(pytester)

    rows, result, saved = benchmarks_of(pytester)

    # 4 rounds of 2 prompts of 5 tokens, which have 4 times between them; no warm-up.
    assert {name: row["stats"]["rounds"] for name, row in rows.items()} == {
        "test_app": 4,
        "test_app:ttft": 4 * 2,
        "test_app:itl": 4 * 2 * 4,
        "test_app:itl_p99": 4,
    }
    assert [row["group"] for row in rows.values()] == [None, "ttft", "itl", "itl_p99"]
    assert rows["test_app:itl"]["fullname"] == "test_app.py::test_app:itl"
    result.stdout.fnmatch_lines(["test_app.py::test_app  TTFT p50 * ITL p50 * (n=32)*"])
    llm = saved["machine_info"]["llm"]
    assert (llm["dtype"], llm["attention_backend"], llm["buckets"]) == ("float32", "torch", [])
    assert llm["num_threads"] == 1


def test_times_between_tokens_and_to_the_first_make_up_the_call(pytester):
    write_suite(pytester)

    rows, _, _ = benchmarks_of(pytester)

    first, gaps = rows["test_app:ttft"]["stats"], rows["test_app:itl"]["stats"]
    one_request = first["mean"] + 4 * gaps["mean"]  # both run side by side
    assert 0 < one_request <= rows["test_app"]["stats"]["mean"]
    for data in (first["data"], gaps["data"]):
        assert all(value > 0 for value in data)
    assert max(gaps["data"]) == max(rows["test_app:itl_p99"]["stats"]["data"])


def test_extra_info_gives_a_percentile_only_where_the_sample_supports_it(pytester):
    write_suite(pytester)

    rows, _, _ = benchmarks_of(pytester)

    llm = rows["test_app"]["extra_info"]["llm"]
    assert llm["itl"].keys() == {"num_samples", "mean_s", "p50_s", "p90_s", "max_s", "left_out"}
    assert "p99 needs 200" in llm["itl"]["left_out"]
    assert "there are 32" in llm["itl"]["left_out"]
    assert llm["itl"]["max_s"] == max(rows["test_app:itl"]["stats"]["data"])
    assert llm["num_tokens"] == 4 * 2 * 5
    assert llm["modes"] == {"eager": 4 * 5}
    assert llm["disturbance"]["num_gc_pauses"] >= 0


def test_a_calibrated_benchmark_gains_them_too_and_keeps_its_own_timer(pytester):
    write_suite(
        pytester,
        """
import time, pytest
PROMPTS = [[7, 8, 9] * 11]
@pytest.mark.benchmark(timer=time.process_time, group="mine", max_time=0.01, min_rounds=3)
def test_app(benchmark, app):
    benchmark(app, PROMPTS)
""",
    )

    rows, _, _ = benchmarks_of(pytester)

    rounds = rows["test_app"]["stats"]["rounds"]
    assert rows["test_app"]["options"]["timer"] == "process_time"
    assert rows["test_app:itl"]["stats"]["rounds"] == rounds * 4
    assert rows["test_app:itl_p99"]["stats"]["rounds"] == rounds
    assert rows["test_app:itl"]["group"] == "mine itl"


def test_the_gate_fails_and_names_the_p99_when_tokens_are_slowed(pytester, monkeypatch):
    write_suite(pytester)
    before = run_suite(pytester, "--benchmark-save=base")
    assert before.ret == 0

    monkeypatch.setenv("SLOWED_BY_S", "0.04")
    after = run_suite(pytester, "--benchmark-compare=0001", "--benchmark-compare-fail=median:25%")

    assert after.ret != 0  # 1 on a command line, where pytest-benchmark's exception ends the run
    after.stdout.fnmatch_lines(["test_app.py::test_app  TTFT*"])
    (*_, regressed) = after.stderr.str().split("Performance has regressed:")
    assert "test_app:itl_p99 " in regressed
    assert "test_app:itl " in regressed
    assert "machine_info is different" not in after.stderr.str()


def test_a_failing_test_gains_nothing(pytester):
    write_suite(pytester, TEST + "    assert False\n")

    result = run_suite(pytester)

    result.assert_outcomes(failed=1)
    assert ":itl" not in result.stdout.str()


@pytest.mark.parametrize(
    ("changed", "still_measured"),
    [
        # The class that rows are made of is gone.
        ("import pytest_benchmark.stats\ndel pytest_benchmark.stats.Metadata\n", 4 * 2 * 4),
        # A benchmark no longer tells how many rounds it ran: all of the test is measured.
        (
            "from pytest_benchmark.fixture import BenchmarkFixture\n"
            "def missing(self): raise AttributeError('stats')\n"
            "BenchmarkFixture.stats = property(missing, lambda self, stats: None)\n",
            5 * 2 * 4,
        ),
    ],
    ids=["rows", "rounds"],
)
def test_without_the_private_parts_that_rows_need_the_figures_are_in_extra_info(
    pytester, monkeypatch, changed, still_measured
):
    fixture = pytest.importorskip("pytest_benchmark.fixture")
    stats = pytest.importorskip("pytest_benchmark.stats")
    monkeypatch.setattr(stats, "Metadata", stats.Metadata)  # undone after this test
    write_suite(pytester, changed + TEST)
    try:
        rows, result, _ = benchmarks_of(pytester)
    finally:
        if isinstance(vars(fixture.BenchmarkFixture).get("stats"), property):
            del fixture.BenchmarkFixture.stats

    assert list(rows) == ["test_app"]
    assert rows["test_app"]["extra_info"]["llm"]["itl"]["num_samples"] == still_measured
    (line,) = [line for line in result.outlines if line.startswith("no rows")]
    assert "pytest-benchmark" in line
