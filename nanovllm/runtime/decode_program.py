"""The decode step as one program over static buffers: what is captured once per batch size.

Everything of a step happens inside: the tokens of the step before are fetched where the device
keeps them, slots are derived from block tables and positions, and the new tokens are drawn and
kept. The host gives the rest of the truth anew in every step, in one vector. So a step depends on
that vector, on the tokens before it and on the K/V cache, and on nothing else.
"""

from collections.abc import Mapping
from typing import Literal

import attrs
import torch

from graphs import ZERO, Column, Fill, Program, Scalar, StepLayout, Table
from nanovllm.kernels import ops
from nanovllm.runtime.fused_decoder import FusedDecoder
from nanovllm.runtime.paged_attention import PagedAttention

Variant = Literal["greedy", "sample"]
"""How tokens are chosen: all greedily, or each row by its temperature and `min_p`."""

NO_SOURCE = -1
"""The row's token comes from the host."""


def decode_layout(max_num_rows: int, num_table_columns: int, pad_block: int) -> StepLayout:
    """The vector that the host gives.

    Padding rows attend to the first position of `pad_block`, a block that nobody writes to.
    """
    return StepLayout(
        max_num_rows,
        scalars=(Scalar("num_rows"), Scalar("out_offset")),
        columns=(
            Column("token", ZERO),
            Column("source", Fill(NO_SOURCE)),
            Column("context_len", Fill(1)),
            Column("temperature", ZERO, "float32"),
            Column("min_p", ZERO, "float32"),
            Column("seed_low", ZERO),
            Column("seed_high", ZERO),
        ),
        table=Table("block_table", num_table_columns, Fill(pad_block)),
    )


@attrs.frozen(eq=False)
class DecodeStatics:
    """The buffers that every captured step reads and writes: `R` rows at most.

    Attributes:
        layout: Of the staging vector.
        staging: `[layout.num_words()]` int32, this step's inputs.
        mixed: `[num_mixed_words]` int32, the inputs of a step with prompts instead.
        tokens: `[2 R]` int32: tokens of this step and of the one before, each in its own half, so
            that the host may still be fetching the older ones. `FAILED_TOKEN` of failed rows.
        logits: `[R, V]` of the model's type, those of the last step.
        fused: The model and its K/V cache.
    """

    layout: StepLayout
    staging: torch.Tensor
    mixed: torch.Tensor
    tokens: torch.Tensor
    logits: torch.Tensor
    fused: FusedDecoder

    @classmethod
    def create(
        cls, fused: FusedDecoder, layout: StepLayout, *, num_mixed_words: int = 0
    ) -> "DecodeStatics":
        """Allocate them beside the K/V cache."""
        num_rows, device = layout.max_num_rows, fused.kv_cache.device
        return cls(
            layout,
            staging=torch.zeros(layout.num_words(), dtype=torch.int32, device=device),
            mixed=torch.zeros(num_mixed_words, dtype=torch.int32, device=device),
            tokens=torch.zeros(2 * num_rows, dtype=torch.int32, device=device),
            logits=torch.zeros(
                (num_rows, fused.decoder.config.vocab_size),
                dtype=fused.decoder.embedding.dtype,
                device=device,
            ),
            fused=fused,
        )

    def named_tensors(self) -> Mapping[str, torch.Tensor]:
        """Every tensor whose address a captured step bakes in; see `graphs.Statics`."""
        named = {
            "staging": self.staging,
            "mixed": self.mixed,
            "tokens": self.tokens,
            "logits": self.logits,
            "kv_cache": self.fused.kv_cache,
            "cos_sin": self.fused.cos_sin,
        }
        for index, tensor in enumerate(self.fused.decoder.tensors()):
            named[f"weight {index}"] = tensor
        return named


def decode_program(
    bucket: int, variant: Variant, statics: DecodeStatics, attention: PagedAttention
) -> Program:
    """The step for batches of up to `bucket` rows."""
    inputs = statics.layout.torch_views(statics.staging, bucket)
    logits, fused = statics.logits[:bucket], statics.fused

    def attend(
        query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
    ) -> torch.Tensor:
        return attention.decode(
            query, key_cache, value_cache, inputs["block_table"], inputs["context_len"]
        )

    def program() -> None:
        token_ids, positions, slots = ops.decode_inputs(
            statics.tokens,
            inputs["source"],
            inputs["token"],
            inputs["context_len"],
            inputs["block_table"],
            inputs["num_rows"],
            attention.block_size,
        )
        hidden = fused.hidden(token_ids, positions, slots, attend)
        logits.copy_(fused.decoder.lm_head(hidden))
        # The token that is drawn stands behind the context.
        drawn, peak = choose(logits, variant, inputs, position=inputs["context_len"])
        ops.keep_tokens(drawn, peak, inputs["out_offset"], statics.tokens)

    return program


def choose(
    logits: torch.Tensor,
    variant: Variant,
    columns: Mapping[str, torch.Tensor],
    position: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose one token per row without looking at a value on the host.

    Args:
        logits: `[B, V]`.
        variant: How.
        columns: `[B]` each: `temperature`, `min_p`, `seed_low`, `seed_high`; read only if rows
            draw.
        position: `[B]` int32 index in its sequence of the token that is chosen; likewise.

    Returns:
        `[B]` int64 ids, and `[B]` float32 the largest logits: the row failed where it is not
        finite.
    """
    token_ids: torch.Tensor
    token_ids, peak = ops.greedy(logits)
    if variant == "sample":
        number = ops.uniform(columns["seed_low"], columns["seed_high"], position)
        token_ids = ops.sample_any(
            logits, peak, columns["temperature"], columns["min_p"], number, token_ids
        )
    return token_ids, peak
