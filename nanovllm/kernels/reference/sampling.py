"""The choice of a token in plain torch: the largest logit, or a draw by exact integer weights."""

import torch

WEIGHT_ONE = 2**40
"""The weight of a row's most likely token. The sum of 2**22 of them still fits an int64."""

MAX_TEMPERATURE = 1e30
"""More would be infinite in float32, and -inf / inf is NaN. Every distribution is flat by then."""


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
    weights = (logits.float() - peak[:, None]).div_(divisor[:, None]).exp_().mul_(WEIGHT_ONE)
    weights.mul_(weights >= (min_p * WEIGHT_ONE)[:, None])
    cumulative = weights.long().cumsum(dim=-1)
    target = (cumulative[:, -1:] * uniform[:, None]).long()
    drawn = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return torch.where(draws, drawn, greedy_ids)
