"""Operators that choose a token from logits."""

import torch

from nanovllm.kernels.operator import operator
from nanovllm.kernels.reference import sampling


@operator("greedy")
def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the largest logit of each row, the lowest id on ties.

    Args:
        logits: `[B, V]`, the last dimension contiguous.

    Returns:
        `[B]` int64 ids, and `[B]` float32 those logits. A row with a NaN gives NaN and the id of
        the first.
    """
    return sampling.greedy(logits)


@greedy.register_fake
def _(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows = len(logits)
    ids = logits.new_empty(num_rows, dtype=torch.int64)
    return ids, logits.new_empty(num_rows, dtype=torch.float32)


@operator("sample")
def sample_any(
    logits: torch.Tensor,
    peak: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    greedy_ids: torch.Tensor,
) -> torch.Tensor:
    """Draw from all tokens, weighed by temperature and cut by `min_p`.

    The draw of `runtime.draw` for rows without `top_k` and `top_p`: weights are integers, so that
    their sums are exact in any order, and the uniform number picks one by inversion.

    Args:
        logits: `[B, V]`, the last dimension contiguous; V at most 2**22.
        peak: `[B]` float32, the largest logit of each row, as `greedy` gave it.
        temperature: `[B]` float32. 0: the row keeps its greedy id.
        min_p: `[B]` float32 in [0, 1]: tokens less likely than this share of the likeliest are
            out. 0: all stay.
        uniform: `[B]` float64 from 0 to 1 - 2**-53. (Two int32 words of a packed vector, at an
            even offset, are a view of one.)
        greedy_ids: `[B]` int64, as `greedy` gave them. Rows whose peak is not finite keep them.

    Returns:
        `[B]` int64 ids.
    """
    return sampling.sample_any(logits, peak, temperature, min_p, uniform, greedy_ids)


@sample_any.register_fake
def _(
    logits: torch.Tensor,
    peak: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    greedy_ids: torch.Tensor,
) -> torch.Tensor:
    return greedy_ids.new_empty(greedy_ids.shape)
