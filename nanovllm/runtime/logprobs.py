"""Log-probabilities of tokens, drawn ones and a prompt's own, and of their alternatives.

They say how likely the model itself found a token: log-softmax of its untouched logits. Bias,
penalties, bans, temperature, `top_k`, `top_p` and `min_p` do not show, so that the numbers of
different requests compare, and greedy rows have some too.
"""

import math
from collections.abc import Callable, Sequence

import torch

from nanovllm.core import Batch
from nanovllm.core.batch import Int32Array
from nanovllm.kernels.reference.weights import WEIGHT_ONE, weigh
from nanovllm.outputs import TokenLogprobs
from nanovllm.runtime.ranking import largest, settle_ties
from nanovllm.runtime.sampling import LOGPROB_FLOOR, SamplingRow

SCORED_BYTES = 2**24
"""Logits of prompt positions, as float32, that are worth having in memory at a time."""


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
    asking = [
        i
        for i, (row, token_id) in enumerate(zip(rows, token_ids, strict=True))
        if token_id is not None and row.params.logprobs is not None
    ]
    reports: list[TokenLogprobs | None] = [None] * len(rows)
    if asking:
        made = report(
            logits[asking],
            [token_ids[i] or 0 for i in asking],
            [rows[i].params.logprobs or 0 for i in asking],
        )
        for i, one in zip(asking, made, strict=True):
            reports[i] = one
    return reports


def prompt_logprobs(
    batch: Batch, logits_of: Callable[[Int32Array], torch.Tensor], *, num_rows: int
) -> list[TokenLogprobs | None]:
    """Report on the prompt tokens that a batch is asked about.

    Args:
        batch: One that was computed.
        logits_of: Gives the logits, `[N, V]` of any float type, of at most `num_rows` packed
            positions. Called for a few at a time, as those of a whole prompt may take gigabytes.
        num_rows: How many at a time.

    Returns:
        `[P]`, one for each of `batch.scored_indices`; None where the logits are broken.
    """
    reports: list[TokenLogprobs | None] = []
    for start in range(0, len(batch.scored_indices), num_rows):
        part = slice(start, start + num_rows)
        logits = logits_of(batch.scored_indices[part]).float()
        reports += report(
            logits, batch.scored_ids[part].tolist(), batch.scored_num_top[part].tolist()
        )
    return reports


def report(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs | None]:
    """Report on one token of each row.

    Args:
        logits: `[R, V]` float32, as the model gave them.
        token_ids: `[R]`.
        num_top: `[R]` how many alternatives are wanted.

    Returns:
        `[R]`; None where the row holds NaN or +inf, or nothing but -inf.
    """
    peak = logits.amax(dim=-1, keepdim=True)
    is_fine = peak.isfinite()
    if not bool(is_fine.all()):
        logits = torch.where(is_fine, logits, 0.0)
        peak = torch.where(is_fine, peak, 0.0)
    # Summed as integers, and thus in no order that anything could change.
    masses = weigh(logits, peak).sum(dim=-1).tolist()
    ids = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    chosen = logits.gather(1, ids[:, None])
    ranks = (1 + (logits > chosen).sum(dim=-1)).tolist()
    tops = _top(logits, num_top)
    reports: list[TokenLogprobs | None] = []
    for i, (fine, top_logit, logit) in enumerate(
        zip(is_fine[:, 0].tolist(), peak[:, 0].tolist(), chosen[:, 0].tolist(), strict=True)
    ):
        log_mass = top_logit + math.log(masses[i] / WEIGHT_ONE)
        top = tuple((j, max(other - log_mass, LOGPROB_FLOOR)) for j, other in tops[i])
        logprob = max(logit - log_mass, LOGPROB_FLOOR)
        reports.append(TokenLogprobs(token_ids[i], logprob, ranks[i], top) if fine else None)
    return reports


def _top(logits: torch.Tensor, num_top: Sequence[int]) -> list[list[tuple[int, float]]]:
    """The ids and logits of the first tokens of each row, in order."""
    wanted = [min(count, logits.shape[1]) for count in num_top]
    if max(wanted) == 0:
        return [[] for _ in wanted]
    # One more than is wanted, to see whether the cut falls between equals.
    values, ids = largest(logits, max(wanted) + 1)
    num_kept = torch.tensor(wanted, device=ids.device).clamp(min=1)
    ids = settle_ties(logits, values, ids, num_kept)
    return [
        sorted(
            zip(row_ids[:count], row_values[:count], strict=True),
            key=lambda pair: (-pair[1], pair[0]),
        )
        for row_ids, row_values, count in zip(ids.tolist(), values.tolist(), wanted, strict=True)
    ]
