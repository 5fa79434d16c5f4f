"""Kernels at both ends of a step against the plain operators, on Triton's interpreter."""

import pytest
import torch

from nanovllm.kernels import ops
from nanovllm.kernels.triton import steps
from tests.kernels.interpreter import _mended_interpreter  # noqa: F401  a fixture


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("num_rows", [1, 3, 8, 200])
@pytest.mark.parametrize("num_live", [0, 1, 200])
def test_inputs_agree(num_rows, num_live):
    generator = torch.Generator().manual_seed(num_rows)
    block_size, width = 4, 6

    def random(high, *size, low=0):
        return torch.randint(low, high, size, generator=generator, dtype=torch.int32)

    tables = random(50, num_rows, width + 3)[:, :width]  # rows of a wider table
    arguments = (
        random(99, 2 * num_rows, low=-1),
        random(2 * num_rows, num_rows, low=-1),
        random(99, num_rows),
        random(block_size * width + 1, num_rows, low=1),
        tables,
        torch.tensor(num_live, dtype=torch.int32),
        block_size,
    )

    both = zip(steps.decode_inputs(*arguments), ops.decode_inputs(*arguments), strict=True)
    for ours, theirs in both:
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("num_rows", [1, 5, 200])
def test_tokens_are_kept_alike(num_rows):
    generator = torch.Generator().manual_seed(num_rows)
    token_ids = torch.randint(0, 1000, (num_rows,), generator=generator)
    peak = torch.randn(num_rows, generator=generator)
    for row, value in enumerate((float("nan"), float("inf"), float("-inf"))[: num_rows - 1]):
        peak[row] = value
    ours, theirs = torch.full((3 * num_rows,), 7).int(), torch.full((3 * num_rows,), 7).int()
    offset = torch.tensor(num_rows, dtype=torch.int32)

    steps.keep_tokens(token_ids, peak, offset, ours)
    ops.keep_tokens(token_ids, peak, offset, theirs)

    assert torch.equal(ours, theirs)
    assert (ours[:num_rows] == 7).all() and (ours[2 * num_rows :] == 7).all()
