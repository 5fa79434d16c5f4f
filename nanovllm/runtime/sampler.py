"""Logits to tokens, as a pure function: no generator, no state, nothing that depends on the batch.

The token of a row depends on its logits, its parameters, its seed and the token's position alone:
it is the same when the row is computed by itself, next to others, or again after a preemption.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from nanovllm.outputs import TokenLogprobs
from nanovllm.runtime.draw import draw
from nanovllm.runtime.logits_processors import adjust
from nanovllm.runtime.logprobs import token_logprobs
from nanovllm.runtime.ranking import best
from nanovllm.runtime.sampling import Sampled, SamplingRow, is_plain_greedy

__all__ = [
    "Sampled",
    "SamplingRow",
    "TokenLogprobs",
    "all_plain_greedy",
    "is_plain_greedy",
    "sample",
    "sample_greedy",
    "unless_broken",
]


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> Sampled:
    """Choose one token per row.

    Greedy rows take the largest logit, the lowest id on ties. The others draw, see `draw`. Both
    look at the logits as `adjust` leaves them.

    An exception fails only the rows that cause it: all are then done again, each by itself, which
    gives the others the very tokens that they would have had.

    Args:
        logits: `[R, V]` of any float type. Not changed. -inf marks an impossible token.
        rows: `[R]`.

    Returns:
        The tokens, and the log-probabilities that were asked for.
    """
    try:
        return _sample(logits, rows)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is some request's end
        if len(rows) > 1:
            each = [sample(logits[i : i + 1], rows[i : i + 1]) for i in range(len(rows))]
            return _joined(each)
        return Sampled([None], None, {0: f"{type(error).__name__}: {error}"})


def _joined(each: Sequence[Sampled]) -> Sampled:
    """The rows of results of one row each."""
    logprobs = [None if one.logprobs is None else one.logprobs[0] for one in each]
    return Sampled(
        [one.token_ids[0] for one in each],
        logprobs if any(one.logprobs is not None for one in each) else None,
        {i: one.failures[0] for i, one in enumerate(each) if one.failures},
    )


def _sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> Sampled:
    if all_plain_greedy(rows):
        return Sampled(sample_greedy(logits), None)
    given = logits.detach().float().contiguous()
    adjusted = adjust(given, rows)
    ids, peak = best(adjusted)
    token_ids = unless_broken(ids, peak)
    drawn = [i for i, row in enumerate(rows) if token_ids[i] is not None and not row.is_greedy]
    if drawn:
        if len(drawn) < len(rows):
            adjusted, peak = adjusted[drawn], peak[drawn]
        for i, token_id in zip(drawn, draw(adjusted, peak, [rows[i] for i in drawn]), strict=True):
            token_ids[i] = token_id
    return Sampled(token_ids, token_logprobs(given, rows, token_ids))


def sample_greedy(logits: torch.Tensor) -> list[int | None]:
    """Choose the largest logit of each row, the lowest id on ties: `sample` for plain rows.

    Args:
        logits: `[R, V]` of any float type.

    Returns:
        `[R]` ids, None where the row holds NaN or +inf, or nothing but -inf.
    """
    # No copy if it is float32. If it is not, the copy and the search in it are still faster than
    # a search in half precision, on a CPU by a factor of twenty.
    return unless_broken(*best(logits.detach().float()))


def all_plain_greedy(rows: Sequence[SamplingRow]) -> bool:
    """Whether every row takes its largest logit, whatever else is known of it."""
    return all(row.allowed_tokens is None and is_plain_greedy(row.params) for row in rows)


def unless_broken(
    ids: torch.Tensor | npt.NDArray[np.int32], peak: torch.Tensor | npt.NDArray[np.float32]
) -> list[int | None]:
    """The ids as a list, None where the largest logit is not finite: that row failed."""
    pairs = zip(ids.tolist(), peak.tolist(), strict=True)
    return [token_id if math.isfinite(logit) else None for token_id, logit in pairs]
