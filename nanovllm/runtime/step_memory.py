"""How much memory the biggest step takes beside weights and K/V cache: found by running it."""

from typing import Protocol

import torch

from nanovllm.model.decoder import Decoder
from nanovllm.runtime.fused_decoder import FusedDecoder
from nanovllm.runtime.kv_cache import allocate_kv_cache
from nanovllm.runtime.paged_attention import PagedAttention


class MemoryProbe(Protocol):
    """An allocator that remembers how much it had handed out at most."""

    def restart(self) -> int:
        """Forget the peak; returns the bytes that are handed out now."""

    def peak_bytes(self) -> int:
        """The most bytes that were handed out since."""


class CudaMemoryProbe:
    """torch's allocator on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def restart(self) -> int:
        """See `MemoryProbe`."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        return int(torch.cuda.memory_allocated(self._device))

    def peak_bytes(self) -> int:
        """See `MemoryProbe`."""
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_allocated(self._device))


def measure_step_bytes(
    decoder: Decoder,
    attention: PagedAttention,
    probe: MemoryProbe,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
) -> int:
    """Run a step of the largest size, all of it prompts, and say what it took.

    Its K/V go nowhere and it reads one block over and over, so no cache of full size is needed.
    Compiles and warms up the kernels of prefill on the way.

    Args:
        decoder: On its device.
        attention: How steps attend.
        probe: Of that device.
        max_num_batched_tokens: Positions of a step at most.
        max_num_seqs: Rows of a step at most.
        max_model_len: Positions of a row at most.

    Returns:
        Bytes, the buffers for logits included; weights and K/V cache not.
    """
    device, dtype = decoder.embedding.device, decoder.embedding.dtype
    block_size = attention.block_size
    before_bytes = probe.restart()
    kv_cache = allocate_kv_cache(
        decoder.config, num_blocks=1, block_size=block_size, dtype=dtype, device=device
    )
    cache_bytes = kv_cache.numel() * kv_cache.element_size()
    fused = FusedDecoder.create(decoder, kv_cache, max_model_len=max_model_len)
    num_rows = min(max_num_seqs, -(-max_num_batched_tokens // max_model_len))
    lens = [max_model_len] * (num_rows - 1)
    lens.append(min(max_model_len, max_num_batched_tokens - sum(lens)))

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    num_tokens = sum(lens)
    context_lens = int32(lens)
    starts = int32([sum(lens[:row]) for row in range(num_rows + 1)])
    tables = torch.zeros(
        num_rows, -(-max_model_len // block_size), dtype=torch.int32, device=device
    )
    positions = torch.cat(
        [torch.arange(length, dtype=torch.int32, device=device) for length in lens]
    )

    def attend(
        query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
    ) -> torch.Tensor:
        return attention.prefill(
            query, key_cache, value_cache, tables, context_lens, starts, max(lens)
        )

    hidden = fused.hidden(
        torch.zeros(num_tokens, dtype=torch.int32, device=device),
        positions,
        torch.full((num_tokens,), -1, dtype=torch.int32, device=device),
        attend,
    )
    sampled = hidden[:1].expand(max_num_seqs, -1)
    logits = decoder.lm_head(sampled).clone()  # twice: the product, and the buffer it goes to
    del hidden, logits
    return probe.peak_bytes() - before_bytes - cache_bytes
