"""Operators at both ends of a decode step: what it reads from the host, and the tokens it keeps."""

import torch

from nanovllm.kernels.operator import operator
from nanovllm.kernels.reference import steps


@operator("steps")
def decode_inputs(
    kept: torch.Tensor,
    source: torch.Tensor,
    token: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    num_rows: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find each row's token, its position and the slot of its key and value.

    Args:
        kept: `[N]` int32 tokens of steps before, see `keep_tokens`.
        source: `[B]` int32 where the row's token lies there, or -1: the host gives it.
        token: `[B]` int32 what the host gives.
        context_lens: `[B]` int32 positions, the token's own included; at least 1.
        block_tables: `[B, M]` int32, the last dimension contiguous.
        num_rows: `[]` int32 live rows; the others are padding.
        block_size: Positions of a block.

    Returns:
        `[B]` int32 each: token ids, never negative, as those of failed rows go on as 0; positions;
        slots, -1 for padding.
    """
    return steps.decode_inputs(
        kept, source, token, context_lens, block_tables, num_rows, block_size
    )


@decode_inputs.register_fake
def _(
    kept: torch.Tensor, source: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        source.new_empty(source.shape),
        source.new_empty(source.shape),
        source.new_empty(source.shape),
    )


@operator("steps", mutates_args=("kept",))
def keep_tokens(
    token_ids: torch.Tensor, peak: torch.Tensor, offset: torch.Tensor, kept: torch.Tensor
) -> None:
    """Write the tokens of a step where the host and the next step read them.

    Args:
        token_ids: `[B]` int64.
        peak: `[B]` float32 the largest logit of each row; where it is not finite the row failed,
            and -1 is written.
        offset: `[]` int32 where the first goes.
        kept: `[N]` int32, written in place.
    """
    steps.keep_tokens(token_ids, peak, offset, kept)


@keep_tokens.register_fake
def _(
    token_ids: torch.Tensor, peak: torch.Tensor, offset: torch.Tensor, kept: torch.Tensor
) -> None:
    return None
