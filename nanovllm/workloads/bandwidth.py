"""How fast this machine reads memory, and how long a decode step must take because of it.

At small batches a decode step reads every weight once and computes little with it, so that

    shortest step = (bytes of weights + bytes of K/V of all rows) / bytes read a second

no matter how good the code is. The share of this limit says how much is left to gain.
"""

import time
from typing import Any, Self

import attrs

from nanovllm.llm import LLM

BUFFER_BYTES = 256 * 2**20
"""Larger than the last cache of nearly every CPU, so that it is memory that is read."""

NUM_READS = 12


@attrs.frozen
class Bandwidth:
    """Bytes read a second, the best of a few reads of a large buffer."""

    bytes_per_s: float
    buffer_bytes: int

    def best(self, other: Self) -> Self:
        """The faster of two measurements: neighbours can only slow one down."""
        return max(self, other, key=lambda one: one.bytes_per_s)

    def limit_s(self, num_bytes: float) -> float:
        """Shortest time to read that much."""
        return num_bytes / self.bytes_per_s

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return attrs.asdict(self)


def measure_read_bandwidth(
    device: str, *, buffer_bytes: int = BUFFER_BYTES, num_reads: int = NUM_READS
) -> Bandwidth:
    """Read a buffer a few times, with every thread that torch uses.

    The largest element is searched for: one comparison per element, which vector units do faster
    than memory delivers.

    Args:
        device: "cpu" or "cuda:N".
        buffer_bytes: How much.
        num_reads: How often; the best counts, since neighbours can only slow it down.
    """
    # Delayed: loads torch, which whoever has an `LLM` has loaded.
    import torch

    buffer = torch.zeros(buffer_bytes // 4, dtype=torch.float32, device=device)
    best_s = float("inf")
    for _ in range(num_reads):
        start_s = time.perf_counter()
        buffer.amax().item()  # `item` waits for the device
        best_s = min(best_s, time.perf_counter() - start_s)
    return Bandwidth(buffer.numel() * 4 / best_s, buffer.numel() * 4)


def decode_step_bytes(llm: LLM, *, batch: int, num_context_tokens: float) -> float:
    """Bytes that a decode step must read: each matrix once, and the K/V of every row's context.

    Of the input embedding a step reads a row per token, which is nothing; it counts only where it
    is the output projection too. Counted from the model's shape, as `describe` tells it.
    """
    facts = llm.describe()
    model, config = facts["model"], facts["config"]
    embed, head = model["hidden_size"], model["head_dim"]
    num_heads, num_kv_heads = model["num_heads"], model["num_kv_heads"]
    attention = embed * head * (num_heads + 2 * num_kv_heads) + num_heads * head * embed
    layer = attention + 3 * embed * model["intermediate_size"]  # 3: gate, up and down
    values = model["num_layers"] * layer + model["vocab_size"] * embed
    num_slots = config["num_kvcache_blocks"] * config["kvcache_block_size"]
    kv_bytes_per_token = facts["memory"]["kv_cache_bytes"] / num_slots
    bytes_per_value = 4 if config["dtype"] == "float32" else 2
    return float(values * bytes_per_value + batch * num_context_tokens * kv_bytes_per_token)
