"""How evenly the engine steps: 20,000 steps of 64 live sequences, without a model, with GC on.

    pytest bench/test_jitter.py -s

Long-lived services meet their worst step when a collection falls into it. `gc.freeze` after
loading keeps what is alive then out of later collections. The thread's CPU time is told beside the
wall time: a pause for GC is in both, what neighbours on the machine take is in the latter only.
"""

import gc
import time
from contextlib import nullcontext

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.null_engine import make_null_engine
from nanovllm.engine import Engine
from nanovllm.prompts import Prompt
from nanovllm.sampling_params import SamplingParams
from nanovllm.workloads.distribution import Distribution
from nanovllm.workloads.disturbances import DisturbanceWatch, settled_heap

NUM_STEPS = 20_000
NUM_SEQS = 64
NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 32, 256


@pytest.fixture
def heap_of_a_service() -> list[object]:
    """Objects as many as a process with torch and an app in it has."""
    return [{"index": i, "name": str(i), "parts": [i]} for i in range(200_000)]


def keep_live(engine: Engine, num_seqs: int) -> None:
    """Queue requests until that many are live."""
    params = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
    live = len(engine.state.running) + len(engine.state.waiting)
    engine.add([Prompt(None, tuple(range(NUM_PROMPT_TOKENS)), params)] * (num_seqs - live))


@pytest.mark.parametrize("is_frozen", [False, True], ids=["gc", "gc and freeze"])
def test_steps_without_a_model(
    benchmark: BenchmarkFixture, heap_of_a_service: list[object], is_frozen: bool
) -> None:
    benchmark.group = f"{NUM_STEPS:,} steps of {NUM_SEQS} sequences, no model"
    engine = make_null_engine(NUM_SEQS, NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS)
    walls_s: list[float] = []
    cpus_s: list[float] = []

    def run() -> None:
        for _ in range(NUM_STEPS):
            if len(engine.state.running) < NUM_SEQS:
                keep_live(engine, NUM_SEQS)
            start_s, cpu_s = time.perf_counter(), time.thread_time()
            engine.step()
            cpus_s.append(time.thread_time() - cpu_s)
            walls_s.append(time.perf_counter() - start_s)

    keep_live(engine, NUM_SEQS)
    for _ in range(100):
        engine.step()
    assert gc.isenabled()
    with settled_heap() if is_frozen else nullcontext(), DisturbanceWatch() as watch:
        benchmark.pedantic(run, rounds=1)
        disturbance = watch.so_far()

    pauses_s = disturbance.gc_pauses_s
    assert len(heap_of_a_service) == 200_000
    benchmark.extra_info["disturbance"] = disturbance.as_data()
    lines = [f"{len(pauses_s)} pauses for GC, the longest {max(pauses_s, default=0) * 1e6:.0f} us"]
    for name, sample in (("wall", walls_s), ("cpu", cpus_s)):
        steps = Distribution.of(sample)
        benchmark.extra_info[f"step_{name}"] = steps.as_data()
        figures = {
            "p50": steps.median_s,
            "p99": steps.percentile_s(99),
            "p99.9": steps.percentile_s(99.9),
            "worst": steps.max_s,
        }
        told = ", ".join(f"{what} {value * 1e6:.0f}" for what, value in figures.items() if value)
        lines.append(f"{name} time of a step in us: {told}")
    print("\n" + "\n".join(lines))
