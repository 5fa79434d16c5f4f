"""End to end under load: requests that come by themselves.

    pytest bench/test_load.py -s

`nanovllm bench throughput` does the same for any model.
"""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from nanovllm import LLM
from nanovllm.workloads.arrivals import Arrival, poisson
from nanovllm.workloads.open_loop import LoadReport, Objective, run_load
from nanovllm.workloads.tables import load_lines, table

OBJECTIVE = Objective(ttft_s=0.5, tpot_s=0.05)

# As a chat goes: short and long prompts, in bursts. Due times in seconds, then tokens.
BURSTS = tuple(
    Arrival(start_s + 0.05 * i, num_prompt_tokens, num_output_tokens)
    for start_s in (0.0, 2.0, 4.0, 6.0)
    for i, (num_prompt_tokens, num_output_tokens) in enumerate(
        [(24, 48), (200, 16), (32, 32), (64, 64)]
    )
)


@pytest.mark.parametrize("rate", [1.0, 4.0, 8.0])
def test_poisson_arrivals(benchmark: BenchmarkFixture, smollm2: LLM, rate: float) -> None:
    benchmark.group = "SmolLM2-135M, 24 requests of 32 + 32 tokens as they come"
    arrivals = poisson(24, rate=rate, num_prompt_tokens=32, num_output_tokens=32, seed=0)
    serve(benchmark, smollm2, arrivals, f"{rate:g} req/s")


def test_bursts(benchmark: BenchmarkFixture, smollm2: LLM) -> None:
    benchmark.group = "SmolLM2-135M, bursts of mixed requests"
    serve(benchmark, smollm2, BURSTS, "bursts")


def serve(benchmark: BenchmarkFixture, llm: LLM, arrivals: tuple[Arrival, ...], name: str) -> None:
    reports: list[LoadReport] = []
    run_load(llm, arrivals[:2])  # to warm up

    def run() -> None:
        reports.append(run_load(llm, arrivals, objective=OBJECTIVE))

    benchmark.pedantic(run, rounds=1)

    (report,) = reports
    assert report.num_failed == 0
    benchmark.extra_info["load"] = report.as_data()
    print("\n" + "\n".join(table([(name, load_lines(report, limit_tokens_per_s=None))])))
