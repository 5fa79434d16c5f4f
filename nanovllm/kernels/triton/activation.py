"""SiLU of the gate times up, element by element."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.geometry import next_power_of_2
from nanovllm.kernels.triton.launch import Kernel, Launch, run
from nanovllm.kernels.triton.overlap import begin

_MAX_BLOCK = 1024


@triton.jit
def _silu_mul(
    gate_up, output, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    source = gate_up + row * row_stride + columns
    gate = tl.load(source, mask=inside, other=0.0)
    up = tl.load(source + SIZE, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    # Rounded in between, as two operations would.
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(output + row * SIZE + columns, (activated * up).to(gate.dtype), mask=inside)


SILU_MUL = Kernel(_silu_mul)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `nanovllm.kernels.ops.silu_mul`."""
    output = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    run(plan_silu_mul(gate_up, output))
    return output


def plan_silu_mul(gate_up: torch.Tensor, output: torch.Tensor) -> tuple[Launch, ...]:
    """The launch: a grid of rows and pieces of a row."""
    num_rows, size = output.shape
    assert gate_up.stride(1) == 1
    block = min(_MAX_BLOCK, next_power_of_2(size))
    arguments = {
        "gate_up": gate_up,
        "output": output,
        "row_stride": gate_up.stride(0),
        "SIZE": size,
        "BLOCK": block,
        "num_warps": 4,
    }
    return (Launch(SILU_MUL, (num_rows, -(-size // block)), arguments),)
