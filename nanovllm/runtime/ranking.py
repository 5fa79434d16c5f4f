"""The order of tokens: the larger logit first, and the lower id first among equal logits.

Greedy choice, `top_k`, `top_p` and the alternatives of `logprobs` all cut this one order, so that
ties, which are common in bfloat16, never depend on how a library happens to break them.
"""

import torch


def best(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the first token of each row.

    Args:
        logits: `[R, V]` float32.

    Returns:
        `[R]` int64 ids and `[R]` float32 logits. A row with a NaN gives NaN.
    """
    if logits.device.type == "cpu":
        # Both libraries promise the first of equal maxima; numpy finds it ten times as fast.
        ids = torch.from_numpy(logits.detach().numpy().argmax(axis=-1))
    else:
        ids = logits.argmax(dim=-1)
    return ids, logits.gather(1, ids[:, None])[:, 0]


def largest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the first tokens of each row, in order but for ties.

    Among equal logits any may be in, in any order, unless all of the row was asked for: then the
    order is exact. `settle_ties` repairs a cut.

    Args:
        logits: `[R, V]` float32, no NaN.
        count: How many. V or more: all.

    Returns:
        `[R, C]` float32 logits, descending, and `[R, C]` int64 ids.
    """
    if count >= logits.shape[1]:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
    else:
        values, ids = logits.topk(count, dim=-1)
    return values, ids


def settle_ties(
    logits: torch.Tensor, values: torch.Tensor, ids: torch.Tensor, num_kept: torch.Tensor
) -> torch.Tensor:
    """Make the first `num_kept` of each row of `largest` the right set: lowest ids among ties.

    Args:
        logits: `[R, V]` float32.
        values: `[R, C]` float32, as `largest` gave them.
        ids: `[R, C]` int64, as `largest` gave them.
        num_kept: `[R]` int64. Below C, unless C is V.

    Returns:
        `[R, C]` int64: the ids, those at `num_kept` and after unspecified.
    """
    if values.shape[1] == logits.shape[1]:
        return ids
    last = values.gather(1, num_kept[:, None] - 1)
    # The one after the last kept is there, as fewer than C are kept.
    is_cut = last == values.gather(1, num_kept[:, None])
    if not bool(is_cut.any()):
        return ids
    settled = ids.clone()
    for row in is_cut[:, 0].nonzero()[:, 0].tolist():
        first, end = int((values[row] > last[row]).sum()), int(num_kept[row])
        tied = (logits[row] == last[row]).nonzero()[:, 0]
        settled[row, first:end] = tied[: end - first]
    return settled
