"""What rounding its weights to int8 costs the built-in model."""

import pytest
import torch

from nanovllm import LLM
from tests.test_smollm2 import GREEDY, NUM_TOKENS, PROMPTS, path, reference, reference_logits

pytest.importorskip("numba", reason="the native backend needs Numba")

__all__ = ["path", "reference"]  # fixtures


def test_int8_agrees_with_float32_on_most_tokens_and_is_never_far_off(path, reference):
    """On 8 x 64 tokens of its own, each compared with what float32 gives after the same tokens."""
    with LLM(path, device="cpu", dtype="int8") as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
    agreed, worst_gap = 0, 0.0
    for output in outputs:
        logits = reference_logits(reference, output.prompt_token_ids, output.token_ids)
        chosen = logits.gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]
        gaps = logits.max(-1).values - chosen
        agreed += int((gaps == 0).sum())
        worst_gap = max(worst_gap, gaps.max().item())

    assert agreed / (len(PROMPTS) * NUM_TOKENS) >= 0.96
    assert worst_gap < 1.0
