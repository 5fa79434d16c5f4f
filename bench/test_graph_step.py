"""What the host does for one captured decode step, as a suite: `pytest bench/test_graph_step.py`.

Packing, handing over and taking back the tokens, with a device that does nothing and is done at
once, so that only the host is measured. Rows have contexts of 1,024 tokens in blocks of 64, at most
4,096 (64 table columns). Each step has a batch of its own, as each one's lengths grow.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from graphs import (
    CaptureInfo,
    Event,
    GraphCaps,
    GraphKey,
    Program,
    SessionInfo,
    Statics,
    plan_buckets,
)
from graphs.backend import ignore_event
from nanovllm.core import Batch
from nanovllm.model.config import read_model_config
from nanovllm.runtime.captured_steps import CapturedSteps
from nanovllm.runtime.decode_program import DecodeStatics, decode_layout
from nanovllm.runtime.device_queue import Ticket
from nanovllm.runtime.fused_decoder import FusedDecoder
from nanovllm.runtime.graph_executor import GraphExecutor
from nanovllm.runtime.kv_cache import allocate_kv_cache
from nanovllm.runtime.paged_attention import AttentionShape, TritonAttention
from nanovllm.runtime.sampler import SamplingRow
from nanovllm.runtime.verify_model import random_decoder
from nanovllm.sampling_params import SamplingParams

BATCH_SIZES = (1, 8, 64, 256)
CONTEXT_LEN = 1024
BLOCK_SIZE = 64
NUM_TABLE_COLUMNS = 64
PARAMS = {
    "greedy": SamplingParams(temperature=0),
    "sample": SamplingParams(temperature=0.8, min_p=0.05),
}

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": BLOCK_SIZE * NUM_TABLE_COLUMNS,
}
"""As small as can be: none of it runs."""


@attrs.frozen
class NullStep:
    """A captured step that does nothing."""

    key: GraphKey
    info: CaptureInfo

    def replay(self) -> None:
        """See `Replayable`."""


class NullSession:
    """See `GraphSession`."""

    def capture(
        self, key: GraphKey, program: Program, *, reset: Callable[[], None], warmups: int = 2
    ) -> NullStep:
        """Run nothing."""
        return NullStep(key, CaptureInfo(key))

    def seal(self) -> SessionInfo:
        """See `GraphSession`."""
        return SessionInfo(())

    def close(self) -> None:
        """See `GraphSession`."""

    def __enter__(self) -> "NullSession":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class NullBackend:
    """See `GraphBackend`."""

    name = "null"
    caps = GraphCaps(captures=True, shares_pool=True, verifies=False)

    def session(
        self, statics: Statics, on_event: Callable[[Event], None] = ignore_event
    ) -> NullSession:
        """See `GraphBackend`."""
        return NullSession()


class NullQueue:
    """A device that copies nothing and is done at once."""

    def host_buffer(self, num_words: int) -> torch.Tensor:
        """See `DeviceQueue`."""
        return torch.zeros(num_words, dtype=torch.int32)

    def upload(self, host: torch.Tensor, device: torch.Tensor) -> None:
        """See `DeviceQueue`."""

    def run(self, work: Callable[[], object]) -> None:
        """See `DeviceQueue`."""
        work()

    def download(self, device: torch.Tensor, host: torch.Tensor) -> Ticket:
        """See `DeviceQueue`."""
        return DoneTicket()

    def close(self) -> None:
        """See `DeviceQueue`."""

    def give_back(self) -> None:
        """See `DeviceQueue`."""


class DoneTicket:
    """See `Ticket`."""

    def wait(self) -> None:
        """Nothing to wait for."""


def make_executor(max_num_rows: int) -> GraphExecutor:
    """An executor of captured steps on a device that does nothing."""
    config = read_model_config(MODEL, source="benchmark")
    decoder = random_decoder(config)
    kv_cache = allocate_kv_cache(
        config, num_blocks=1, block_size=BLOCK_SIZE, dtype=torch.float32, device=torch.device("cpu")
    )
    max_model_len = BLOCK_SIZE * NUM_TABLE_COLUMNS
    fused = FusedDecoder.create(decoder, kv_cache, max_model_len=max_model_len)
    statics = DecodeStatics.create(
        fused, decode_layout(max_num_rows, NUM_TABLE_COLUMNS, pad_block=0)
    )
    shape = AttentionShape(
        config.num_kv_heads, config.head_dim, BLOCK_SIZE, max_model_len, num_sms=132
    )
    attention = TritonAttention(shape)
    captured = CapturedSteps(
        statics, attention, plan_buckets(max_num_rows), NullBackend(), ignore_event
    )
    return GraphExecutor(statics, attention, captured, NullQueue())


def make_steps(
    num_rows: int, variant: str, *, num_steps: int = 64
) -> list[tuple[Batch, list[SamplingRow]]]:
    """Batches as `build_batch` makes them, one for each of some successive steps."""
    rows = np.arange(num_rows, dtype=np.int32)
    steps = []
    for index in range(num_steps):
        lens = np.full(num_rows, CONTEXT_LEN + index, np.int32)
        num_blocks = -(-int(lens[0]) // BLOCK_SIZE)
        tables = (np.arange(num_rows * num_blocks, dtype=np.int32)).reshape(num_rows, num_blocks)
        batch = Batch(
            num_decodes=num_rows,
            input_ids=rows,
            positions=lens - 1,
            slot_mapping=tables[:, -1] * BLOCK_SIZE + (lens - 1) % BLOCK_SIZE,
            context_lens=lens,
            block_tables=tables,
            cu_seqlens_q=np.arange(num_rows + 1, dtype=np.int32),
            sampled_rows=rows,
            logits_indices=rows,
            max_seqlen_q=1,
            sources=rows,
        )
        sampling_rows = [
            SamplingRow(PARAMS[variant], seed=row, position=int(lens[0])) for row in range(num_rows)
        ]
        steps.append((batch, sampling_rows))
    return steps


@pytest.mark.parametrize("num_rows", BATCH_SIZES)
@pytest.mark.parametrize("variant", PARAMS)
def test_captured_step(benchmark: BenchmarkFixture, variant: str, num_rows: int) -> None:
    benchmark.group = f"captured step, {variant}"
    executor = make_executor(max(BATCH_SIZES))
    steps: Iterator[Any] = itertools.cycle(make_steps(num_rows, variant))

    def step() -> int:
        flight = executor.submit(*next(steps))
        sampled, _ = flight.result()
        return len(sampled.token_ids)

    with torch.inference_mode():
        count = benchmark.pedantic(step, rounds=300, warmup_rounds=20)

    assert count == num_rows
