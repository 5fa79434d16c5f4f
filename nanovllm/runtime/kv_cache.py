"""The paged K/V cache: its size in bytes, and its memory."""

import math
import mmap
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nanovllm.model.config import ModelConfig

_MIN_LAZY_BYTES = 2**16


def block_bytes(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: keys and values of `block_size` positions in every layer."""
    values_per_position = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    return values_per_position * block_size * dtype.itemsize


def map_memory(num_bytes: int) -> mmap.mmap:
    """Zeros straight from the system, which take memory only as they are first written."""
    # Private: a forked child gets its own. Windows knows no other.
    flags = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    return mmap.mmap(-1, num_bytes, **flags)


def lazy_zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeros that take memory only as they are first written.

    The system is asked for pages. `np.zeros` gets them from an allocator that, once it has given
    and taken back large pieces, clears used memory instead.
    """
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    if num_bytes < _MIN_LAZY_BYTES:
        return np.zeros(shape, dtype)
    return np.frombuffer(map_memory(num_bytes), dtype=dtype).reshape(shape)


def allocate_kv_cache(
    model: ModelConfig,
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Memory for `num_blocks` blocks: `[L, 2, num_blocks * block_size, K, D]`, keys then values.

    Zeroed. On a CPU it takes memory only as blocks are first written, where torch would write them
    all.
    """
    shape = (
        model.num_layers,
        2,
        num_blocks * block_size,
        model.num_kv_heads,
        model.head_dim,
    )
    if device.type == "cpu":
        zeros = lazy_zeros((math.prod(shape) * dtype.itemsize,), np.uint8)
        return torch.from_numpy(zeros).view(dtype).view(shape)
    return torch.zeros(shape, dtype=dtype, device=device)
