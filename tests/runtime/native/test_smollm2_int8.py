"""What rounding its weights to int8 costs the built-in model."""

import pytest

from tests.test_smollm2 import NUM_TOKENS, PROMPTS, agreement, path, reference

pytest.importorskip("numba", reason="the native backend needs Numba")

__all__ = ["path", "reference"]  # fixtures


def test_int8_agrees_with_float32_on_most_tokens_and_is_never_far_off(path, reference):
    """On 8 x 64 tokens of its own, each compared with what float32 gives after the same tokens."""
    agreed, worst_gap = agreement(path, reference, "int8")

    assert agreed / (len(PROMPTS) * NUM_TOKENS) >= 0.96
    assert worst_gap < 1.0
