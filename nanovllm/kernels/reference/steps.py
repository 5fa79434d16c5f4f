"""Both ends of a decode step in plain torch."""

import torch

FAILED_TOKEN = -1
"""Stands for the token of a row whose logits are not finite."""


def decode_inputs(
    kept: torch.Tensor,
    source: torch.Tensor,
    token: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    num_rows: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fetch tokens, count positions, look slots up."""
    fetched = kept.index_select(0, source.clamp(min=0))
    token_ids = torch.where(source >= 0, fetched, token).clamp(min=0)
    positions = context_lens - 1  # -1: a position counts from 0
    in_table = torch.div(positions, block_size, rounding_mode="floor")
    blocks = block_tables.gather(1, in_table.long()[:, None])[:, 0]
    slots = blocks * block_size + positions - in_table * block_size
    rows = torch.arange(len(source), device=source.device)
    return token_ids, positions, torch.where(rows < num_rows, slots, -1)


def keep_tokens(
    token_ids: torch.Tensor, peak: torch.Tensor, offset: torch.Tensor, kept: torch.Tensor
) -> None:
    """Write tokens from an offset on."""
    rows = torch.arange(len(token_ids), device=kept.device) + offset
    kept.index_copy_(0, rows, torch.where(peak.isfinite(), token_ids, FAILED_TOKEN).int())
