"""The paged K/V cache: its size in bytes, and its memory."""

import math

import numpy as np
import torch

from nanovllm.model.config import ModelConfig


def block_bytes(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: keys and values of `block_size` positions in every layer."""
    values_per_position = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    return values_per_position * block_size * dtype.itemsize


def allocate_kv_cache(
    model: ModelConfig,
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Memory for `num_blocks` blocks: `[L, 2, num_blocks * block_size, K, D]`, keys then values.

    Zeroed. On a CPU it takes memory only as blocks are first written: numpy asks the system for
    pages that are zero already, where torch would write them all.
    """
    shape = (
        model.num_layers,
        2,
        num_blocks * block_size,
        model.num_kv_heads,
        model.head_dim,
    )
    if device.type == "cpu":
        zeros = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(zeros).view(dtype).view(shape)
    return torch.zeros(shape, dtype=dtype, device=device)
