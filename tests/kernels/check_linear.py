"""Products of few rows against the plain operators, interpreted: see test_interpreted."""

import pytest
import torch

from nanovllm.kernels import ops
from nanovllm.kernels.geometry import FEW_ROWS
from nanovllm.kernels.triton import linear
from tests.kernels.check_layers import normal
from tests.kernels.interpreter import _mended_interpreter  # noqa: F401  a fixture
from tests.kernels.paged_case import assert_near

# One chunk with nothing behind it, one that is not full, several, and several of which one is not.
SIZES = [16, 64, 576, 1024, 3072, 4096 + 48]
ROWS = [(1, torch.float32), (1, torch.float16), (1, torch.bfloat16)]
ROWS += [(rows, torch.bfloat16) for rows in (2, 5, FEW_ROWS)] + [(3, torch.float16)]


def weights(num_outputs, size, dtype):
    return (normal(num_outputs, size, dtype=torch.float32, seed=3) * size**-0.5).to(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("num_rows", "dtype"), ROWS, ids=str)
def test_products_agree_with_their_norms_gates_and_sums(num_rows, dtype, size):
    x, norm = normal(num_rows, size, dtype=dtype), normal(size, dtype=dtype, seed=1)
    weight = weights(38, size, dtype)
    biases = (None, normal(38, dtype=dtype, seed=2))
    residual = normal(num_rows, 38, dtype=dtype, seed=4)
    for bias in biases:
        given = (x, norm, 1e-5, weight, bias)
        assert_near(ops.norm_linear(*given), linear.norm_linear(*given))
        assert_near(ops.norm_gate_up(*given), linear.norm_gate_up(*given))
        ours, theirs = residual.clone(), residual.clone()
        ops.linear_add(x, weight, bias, theirs)
        linear.linear_add(x, weight, bias, ours)
        assert_near(theirs, ours)


@pytest.mark.parametrize("num_rows", [1, 4])
def test_a_broken_row_breaks_no_other(num_rows):
    x, norm = normal(num_rows, 64, dtype=torch.bfloat16), normal(64, dtype=torch.bfloat16)
    x[-1, 7] = float("nan")
    weight = weights(32, 64, torch.bfloat16)
    got = linear.norm_linear(x, norm, 1e-5, weight, None)

    assert got[-1].isnan().all()
    assert got[:-1].isfinite().all()
