"""The kernel of random numbers against the plain operator, on Triton's interpreter."""

import pytest
import torch

from nanovllm.kernels import ops
from nanovllm.kernels.triton import philox
from tests.kernels.interpreter import _mended_interpreter  # noqa: F401  a fixture


@pytest.mark.parametrize("num_rows", [1, 5, 300])
def test_numbers_agree_bit_for_bit(num_rows):
    generator = torch.Generator().manual_seed(num_rows)
    words = torch.randint(-(2**31), 2**31, (3, num_rows), generator=generator).int()
    words[2] &= 2**31 - 1

    assert torch.equal(philox.uniform(*words), ops.uniform(*words))
