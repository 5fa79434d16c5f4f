"""Random numbers on the device, made of a key and a counter alone."""

from typing import Any

import torch

from nanovllm.kernels.reference import philox


@torch.library.custom_op("nanovllm::uniform", mutates_args=(), device_types="cpu")
def uniform(
    seed_low: torch.Tensor, seed_high: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """Draw one number per row: Philox4x32-10, bit for bit that of `runtime.philox.uniform`.

    Args:
        seed_low: `[B]` int32, the low word of the row's seed, read as unsigned.
        seed_high: `[B]` int32, the high word.
        position: `[B]` int32 index in its sequence of the token that is drawn.

    Returns:
        `[B]` float64 in [0, 1): multiples of 2**-53.
    """
    return philox.uniform(seed_low, seed_high, position)


@uniform.register_kernel("cuda")
def _(*args: Any) -> torch.Tensor:
    from nanovllm.kernels.triton import philox as kernels

    return kernels.uniform(*args)


@uniform.register_fake
def _(seed_low: torch.Tensor, seed_high: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    return seed_low.new_empty(seed_low.shape, dtype=torch.float64)
