"""What recording costs, against its budgets: `pytest bench/test_telemetry.py`.

The guards are several times the budgets, because machines that run them are shared. The figures to
quote are those of the table.
"""

import importlib
import json
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from nanovllm.records import StepRecord
from telemetry import Recorder, measure_observer_effect, read_run
from telemetry.providers.base import Tier
from telemetry.providers.gc_watch import GcWatch
from telemetry.providers.host import open_host
from telemetry.providers.nvml import open_nvml
from telemetry.ring import Ring
from telemetry.sinks.jsonl import JsonlFile, encode_steps

STEP_S = 2e-3


def record(index: int) -> StepRecord:
    """A decode step of eight sequences."""
    start_s = 1e4 + index * 1.00003e-2
    return StepRecord(
        index=index,
        start_s=start_s,
        end_s=start_s + 9.7e-3 + index % 7 * 1e-6,
        num_rows=8,
        num_decode_tokens=8,
        num_prefill_tokens=0,
        num_prefix_hit_tokens=0,
        num_waiting=0,
        num_running=8,
        num_free_blocks=900 - index % 100,
        num_used_blocks=100 + index % 100,
        num_cached_blocks=50,
        num_preempted=0,
        mode="native",
        bucket=None,
        fallback=None,
        schedule_s=2e-5 + index % 5 * 1e-7,
        execute_s=9e-3 + index % 11 * 1e-7,
        postprocess_s=5e-5,
        pack_s=1e-5,
        submit_s=2e-5,
        wait_s=8e-3,
        sampled=tuple(range(8)),
        finished=(),
    )


def median_s(benchmark: BenchmarkFixture) -> float:
    """Median of the rounds in seconds."""
    assert benchmark.stats is not None
    return float(benchmark.stats.stats.median)


class SteppingEngine:
    """Steps of 2 ms, most of which the thread waits as it would for a device."""

    def __init__(self) -> None:
        self._hooks: list[Callable[[Any], None]] = []
        self._index = 0

    def describe(self) -> dict[str, Any]:
        """The least that a recorder needs."""
        return {"device": {"type": "cpu"}, "memory": {}}

    def subscribe(self, hook: Callable[[Any], None], /) -> Callable[[], None]:
        """Have the hook called after each step."""
        self._hooks.append(hook)
        return lambda: self._hooks.remove(hook)

    def gaps_s(self, num_steps: int) -> list[float]:
        """Run steps; the times between their ends."""
        ends = []
        due = time.perf_counter()
        for _ in range(num_steps):
            # Whoever was frozen for a while does not make up for it by steps without a length.
            due = max(due + STEP_S, time.perf_counter())
            while (left := due - time.perf_counter()) > 0:
                time.sleep(min(left, 2e-4))
            for hook in self._hooks:
                hook(record(self._index))
            self._index += 1
            ends.append(time.perf_counter())
        return [b - a for a, b in pairwise(ends)]


@pytest.fixture
def nvml_stub(tmp_path: Path) -> Iterator[Any]:
    library: Any = importlib.import_module("tests.telemetry.nvml_stub.library")
    if library.compiler() is None:
        pytest.skip("no C compiler to build the stub of NVML with")
    stub = library.plug_in(library.build(tmp_path))
    stub.update(library.HEALTHY)
    yield stub
    library.plug_in(None)


def test_step_hook(benchmark: BenchmarkFixture) -> None:
    """Budget: 2 us."""
    push, step = Ring[StepRecord](1 << 16).push, record(0)
    benchmark.pedantic(push, args=(step,), rounds=200, iterations=1000, warmup_rounds=2)

    assert median_s(benchmark) < 4e-6


def test_reading_the_host(benchmark: BenchmarkFixture) -> None:
    """The fast sensors of one tick. Budget of a tick: 1 ms."""
    watch = GcWatch()
    provider = open_host(watch)
    benchmark.pedantic(provider.read, args=(Tier.FAST,), rounds=500, warmup_rounds=20)
    provider.close()
    watch.close()

    assert median_s(benchmark) < 1e-3


