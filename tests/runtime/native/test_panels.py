"""Weights in panels hold the same values, and int8 the nearest ones."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba", reason="the native backend needs Numba")

from nanovllm.runtime.native.panels import PANEL_ROWS, PanelLinear  # after the skip

SHAPES = {"num_rows": st.integers(1, 70), "length": st.sampled_from([32, 64, 96, 192])}


def random_weight(num_rows, length, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, length, generator=generator).to(dtype)


@settings(deadline=None, max_examples=25)
@given(**SHAPES, seed=st.integers(0, 99), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_packing_keeps_every_value_and_no_second_copy(num_rows, length, seed, dtype):
    weight = random_weight(num_rows, length, seed, dtype)
    linear = PanelLinear(weight, None)
    num_panels = -(-num_rows // PANEL_ROWS)

    assert torch.equal(linear.unpacked(), weight)
    assert linear.weight.nbytes == num_panels * PANEL_ROWS * length * dtype.itemsize


@settings(deadline=None, max_examples=25)
@given(**SHAPES, seed=st.integers(0, 99), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_int8_is_within_half_a_step_of_the_largest_value_in_its_group(
    num_rows, length, seed, dtype
):
    weight = random_weight(num_rows, length, seed, dtype)
    rounded = PanelLinear(weight, None, int8_group=32).unpacked()
    groups = weight.float().view(num_rows, -1, 32)
    half_steps = groups.abs().amax(-1, keepdim=True) / 127 / 2

    assert ((rounded.view_as(groups) - groups).abs() <= half_steps * 1.0001).all()


def test_a_group_of_zeros_stays_zero_and_a_single_value_is_exact():
    weight = torch.zeros(3, 64)
    weight[1, 40] = -0.3
    rounded = PanelLinear(weight, None, int8_group=32).unpacked()

    torch.testing.assert_close(rounded, weight, rtol=1e-6, atol=0)


def test_it_multiplies_like_any_linear_layer():
    weight, bias, x = random_weight(40, 64, 1), random_weight(1, 40, 2)[0], random_weight(5, 64, 3)
    expected = torch.nn.functional.linear(x, weight, bias)

    torch.testing.assert_close(PanelLinear(weight, bias)(x), expected)


def test_the_layout_is_the_one_that_is_documented():
    weight = torch.arange(16 * 32, dtype=torch.float32).view(16, 32).bfloat16()
    panel = PanelLinear(weight, None).weight.view(torch.bfloat16)[0]
    rows = np.arange(16).repeat(2)

    assert torch.equal(panel[:32], weight[rows, np.tile([0, 1], 16)])
    assert torch.equal(panel[32:64], weight[rows, np.tile([2, 3], 16)])
