"""Ways to measure the wrong thing, and what the plugin says of them."""

import pytest

from tests.pytest_plugin.app_suite import benchmarks_of, run_suite, write_suite

pytest.importorskip("pytest_benchmark")
pytest_plugins = ["pytester"]

TEST = """
import pytest
PROMPTS = [[7, 8, 9] * 11]
{marker}
def test_app(benchmark, app):
    benchmark.pedantic(app, args=(PROMPTS,), rounds={rounds}, warmup_rounds={warmup})
"""


def figures(pytester, marker="", rounds=3, warmup=1):
    write_suite(pytester, TEST.format(marker=marker, rounds=rounds, warmup=warmup))
    rows, result, _ = benchmarks_of(pytester)
    return rows["test_app"]["extra_info"]["llm"], result.stdout.str()


def about_the_cache(llm):
    return [text for text in llm["warnings"] if "prefix cache" in text]


def test_a_cold_test_finds_nothing_cached_in_any_round(pytester):
    llm, _ = figures(pytester, '@pytest.mark.llm(cache="cold")')

    assert llm["prefix_hit_rate"] == 0
    assert llm["cache"] == "cold"
    assert about_the_cache(llm) == []


def test_a_warm_test_finds_all_full_blocks_but_the_last_token_cached(pytester):
    llm, _ = figures(pytester, '@pytest.mark.llm(cache="warm")')

    assert llm["prefix_hit_rate"] == pytest.approx(32 / 33)  # blocks of 16 of 33 tokens
    assert about_the_cache(llm) == []


def test_a_test_that_does_not_say_what_it_wants_of_the_cache_is_told_what_it_got(pytester):
    llm, printed = figures(pytester)

    (warning,) = about_the_cache(llm)
    assert "served 97% of the prompt" in warning
    assert f"test_app.py::test_app  warning: {warning}" in printed


@pytest.mark.parametrize("marker", ["", '@pytest.mark.llm(cache="warm")'])
def test_rounds_of_which_the_first_was_cold_are_not_taken_for_the_same(pytester, marker):
    llm, _ = figures(pytester, marker, warmup=0)

    (warning,) = about_the_cache(llm)
    assert "served 0% to 97% of the prompt" in warning


def test_a_call_that_returns_before_its_answer_is_noticed(pytester):
    write_suite(
        pytester,
        """
def test_app(benchmark, llm):
    stream = benchmark.pedantic(llm.stream, args=([7, 8, 9],), rounds=2)
    stream.close()
""",
    )
    rows, _, _ = benchmarks_of(pytester)

    assert list(rows) == ["test_app"]
    assert "no token came" in rows["test_app"]["extra_info"]["llm"]["warnings"][0]


@pytest.mark.parametrize("arguments", ['cache="hot"', '"cold"', "cold=True"])
def test_a_marker_that_means_nothing_is_refused_before_anything_runs(pytester, arguments):
    write_suite(pytester, TEST.format(marker=f"@pytest.mark.llm({arguments})", rounds=1, warmup=0))

    result = run_suite(pytester)

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(['*test_app*marker `llm` takes cache="cold" or cache="warm"*'])