def test_reading_nvml(benchmark: BenchmarkFixture, nvml_stub: Any) -> None:
    """The binding alone, over a driver that answers at once. Budget of a tick: 1 ms."""
    provider = open_nvml(None)
    benchmark.pedantic(provider.read, args=(Tier.FAST,), rounds=500, warmup_rounds=20)

    assert median_s(benchmark) < 1e-3


def test_encoding_a_chunk_of_steps(benchmark: BenchmarkFixture) -> None:
    """32 steps of the writer's. Budget of what holds the interpreter: 200 us."""
    records = [record(i) for i in range(32)]
    benchmark.pedantic(
        lambda: json.dumps(encode_steps(records), separators=(",", ":")),
        rounds=200,
        warmup_rounds=5,
    )

    assert median_s(benchmark) < 1e-3


def test_writing_and_reading_20_minutes(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """120,000 steps: reading is what is timed; the size is told beside it."""
    path = tmp_path / "run.jsonl"
    sink = JsonlFile(path)
    sink.write(
        {
            "type": "run",
            "v": 1,
            "run_id": "x",
            "start_wall_ns": 0,
            "start_mono_ns": 0,
            "mode": "live",
            "period_s": 0.1,
        }
    )
    for first in range(0, 120_000, 64):
        sink.write(encode_steps([record(first + i) for i in range(64)]))
    sink.close()
    run = benchmark.pedantic(read_run, args=(path,), rounds=3)
    benchmark.extra_info["file_bytes"] = sink.num_bytes
    print(f"\n20 minutes of 100 steps/s: {sink.num_bytes / 1e6:.1f} MB")

    assert len(run.steps) == 120_000
    assert sink.num_bytes < 20e6


def test_sampler_and_writer(benchmark: BenchmarkFixture, nvml_stub: Any, tmp_path: Path) -> None:
    """Steps of 2 ms for 3 s at 10 Hz. Budgets: 1 % of a core, 1 ms a tick, chunks of 200 us."""
    engine = SteppingEngine()
    with Recorder(engine, tmp_path / "run.jsonl") as recorder:
        benchmark.pedantic(engine.gaps_s, args=(1500,), rounds=1)
        overhead = recorder.overhead()
    seconds = median_s(benchmark)  # of one round
    shares = {
        "sampler_share_of_a_core": overhead.sampler_cpu_ns / 1e9 / seconds,
        "writer_share_of_a_core": overhead.writer_cpu_ns / 1e9 / seconds,
        "mean_tick_us": overhead.in_call_ns / overhead.num_ticks / 1e3,
        "worst_tick_us": overhead.worst_tick_ns / 1e3,
        "worst_chunk_us": overhead.worst_chunk_ns / 1e3,
    }
    benchmark.extra_info.update(shares)
    print("\n" + ", ".join(f"{name} {value:.4g}" for name, value in shares.items()))

    assert shares["sampler_share_of_a_core"] < 0.05
    assert shares["writer_share_of_a_core"] < 0.10


def test_observer_effect(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """Gaps between steps of 2 ms, paused and live in turn. Budget: p50 0.5 %, p99 2 %."""
    engine = SteppingEngine()
    effect = benchmark.pedantic(
        measure_observer_effect,
        args=(lambda: engine.gaps_s(400), lambda: Recorder(engine, tmp_path / "run.jsonl")),
        rounds=1,
    )
    benchmark.extra_info.update(p50_change=effect.p50_change, p99_change=effect.p99_change)
    print(f"\np50 {effect.p50_change:+.3%}, p99 {effect.p99_change:+.3%}")
    print(
        f"median gap off {effect.p50_off_ns / 1e6:.3f} ms, live {effect.p50_live_ns / 1e6:.3f} ms"
    )

    assert effect.p50_change < 0.05
