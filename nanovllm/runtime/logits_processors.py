"""What a request does to its logits before a token is chosen: bias, penalties and bans."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from nanovllm.runtime.sampling import SamplingRow
from nanovllm.runtime.token_masks import keep_allowed
from nanovllm.sampling_params import SamplingParams


def adjust(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Apply to each row: bias, repetition, presence and frequency, its structure, the stop ban.

    A logit that is not finite stays as it is: what the model made impossible stays impossible, and
    a broken row stays recognisable. A finite one stays finite, unless it is banned.

    Args:
        logits: `[R, V]` float32. Not changed.
        rows: `[R]`.

    Returns:
        `[R, V]` float32: `logits` itself if no row asks for anything, else a copy.

    Raises:
        Exception: Whatever a row's own functions raise.
        ValueError: A row's structure allows no token at all.
    """
    touched = [index for index, row in enumerate(rows) if _is_adjusted(row)]
    if not touched:
        return logits
    adjusted = logits.clone()
    for index in touched:
        row = rows[index]
        _add_bias(adjusted[index], row.params)
        _penalise(adjusted[index], row)
        if row.allowed_tokens is not None:
            keep_allowed(adjusted[index], row.allowed_tokens())
        if row.bans_stop_tokens:
            _ban_stop_tokens(adjusted[index], row.stop_token_ids)
    return adjusted


def _is_adjusted(row: SamplingRow) -> bool:
    return (
        bool(row.params.logit_bias)
        or _needs_completion(row.params)
        or row.params.repetition_penalty != 1
        or row.bans_stop_tokens
        or row.allowed_tokens is not None
    )


def _needs_completion(params: SamplingParams) -> bool:
    return params.presence_penalty != 0 or params.frequency_penalty != 0


def _add_bias(logits: torch.Tensor, params: SamplingParams) -> None:
    if params.logit_bias:
        bias_of = dict(params.logit_bias)
        ids = _as_tensor(bias_of, logits.device)
        bias = torch.tensor(list(bias_of.values()), dtype=torch.float64, device=logits.device)
        _put(logits, ids, logits[ids].double() + bias)


def _penalise(logits: torch.Tensor, row: SamplingRow) -> None:
    """Penalise the tokens seen. Costs O(tokens), but only where a penalty is asked for."""
    params = row.params
    if params.repetition_penalty != 1:
        seen = np.union1d(_as_array(row.prompt_token_ids()), _as_array(row.completion_token_ids()))
        ids = torch.from_numpy(seen).to(logits.device)
        old = logits[ids].double()
        penalty = params.repetition_penalty
        _put(logits, ids, torch.where(old > 0, old / penalty, old * penalty))
    if _needs_completion(params):
        seen, counts = np.unique(_as_array(row.completion_token_ids()), return_counts=True)
        ids = torch.from_numpy(seen).to(logits.device)
        times = torch.from_numpy(counts).to(logits.device)
        loss = params.presence_penalty + params.frequency_penalty * times.double()
        _put(logits, ids, logits[ids].double() - loss)


def _ban_stop_tokens(logits: torch.Tensor, stop_token_ids: frozenset[int]) -> None:
    """Make the stop tokens impossible, unless no other token is possible.

    In that case they are left alone. They do not end the request, as it is too early, so that
    `min_tokens` holds all the same.
    """
    # A tokenizer may name an end-of-text id that the model has no logit for.
    ids = _as_tensor((i for i in stop_token_ids if i < len(logits)), logits.device)
    old = logits[ids]
    _put(logits, ids, torch.full_like(old, -math.inf), bound=math.inf)
    if float(logits.max()) == -math.inf:
        logits[ids] = old


def _put(
    logits: torch.Tensor,
    ids: torch.Tensor,
    new: torch.Tensor,
    *,
    bound: float = torch.finfo(torch.float32).max,
) -> None:
    """Set the logits of these ids, distinct ones, where they are finite."""
    old = logits[ids]
    logits[ids] = torch.where(old.isfinite(), new.clamp(-bound, bound).to(old.dtype), old)


def _as_array(token_ids: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.asarray(token_ids, np.int64)


def _as_tensor(token_ids: Iterable[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(list(token_ids), dtype=torch.int64, device=device)
