"""Random numbers on the device, made of a key and a counter alone."""

import torch

from nanovllm.kernels.operator import operator
from nanovllm.kernels.reference import philox


@operator("philox")
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


@uniform.register_fake
def _(seed_low: torch.Tensor, seed_high: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    return seed_low.new_empty(seed_low.shape, dtype=torch.float64)
