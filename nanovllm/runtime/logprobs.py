"""Log-probabilities of chosen tokens and of their alternatives.

They say how likely the model itself found a token: log-softmax of its untouched logits. Bias,
penalties, bans, temperature, `top_k`, `top_p` and `min_p` do not show, so that the numbers of
different requests compare, and greedy rows have some too.
"""

import math
from collections.abc import Sequence

import torch

from nanovllm.outputs import TokenLogprobs
from nanovllm.runtime.ranking import largest, settle_ties
from nanovllm.runtime.sampling import LOGPROB_FLOOR, SamplingRow
from nanovllm.runtime.weights import WEIGHT_ONE, weigh


def token_logprobs(
    logits: torch.Tensor, rows: Sequence[SamplingRow], token_ids: Sequence[int | None]
) -> list[TokenLogprobs | None] | None:
    """Report on the chosen tokens of the rows that ask for it.

    Args:
        logits: `[R, V]` float32, as the model gave them.
        rows: `[R]`.
        token_ids: `[R]` the chosen tokens, None where the row failed.

    Returns:
        `[R]`, with None for rows that failed or did not ask; None if no row asked. No number is
        below `LOGPROB_FLOOR`. A rank is 1 + the number of larger logits; the alternatives come in
        the order of `runtime.ranking`.
    """
    if all(row.params.logprobs is None for row in rows):
        return None
    return [
        None
        if token_id is None or row.params.logprobs is None
        else _report(logits[i : i + 1], token_id, row.params.logprobs)
        for i, (row, token_id) in enumerate(zip(rows, token_ids, strict=True))
    ]


def _report(logits: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Report on one token of one row, `[1, V]`."""
    peak = logits.amax(dim=-1, keepdim=True)
    # Summed as integers, and thus in no order that anything could change.
    log_mass = float(peak) + math.log(int(weigh(logits, peak).sum()) / WEIGHT_ONE)
    chosen = logits[0, token_id]
    rank = 1 + int((logits > chosen).sum())

    def logprob(logit: float) -> float:
        return max(logit - log_mass, LOGPROB_FLOOR)

    top = [(i, logprob(logit)) for i, logit in _top(logits, num_top)]
    return TokenLogprobs(token_id, logprob(float(chosen)), rank, tuple(top))


def _top(logits: torch.Tensor, num_top: int) -> list[tuple[int, float]]:
    """The ids and logits of the first tokens of one row, in order."""
    num_top = min(num_top, logits.shape[1])
    if num_top == 0:
        return []
    # One more than is wanted, to see whether the cut falls between equals.
    values, ids = largest(logits, num_top + 1)
    ids = settle_ties(logits, values, ids, torch.tensor([num_top], device=ids.device))
    pairs = zip(ids[0, :num_top].tolist(), values[0, :num_top].tolist(), strict=True)
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
