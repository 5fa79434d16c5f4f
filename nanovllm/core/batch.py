"""`build_batch`: a plan in the flat form that a model step reads. Host integers only. Pure."""

from array import array
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from nanovllm.core.sequence import BLOCK_ID_BYTES, Sequence, SequenceStatus
from nanovllm.core.state import StepPlan

Int32Array = npt.NDArray[np.int32]

NO_BLOCK = -1
"""Fills a block table's row behind the sequence's own blocks."""

_NO_BLOCK_BYTE = b"\xff"  # four of them are int32 -1


@attrs.frozen(eq=False)
class Batch:
    """One step's inputs: `S` sequences, `T` packed positions, `M` blocks in the widest table.

    Rows stand in the order of `plan.scheduled`: first the decodes, one position each, then the
    prefills. All arrays are int32.

    Attributes:
        num_decodes: Rows that decode; the first ones.
        input_ids: `[T]` the token at each position.
        positions: `[T]` its position in its sequence.
        slot_mapping: `[T]` where its K/V go: `block_id * block_size + offset`.
        context_lens: `[S]` positions that each row's last token attends to, its own included.
        block_tables: `[S, M]` physical blocks, `NO_BLOCK` behind a sequence's own.
        cu_seqlens_q: `[S + 1]` running sum of scheduled positions; the first is 0.
        sampled_rows: `[R]` rows that get a token: all but prompts cut short by the budget.
        logits_indices: `[R]` packed position of the last token of each of those rows.
        max_seqlen_q: The most positions that one row computes.
    """

    num_decodes: int
    input_ids: Int32Array
    positions: Int32Array
    slot_mapping: Int32Array
    context_lens: Int32Array
    block_tables: Int32Array
    cu_seqlens_q: Int32Array
    sampled_rows: Int32Array
    logits_indices: Int32Array
    max_seqlen_q: int

    @property
    def num_seqs(self) -> int:
        """Rows, `S`."""
        return len(self.context_lens)

    @property
    def num_tokens(self) -> int:
        """Packed positions, `T`."""
        return len(self.input_ids)

    @property
    def cu_seqlens_k(self) -> Int32Array:
        """`[S + 1]` running sum of `context_lens`; the first is 0."""
        return _running_sum(self.context_lens)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Batch):
            return NotImplemented
        mine, theirs = attrs.astuple(self), attrs.astuple(other)
        return all(map(np.array_equal, mine, theirs))

    __hash__ = None  # type: ignore[assignment]  # it holds arrays


def build_batch(plan: StepPlan) -> Batch:
    """Flatten a plan that schedules at least one sequence."""
    if plan.num_prefill_tokens == 0:
        return _decode_batch(plan)
    return _mixed_batch(plan)


def _decode_batch(plan: StepPlan) -> Batch:
    """A step in which every sequence computes its newest token: all columns at once."""
    scheduled = plan.scheduled
    num_seqs = len(scheduled)
    lens = [seq.num_tokens for seq in scheduled]
    # -1: the newest token. The log may be longer than the snapshot, so not index -1.
    input_ids = _int32([seq.token_log[seq.num_tokens - 1] for seq in scheduled])
    context_lens = _int32(lens)
    positions = context_lens - 1  # -1: a position counts from 0
    block_tables = _pad_tables(scheduled)
    cu_seqlens_q = np.arange(num_seqs + 1, dtype=np.int32)
    rows = cu_seqlens_q[:-1]
    in_block = positions // plan.block_size
    block_ids = block_tables[rows, in_block]
    return Batch(
        num_decodes=num_seqs,
        input_ids=input_ids,
        positions=positions,
        slot_mapping=(block_ids - in_block) * plan.block_size + positions,
        context_lens=context_lens,
        block_tables=block_tables,
        cu_seqlens_q=cu_seqlens_q,
        sampled_rows=rows,
        logits_indices=rows,
        max_seqlen_q=1,
    )


def _mixed_batch(plan: StepPlan) -> Batch:
    """A step with prefills: rows of different lengths, packed one after the other."""
    scheduled = plan.scheduled
    input_ids = array("i")
    for seq in scheduled:
        start = seq.num_cached_tokens
        input_ids += seq.token_log[start : start + seq.num_scheduled_tokens]
    starts = _int32([seq.num_cached_tokens for seq in scheduled])
    lens_q = _int32([seq.num_scheduled_tokens for seq in scheduled])
    context_lens = starts + lens_q
    cu_seqlens_q = _running_sum(lens_q)
    row_of_token = np.repeat(np.arange(len(scheduled), dtype=np.int32), lens_q)
    # A token's place in its row, plus where the row starts in its sequence.
    positions = (
        np.arange(len(input_ids), dtype=np.int32) + (starts - cu_seqlens_q[:-1])[row_of_token]
    )
    block_tables = _pad_tables(scheduled)
    in_block, offset = np.divmod(positions, plan.block_size)
    sampled_rows = _int32(
        [row for row, seq in enumerate(scheduled) if seq.status is SequenceStatus.RUNNING]
    )
    return Batch(
        num_decodes=plan.num_decode_tokens,
        input_ids=np.frombuffer(input_ids, dtype=np.int32),
        positions=positions,
        slot_mapping=block_tables[row_of_token, in_block] * plan.block_size + offset,
        context_lens=context_lens,
        block_tables=block_tables,
        cu_seqlens_q=cu_seqlens_q,
        sampled_rows=sampled_rows,
        logits_indices=cu_seqlens_q[sampled_rows + 1] - 1,  # the last of the row before the next
        max_seqlen_q=int(lens_q.max()),
    )


def _pad_tables(scheduled: tuple[Sequence, ...]) -> Int32Array:
    """Stack the packed tables into one `[S, M]` array, joined as bytes in one go."""
    tables = [seq.packed_block_table for seq in scheduled]
    width = max(map(len, tables))
    padded = b"".join([table.ljust(width, _NO_BLOCK_BYTE) for table in tables])
    return np.frombuffer(padded, dtype=np.int32).reshape(len(tables), width // BLOCK_ID_BYTES)


def _running_sum(lens: Int32Array) -> Int32Array:
    sums = np.zeros(len(lens) + 1, dtype=np.int32)  # +1: the leading 0
    np.cumsum(lens, out=sums[1:])
    return sums


def _int32(values: list[int]) -> Int32Array:
    # Through `array`, since numpy takes twice as long to read a list of Python integers.
    buffer: Any = array("i", values)
    return np.frombuffer(buffer, dtype=np.int32)
