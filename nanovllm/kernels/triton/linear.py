"""Products of up to `FEW_ROWS` rows with what stands beside them in a layer."""

import torch

from nanovllm.kernels.geometry import FEW_ROWS
from nanovllm.kernels.triton.few_linear import plan_few_linear
from nanovllm.kernels.triton.launch import Launch, run
from nanovllm.kernels.triton.row_linear import plan_row_linear


def norm_linear(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """See `nanovllm.kernels.ops.norm_linear`."""
    output = x.new_empty(len(x), len(weight))
    run(plan_linear(x, norm, eps, weight, bias, output))
    return output


def norm_gate_up(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """See `nanovllm.kernels.ops.norm_gate_up`."""
    output = x.new_empty(len(x), len(weight) // 2)
    run(plan_linear(x, norm, eps, weight, bias, output, gates=True))
    return output


def linear_add(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
) -> None:
    """See `nanovllm.kernels.ops.linear_add`."""
    run(plan_linear(x, None, 0.0, weight, bias, residual, adds=True))


def plan_linear(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    *,
    gates: bool = False,
    adds: bool = False,
) -> tuple[Launch, ...]:
    """The launch of the kernel for as many rows; arguments as of `plan_row_linear`."""
    assert 0 < len(x) <= FEW_ROWS
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert output.is_contiguous()
    plan = plan_row_linear if len(x) == 1 else plan_few_linear
    return plan(x, norm, eps, weight, bias, output, gates=gates, adds=adds)
