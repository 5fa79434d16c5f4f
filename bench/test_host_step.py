"""The host step as a pytest-benchmark suite: `pytest bench/test_host_step.py`."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.host_step import BATCH_SIZES, BLOCK_SIZES, NUM_STEPS, HostLoop


@pytest.mark.parametrize("num_seqs", BATCH_SIZES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_decode_step(benchmark: BenchmarkFixture, num_seqs: int, block_size: int) -> None:
    benchmark.group = f"decode step, block size {block_size}"
    loop = HostLoop(num_seqs, block_size)
    loop.admit()
    benchmark.pedantic(loop.step, rounds=NUM_STEPS - 20, warmup_rounds=5)

    assert len(loop.state.running) == num_seqs


@pytest.mark.parametrize("num_seqs", [1, 64, 256])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_admission_and_first_step(
    benchmark: BenchmarkFixture, num_seqs: int, block_size: int
) -> None:
    benchmark.group = f"admission and first step, block size {block_size}"

    def setup() -> tuple[tuple[HostLoop], dict[str, object]]:
        return (HostLoop(num_seqs, block_size),), {}

    benchmark.pedantic(HostLoop.admit, setup=setup, rounds=5, warmup_rounds=1)
