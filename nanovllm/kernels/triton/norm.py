"""RMSNorm, with or without adding to the residual stream first: one program per row."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.geometry import next_power_of_2
from nanovllm.kernels.triton.launch import Kernel, Launch, run
from nanovllm.kernels.triton.overlap import begin


@triton.jit
def _rms_norm(
    x,
    residual,
    weight,
    output,
    x_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    dtype = values.dtype
    if ADDS:
        stream = residual + row * SIZE + columns
        # The sum is rounded to the stream's type before it is normalised, as it is stored.
        values = (values.to(tl.float32) + tl.load(stream, mask=inside, other=0.0)).to(dtype)
        tl.store(stream, values, mask=inside)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / SIZE + eps)
    normed = (wide * scale).to(dtype).to(tl.float32)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row * SIZE + columns, (weights * normed).to(dtype), mask=inside)


RMS_NORM = Kernel(_rms_norm)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `nanovllm.kernels.ops.rms_norm`."""
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    run(plan_rms_norm(x, None, weight, eps, output))
    return output


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """See `nanovllm.kernels.ops.add_rms_norm`."""
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    run(plan_rms_norm(x, residual, weight, eps, output))
    return output


def plan_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    output: torch.Tensor,
) -> tuple[Launch, ...]:
    """The launch of both; `residual` None: nothing is added."""
    num_rows, size = x.shape
    assert x.stride(1) == 1
    assert residual is None or residual.is_contiguous()
    block = next_power_of_2(size)
    arguments = {
        "x": x,
        "residual": residual,
        "weight": weight,
        "output": output,
        "x_stride": x.stride(0),
        "eps": eps,
        "SIZE": size,
        "BLOCK": block,
        "ADDS": residual is not None,
        "num_warps": min(16, max(1, block // 256)),
    }
    return (Launch(RMS_NORM, (num_rows,), arguments),)
