"""A step with prompts as one program: run as it is, or captured for some numbers of positions.

Eagerly, the host needs longer to launch a short prompt than the device to compute it, and all rows
that decode in the same step wait for it (14 ms for 64 positions of a 0.6B model, beside an H200
that takes under 2). So such steps are captured too, padded to the next of a few sizes. As in
`decode_program`, what varies is in one vector: where sequences begin, how long they are, which
position draws a token. Padding positions store nothing, and padding rows have no positions.
"""

from collections.abc import Mapping

import attrs
import numpy as np
import torch

from graphs import Program
from nanovllm.core.batch import Int32Array
from nanovllm.kernels import ops
from nanovllm.runtime.decode_program import DecodeStatics, Variant, choose
from nanovllm.runtime.paged_attention import PagedAttention
from nanovllm.runtime.step_inputs import ALIGN_WORDS, Columns

FLOATS = frozenset({"temperature", "min_p"})
"""Inputs that are float32, bit for bit in the int32 vector; see `choose`."""


@attrs.frozen
class PromptLayout:
    """Where the inputs of a step lie that is padded to `T` positions of `S` rows.

    Attributes:
        num_positions: `T`.
        num_rows: `S`, at most `T`.
        num_table_columns: `M`, of every row's block table.
        pad_block: What stands behind a row's own blocks.
    """

    num_positions: int
    num_rows: int
    num_table_columns: int
    pad_block: int
    _places: dict[str, tuple[slice, int]] = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        per_position = {"input_ids": 0, "positions": 0, "slot_mapping": -1}
        per_row = ("context_lens", "logits_indices", "position", "temperature", "min_p")
        sizes = {
            "out_offset": (1, 0),
            **{name: (self.num_positions, pad) for name, pad in per_position.items()},
            **dict.fromkeys((*per_row, "seed_low", "seed_high"), (self.num_rows, 0)),
            # +1: where the last row ends. All padding rows begin and end there too.
            "cu_seqlens_q": (self.num_rows + 1, 0),
            "block_tables": (self.num_rows * self.num_table_columns, self.pad_block),
        }
        places, at = {}, 0
        for name, (size, pad) in sizes.items():
            places[name] = (slice(at, at + size), pad)
            at += -(-size // ALIGN_WORDS) * ALIGN_WORDS
        object.__setattr__(self, "_places", places)

    @property
    def num_words(self) -> int:
        """Words of the vector."""
        place, _ = self._places["block_tables"]
        return int(place.stop)

    def pack(self, arrays: Columns, out: Int32Array) -> None:
        """Write the inputs of a step and all padding.

        Args:
            arrays: By name: `[t]` and `[s]` numbers with t and s at most `T` and `S`,
                `[s + 1]` `cu_seqlens_q`, `[s, m]` `block_tables`, `[1]` `out_offset`.
                `logits_indices` and what follows `choose` may be of fewer rows than s.
            out: `[num_words]` or longer.
        """
        for name, (place, pad) in self._places.items():
            values, target = arrays[name].view(np.int32), out[place]
            if name == "block_tables":
                num_rows, num_columns = values.shape
                table = target.reshape(self.num_rows, self.num_table_columns)
                table[:num_rows, :num_columns] = values
                table[:num_rows, num_columns:] = pad
                table[num_rows:] = pad
            else:
                target[: len(values)] = values
                target[len(values) :] = values[-1] if name == "cu_seqlens_q" else pad

    def empty(self) -> Int32Array:
        """`[num_words]`, a step of padding only."""
        vector = np.zeros(self.num_words, np.int32)
        for place, pad in self._places.values():
            vector[place] = pad
        return vector

    def views(self, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        """View a vector on the device by name: `block_tables` `[S, M]`, `out_offset` `[]`."""
        places = {name: place for name, (place, _) in self._places.items()}
        return mixed_views(vector, places, self.num_table_columns)


def prompt_layouts(
    sizes: tuple[int, ...], *, max_num_rows: int, num_table_columns: int, pad_block: int
) -> list[PromptLayout]:
    """The layouts to capture: of each number of positions one for few rows and one for all.

    Few rows have short tables to send, and few logits.
    """
    return [
        PromptLayout(size, num_rows, num_table_columns, pad_block)
        for size in sizes
        for num_rows in sorted({min(_FEW_PROMPTS, size, max_num_rows), min(size, max_num_rows)})
    ]


_FEW_PROMPTS = 8


def mixed_views(
    vector: torch.Tensor, places: Mapping[str, slice], num_columns: int
) -> dict[str, torch.Tensor]:
    """The same views of arrays that lie in `places`, as `pack_arrays` laid them out."""
    views = {
        name: vector[place].view(torch.float32 if name in FLOATS else torch.int32)
        for name, place in places.items()
    }
    views["block_tables"] = views["block_tables"].view(-1, num_columns)
    views["out_offset"] = views["out_offset"].view(())
    return views


def prompt_program(
    layout: PromptLayout, statics: DecodeStatics, attention: PagedAttention
) -> Program:
    """The step for up to `T` positions of up to `S` rows. All rows draw, greedy ones greedily."""
    inputs = layout.views(statics.mixed[: layout.num_words])

    def program() -> None:
        run_prompts(statics, attention, inputs, max_seqlen_q=layout.num_positions, variant="sample")

    return program


def run_prompts(
    statics: DecodeStatics,
    attention: PagedAttention,
    inputs: Mapping[str, torch.Tensor],
    *,
    max_seqlen_q: int,
    variant: Variant,
) -> torch.Tensor:
    """Compute a step with prompts, and keep its logits and its tokens.

    Args:
        statics: The model, its K/V cache, and where results go.
        attention: How it attends.
        inputs: On the device, by name; see `PromptLayout`.
        max_seqlen_q: The most positions that a row may have.
        variant: How tokens are chosen.

    Returns:
        `[T, E]` hidden states after the final norm.
    """

    def attend(
        query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
    ) -> torch.Tensor:
        return attention.prefill(
            query,
            key_cache,
            value_cache,
            inputs["block_tables"],
            inputs["context_lens"],
            inputs["cu_seqlens_q"],
            max_seqlen_q,
        )

    fused = statics.fused
    hidden = fused.hidden(inputs["input_ids"], inputs["positions"], inputs["slot_mapping"], attend)
    num_rows = len(inputs["logits_indices"])
    if num_rows:  # or else only prompts that were cut short: nothing to draw
        logits = statics.logits[:num_rows]
        logits.copy_(fused.decoder.lm_head(hidden.index_select(0, inputs["logits_indices"])))
        drawn, peak = choose(logits, variant, inputs, inputs["position"])
        ops.keep_tokens(drawn, peak, inputs["out_offset"], statics.tokens)
    return hidden
