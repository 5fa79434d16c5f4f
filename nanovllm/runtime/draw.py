"""One draw per row from its tempered, truncated distribution, by inversion of its cumulative sum.

Tokens are kept in the order of the vocabulary, so that a tiny change of the logits moves the
borders between tokens by a tiny amount, and the draw with it only where it lies on a border.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from nanovllm.kernels.reference.weights import (
    MAX_TEMPERATURE,
    WEIGHT_ONE,
    pick,
    target_weight,
    weigh,
)
from nanovllm.runtime.nucleus import keep_nucleus
from nanovllm.runtime.philox import uniform
from nanovllm.runtime.ranking import largest, settle_ties
from nanovllm.runtime.sampling import SamplingRow

_NUCLEUS_GUESS = 256
"""How many of the largest logits to look for `top_p` in first. Most often that is enough."""

_CPU_CHUNK = 2**16
_DEVICE_CHUNK = 2**24
"""Logits per pass: on a CPU as many as stay in its cache, elsewhere as memory is easily spared."""


def draw(logits: torch.Tensor, peak: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Draw the token of each row, none of which is greedy.

    `min_p` is applied first, then `top_k`, then `top_p` to what they have left, as in vLLM; all
    look at the distribution after temperature. `top_k` and `top_p` cut the order of
    `runtime.ranking`; `min_p` keeps all tokens of equal weight or none. A uniform number, made of
    seed and position alone, then picks among what is kept.

    Args:
        logits: `[R, V]` float32, no NaN and no +inf. Not changed.
        peak: `[R]` float32, finite: the largest logit of each row.
        rows: `[R]`.

    Returns:
        `[R]` ids.
    """
    num_rows, num_tokens = logits.shape
    token_ids = [0] * num_rows
    chunk = max(1, (_CPU_CHUNK if logits.device.type == "cpu" else _DEVICE_CHUNK) // num_tokens)
    for group, draw_alike in _groups(rows, num_tokens):
        for start in range(0, len(group), chunk):
            index = group[start : start + chunk]
            # A slice spares the copy where a row is a chunk.
            which = slice(index[0], index[0] + 1) if len(index) == 1 else index
            drawn = draw_alike(logits[which], peak[which, None], [rows[i] for i in index])
            for i, token_id in zip(index, drawn.tolist(), strict=True):
                token_ids[i] = token_id
    return token_ids


_Draw = Callable[[torch.Tensor, torch.Tensor, Sequence[SamplingRow]], torch.Tensor]


def _groups(rows: Sequence[SamplingRow], num_tokens: int) -> Iterator[tuple[list[int], _Draw]]:
    """Indices of the rows that need the same steps, with these."""
    limited = [0 < row.params.top_k < num_tokens for row in rows]
    nuclear = [row.params.top_p < 1 for row in rows]
    everyone = range(len(rows))
    yield [i for i in everyone if limited[i]], _draw_top_k
    yield [i for i in everyone if nuclear[i] and not limited[i]], _draw_top_p
    yield [i for i in everyone if not nuclear[i] and not limited[i]], _draw_any


def _draw_any(
    logits: torch.Tensor, peak: torch.Tensor, rows: Sequence[SamplingRow]
) -> torch.Tensor:
    return pick(_weigher(peak, rows)(logits), _uniform(rows, logits.device))


def _draw_top_k(
    logits: torch.Tensor, peak: torch.Tensor, rows: Sequence[SamplingRow]
) -> torch.Tensor:
    # One more than can be kept, to see whether the cut falls between equals.
    values, ids = largest(logits, max(row.params.top_k for row in rows) + 1)
    top_k = _column((row.params.top_k for row in rows), logits.device)
    ranks = torch.arange(values.shape[1], device=logits.device)
    weights = _weigher(peak, rows)(values) * (ranks < top_k)
    target = target_weight(weights.sum(dim=-1, keepdim=True), _top_p(rows, logits.device))
    return _draw_ranked(logits, values, ids, weights, _num_kept(weights, target), rows)


def _draw_top_p(
    logits: torch.Tensor, peak: torch.Tensor, rows: Sequence[SamplingRow]
) -> torch.Tensor:
    weigh_kept = _weigher(peak, rows)
    weights = weigh_kept(logits)
    target = target_weight(weights.sum(dim=-1, keepdim=True), _top_p(rows, logits.device))
    values, ids = largest(logits, _NUCLEUS_GUESS)
    likely = weigh_kept(values)
    num_kept = _num_kept(likely, target)
    # All were looked at, or fewer are kept, so that the first one left out is there to compare.
    # Both ways keep the same tokens: which of them a row's neighbours need makes no difference.
    if len(values[0]) == len(logits[0]) or bool((num_kept < len(values[0])).all()):
        return _draw_ranked(logits, values, ids, likely, num_kept, rows)
    return pick(keep_nucleus(logits, weights, target), _uniform(rows, logits.device))


def _num_kept(weights: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """How many of the weights, `[R, C]` int64 and ranked, reach the target; C if not even all."""
    # The ranks before which the target was not reached yet; nothing lies before the first.
    return ((weights.cumsum(dim=-1) < target).sum(dim=-1) + 1).clamp(max=weights.shape[1])


def _draw_ranked(
    logits: torch.Tensor,
    values: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    num_kept: torch.Tensor,
    rows: Sequence[SamplingRow],
) -> torch.Tensor:
    """Draw from the first `num_kept` of the ranked tokens, in the order of the vocabulary."""
    ids = settle_ties(logits, values, ids, num_kept)
    ranks = torch.arange(ids.shape[1], device=ids.device)
    weights = weights * (ranks < num_kept[:, None])
    ids, order = ids.sort(dim=-1)
    index = pick(weights.gather(1, order), _uniform(rows, ids.device))
    return ids.gather(1, index[:, None])[:, 0]


def _weigher(
    peak: torch.Tensor, rows: Sequence[SamplingRow]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from logits, `[R, C]`, to weights after temperature and `min_p`."""
    temperature = _column(
        (min(row.params.temperature, MAX_TEMPERATURE) for row in rows), peak.device
    ).float()
    min_weight = None
    if any(row.params.min_p > 0 for row in rows):
        min_weight = _column((row.params.min_p * WEIGHT_ONE for row in rows), peak.device).float()
    return lambda logits: weigh(logits, peak, temperature, min_weight)


def _top_p(rows: Sequence[SamplingRow], device: torch.device) -> torch.Tensor:
    return _column((row.params.top_p for row in rows), device)


def _uniform(rows: Sequence[SamplingRow], device: torch.device) -> torch.Tensor:
    numbers = uniform([row.seed for row in rows], [row.position for row in rows])
    return torch.from_numpy(numbers)[:, None].to(device)


def _column(numbers: Iterable[float], device: torch.device) -> torch.Tensor:
    """`[R, 1]` float64, which also holds a `top_k` exactly."""
    return torch.tensor([[number] for number in numbers], dtype=torch.float64, device=device)
