"""Products of up to `FEW_ROWS` rows with what stands beside them in a layer."""

import torch

from nanovllm.kernels.geometry import FEW_ROWS, few_tile, row_tile
from nanovllm.kernels.triton.few_linear import FEW_LINEAR
from nanovllm.kernels.triton.launch import Launch, run
from nanovllm.kernels.triton.row_linear import ROW_LINEAR


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
    """The launch of the kernel for as many rows.

    Args:
        x: `[T, C]` contiguous, up to `FEW_ROWS` rows; of more than one, 16 bits.
        norm: `[C]` weight of the norm before, or None.
        eps: Of that norm.
        weight: `[N, C]` contiguous; of `2 N` outputs with `gates`.
        bias: As many, or None.
        output: `[T, N]` contiguous; read as well with `adds`.
        gates: Outputs are SiLU of the first half times the second.
        adds: They are added to what `output` holds.
    """
    (num_rows, size), num_outputs = x.shape, output.shape[1]
    assert 0 < num_rows <= FEW_ROWS
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert output.is_contiguous()
    arguments = {
        "x": x,
        "norm": norm,
        "weight": weight,
        "bias": bias,
        "residual": output,
        "output": output,
        "num_outputs": num_outputs,
        "eps": eps,
        "SIZE": size,
        "NORMS": norm is not None,
        "GATES": gates,
        "BIASED": bias is not None,
        "ADDS": adds,
    }
    if num_rows == 1:
        kernel, tile = ROW_LINEAR, row_tile(size, gates=gates)
    else:
        kernel, tile = FEW_LINEAR, few_tile(size)
        arguments |= {"count": num_rows, "BLOCK_M": FEW_ROWS, "PARTS": tile.num_parts}
    arguments |= {
        "BLOCK_N": tile.num_outputs,
        "BLOCK_K": tile.num_channels,
        "num_warps": tile.num_warps,
    }
    return (Launch(kernel, (-(-num_outputs // tile.num_outputs),), arguments),)
