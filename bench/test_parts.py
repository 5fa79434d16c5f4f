"""The engine's parts by themselves: sampler, detokenizer, admission, prefix hit.

    pytest bench/test_parts.py

A run of a case is what `bench.compare` compares between commits.
"""

from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench import cases
from bench.cases import Case


def measure(benchmark: BenchmarkFixture, case: Case, rounds: int = 50) -> None:
    def setup() -> tuple[tuple[object], dict[str, object]]:
        return (case.prepare(),), {}

    benchmark.pedantic(case.run, setup=setup, rounds=rounds, warmup_rounds=5)


@pytest.mark.parametrize("num_rows", [1, 8, 64])
@pytest.mark.parametrize(
    "params",
    [
        pytest.param({"temperature": 0}, id="greedy"),
        pytest.param({"temperature": 1}, id="plain"),
        pytest.param({"temperature": 0.8, "top_k": 50, "top_p": 0.95}, id="top-k top-p"),
    ],
)
def test_sampler(benchmark: BenchmarkFixture, params: dict[str, Any], num_rows: int) -> None:
    benchmark.group = "sampler, vocabulary of 49,152"
    measure(benchmark, cases.sampler(num_rows, **params), rounds=30)


@pytest.mark.parametrize("num_tokens", [1, 64])
def test_detokenizer(benchmark: BenchmarkFixture, num_tokens: int) -> None:
    benchmark.group = "detokenizer, token by token after a prompt"
    measure(benchmark, cases.detokenizer(num_tokens))


@pytest.mark.parametrize("is_cached", [False, True], ids=["new", "cached"])
@pytest.mark.parametrize("num_prompt_tokens", [256, 2048])
def test_admission(benchmark: BenchmarkFixture, num_prompt_tokens: int, is_cached: bool) -> None:
    benchmark.group = "16 prompts admitted and their first step planned"
    measure(benchmark, cases.admission(16, num_prompt_tokens, is_cached=is_cached))
