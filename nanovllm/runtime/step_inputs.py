"""What a step on a device needs from the host, laid out as int32. Pure: numpy only."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from nanovllm.core import Batch
from nanovllm.kernels.reference.weights import MAX_TEMPERATURE
from nanovllm.runtime.decode_program import NO_SOURCE, Variant
from nanovllm.runtime.sampling import GREEDY_BELOW, SamplingRow

Columns = Mapping[str, npt.NDArray[np.int32] | npt.NDArray[np.float32]]

ALIGN_WORDS = 4
"""Where arrays of a packed vector start: kernels are compiled for 16 bytes."""

_SEED_MASK = 2**64 - 1

HowToChoose = Literal["greedy", "sample", "host"]


def how_to_choose(rows: Sequence[SamplingRow], vocab_size: int) -> HowToChoose:
    """How the tokens of a step can be chosen.

    Returns:
        "greedy" or "sample": inside the step, on the device, see `Variant`. "host": from the
        step's logits, after it, as some row looks at tokens before it, cuts the distribution by
        rank or mass, or wants log-probabilities.
    """
    how: HowToChoose = "greedy"
    for row in rows:  # in one loop without calls: it runs for every row of every step
        params = row.params
        if (
            params.logprobs is not None
            or row.num_completion_tokens < params.min_tokens
            or row.allowed_tokens is not None
            or params.logit_bias
            or params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
        ):
            return "host"
        if params.temperature >= GREEDY_BELOW:
            if 0 < params.top_k < vocab_size or params.top_p < 1:
                return "host"
            how = "sample"
    return how


def sampling_columns(rows: Sequence[SamplingRow], variant: Variant) -> Columns:
    """What `decode_program.choose` reads, `[R]` each; zeros where all rows are greedy."""
    if variant == "greedy":
        zeros = np.zeros(len(rows), np.int32)
        return {
            "temperature": zeros.view(np.float32),
            "min_p": zeros.view(np.float32),
            "seed_low": zeros,
            "seed_high": zeros,
        }
    # `[R, 2]` int32, the low word first wherever this runs.
    seeds = np.array([row.seed & _SEED_MASK for row in rows], "<u8").view("<i4").reshape(-1, 2)
    # A greedy row among drawing ones is marked by a temperature of 0.
    temperatures = [
        0.0 if row.is_greedy else min(row.params.temperature, MAX_TEMPERATURE) for row in rows
    ]
    return {
        "temperature": np.array(temperatures, np.float32),
        "min_p": np.array([row.params.min_p for row in rows], np.float32),
        "seed_low": seeds[:, 0].astype(np.int32),
        "seed_high": seeds[:, 1].astype(np.int32),
    }


def decode_fields(
    batch: Batch, columns: Columns, *, out_offset: int, source_offset: int
) -> Mapping[str, npt.ArrayLike]:
    """Every field of `decode_layout` for a batch of decodes.

    Args:
        batch: Decodes only.
        columns: Of `sampling_columns`.
        out_offset: Where the step's tokens go in `DecodeStatics.tokens`.
        source_offset: Where those of the step before it lie there.
    """
    if batch.sources is None:
        sources = np.full(batch.num_seqs, NO_SOURCE, np.int32)
    else:
        sources = batch.sources + np.int32(source_offset)
    return {
        "num_rows": batch.num_seqs,
        "out_offset": out_offset,
        "token": batch.input_ids,
        "source": sources,
        "context_len": batch.context_lens,
        "block_table": batch.block_tables,
        **columns,
    }


def mixed_fields(
    batch: Batch, columns: Columns, *, out_offset: int, source_offset: int
) -> dict[str, npt.NDArray[np.int32] | npt.NDArray[np.float32]]:
    """What a step with prompts reads, of as many rows and positions as there are.

    Args:
        batch: Any.
        columns: Of `sampling_columns`.
        out_offset: As in `decode_fields`.
        source_offset: As there.
    """
    arrays = {
        "out_offset": np.full(1, out_offset, np.int32),
        "input_ids": batch.input_ids,
        "positions": batch.positions,
        "slot_mapping": batch.slot_mapping,
        "context_lens": batch.context_lens,
        "cu_seqlens_q": batch.cu_seqlens_q,
        "block_tables": batch.block_tables,
        "logits_indices": batch.logits_indices,
        # The token that is drawn stands behind the context.
        "position": batch.context_lens[batch.sampled_rows],
        **columns,
    }
    if batch.sources is not None:
        arrays["source"] = batch.sources + np.int32(source_offset)
    return arrays


def pack_arrays(
    arrays: Mapping[str, npt.NDArray[np.int32] | npt.NDArray[np.float32]],
    out: npt.NDArray[np.int32],
) -> tuple[dict[str, slice], int]:
    """Lay arrays one after the other into `out`; returns where each lies, and the words in use.

    Each starts on a multiple of `ALIGN_WORDS`.
    """
    places, at = {}, 0
    for name, array in arrays.items():
        end = at + array.size
        out[at:end] = array.reshape(-1).view(np.int32)
        places[name] = slice(at, end)
        at = -(-end // ALIGN_WORDS) * ALIGN_WORDS
    return places, at


def max_mixed_words(max_num_batched_tokens: int, max_num_seqs: int, num_table_columns: int) -> int:
    """Words that `pack_arrays` needs at most for a step with prefills."""
    per_token = 3  # token, position, slot
    # Length, running sum, place of the logits, position, source, four for sampling.
    per_seq = num_table_columns + 9
    num_arrays = 13  # of 0 to 3 words more each, to the next aligned one
    # +2: a running sum has one more, and there is the offset of the tokens.
    return (
        max_num_batched_tokens * per_token + max_num_seqs * per_seq + ALIGN_WORDS * num_arrays + 2
    )
