"""The engine with an executor that computes nothing: what is left is the host's work."""

from collections.abc import Sequence
from typing import Any

from nanovllm.config import ResolvedConfig
from nanovllm.core import Batch
from nanovllm.engine import Engine
from nanovllm.runtime.executor import Landed, StepTrace, no_graphs
from nanovllm.runtime.sampler import Sampled, SamplingRow

BLOCK_SIZE = 16


class NullExecutor:
    """Draws the token 1 for every row, at once."""

    def submit(self, batch: Batch, rows: Sequence[SamplingRow]) -> Landed:
        """See `nanovllm.runtime.executor.Executor`."""
        return Landed(Sampled([1] * len(rows), None), StepTrace("null"))

    def may_run_ahead(self, rows: Sequence[SamplingRow]) -> bool:
        """Never: there is nothing to wait for."""
        return False

    def describe_graphs(self) -> dict[str, Any]:
        """There are none."""
        return no_graphs()

    def recover(self) -> None:
        """Nothing is left behind."""

    def close(self) -> None:
        """Nothing to give back."""


def make_null_engine(num_seqs: int, max_model_len: int) -> Engine:
    """An engine with room for that many sequences of full length."""
    config = ResolvedConfig(
        device="cpu",
        dtype="float32",
        max_model_len=max_model_len,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_seqs * max_model_len,
        max_prefill_chunk=None,
        kvcache_block_size=BLOCK_SIZE,
        num_kvcache_blocks=num_seqs * (max_model_len // BLOCK_SIZE + 1),
        kv_cache_bytes=0,
        attention_backend="torch",
        graph_batch_sizes=(),
        graph_prompt_sizes=(),
        enable_prefix_caching=True,
        eos_token_ids=frozenset(),
        seed=0,
        max_queued_requests=None,
        freeze_gc=False,
        notes=(),
    )
    return Engine(config, NullExecutor(), tokenizer=None)
