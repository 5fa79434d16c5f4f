"""Philox4x32-10, one row a lane."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton.launch import Kernel, Launch, run
from nanovllm.kernels.triton.overlap import begin

_BLOCK = 128
"""Rows of a program, however few there are, so that all buckets share one variant."""


# The words are views of a packed vector, so nothing is known of where they start.
@triton.jit(do_not_specialize=["seed_low", "seed_high", "position", "count"])
def _uniform(
    seed_low, seed_high, position, numbers, count, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):
    begin(OVERLAPS)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < count
    k0 = tl.load(seed_low + rows, mask=inside, other=0).to(tl.uint32, bitcast=True)
    k1 = tl.load(seed_high + rows, mask=inside, other=0).to(tl.uint32, bitcast=True)
    c0 = tl.load(position + rows, mask=inside, other=0).to(tl.uint32, bitcast=True)
    c1 = tl.zeros((BLOCK,), tl.uint32)
    c2 = tl.zeros((BLOCK,), tl.uint32)
    c3 = tl.zeros((BLOCK,), tl.uint32)
    for _ in tl.static_range(10):
        # 64-bit products, halved: the same everywhere, and few enough not to matter.
        even = c0.to(tl.uint64) * 0xD2511F53
        odd = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (odd >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (even >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = odd.to(tl.uint32)
        c3 = even.to(tl.uint32)
        k0 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    bits = (c0.to(tl.uint64) << 21) | (c1.to(tl.uint64) >> 11)
    tl.store(numbers + rows, bits.to(tl.int64).to(tl.float64) * 1.1102230246251565e-16, mask=inside)


UNIFORM = Kernel(_uniform)


def uniform(
    seed_low: torch.Tensor, seed_high: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """See `nanovllm.kernels.ops.uniform`."""
    numbers = seed_low.new_empty(seed_low.shape, dtype=torch.float64)
    run(plan_uniform(seed_low, seed_high, position, numbers))
    return numbers


def plan_uniform(
    seed_low: torch.Tensor,
    seed_high: torch.Tensor,
    position: torch.Tensor,
    numbers: torch.Tensor,
) -> tuple[Launch, ...]:
    """The launch: a grid of groups of rows."""
    arguments = {
        "seed_low": seed_low,
        "seed_high": seed_high,
        "position": position,
        "numbers": numbers,
        "count": len(seed_low),
        "BLOCK": _BLOCK,
        "num_warps": 4,
    }
    return (Launch(UNIFORM, (-(-len(seed_low) // _BLOCK),), arguments),)
