"""The choice of a token in plain torch: the largest logit, or a draw by exact integer weights."""

import torch

from nanovllm.kernels.reference.weights import MAX_TEMPERATURE, WEIGHT_ONE, pick, weigh


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first of the largest logits of each row, and that logit."""
    wide = logits.float()
    ids = wide.argmax(dim=-1)
    return ids, wide.gather(1, ids[:, None])[:, 0]


def sample_any(
    logits: torch.Tensor,
    peak: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    greedy_ids: torch.Tensor,
) -> torch.Tensor:
    """Invert the cumulative weights of each row at its uniform number."""
    draws = (temperature > 0) & peak.isfinite()
    # Rows that do not draw are computed all the same, with numbers that do no harm.
    divisor = torch.where(draws, temperature, 1.0).clamp(max=MAX_TEMPERATURE)
    min_weight = min_p * WEIGHT_ONE
    weights = weigh(logits.float(), peak[:, None], divisor[:, None], min_weight[:, None])
    return torch.where(draws, pick(weights, uniform[:, None]), greedy_ids)
