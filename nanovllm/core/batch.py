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

_NOTHING: Int32Array = np.zeros(0, np.int32)


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
        scored_indices: `[P]` packed positions whose logits are asked for besides, as they say how
            likely the next token of a prompt was. None of them is among `logits_indices`.
        scored_ids: `[P]` that next token.
        scored_num_top: `[P]` the alternatives that are wanted beside it.
        sources: `[S]` in a step of decodes planned while the one before it was in flight: which
            of that step's `sampled_rows` drew the row's token, which `input_ids` does not know.
            None: `input_ids` knows them all.
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
    scored_indices: Int32Array = _NOTHING
    scored_ids: Int32Array = _NOTHING
    scored_num_top: Int32Array = _NOTHING
    sources: Int32Array | None = None

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


def build_batch(plan: StepPlan, previous: StepPlan | None = None) -> Batch:
    """Flatten a plan that schedules at least one sequence.

    Args:
        plan: What is to be computed.
        previous: The plan before it, if its tokens are not known yet; then `plan` decodes only.
    """
    if previous is not None:
        return _lookahead_batch(plan, previous)
    if plan.num_prefill_tokens == 0:
        return _decode_batch(plan)
    return _mixed_batch(plan)


def _lookahead_batch(plan: StepPlan, previous: StepPlan) -> Batch:
    """A step of decodes, all of which the step before it draws a token for."""
    assert plan.num_prefill_tokens == 0, "a prompt is not computed ahead"
    drawn = [seq.info.seq_id for seq in previous.scheduled if seq.status is SequenceStatus.RUNNING]
    place = {seq_id: index for index, seq_id in enumerate(drawn)}
    sources = [place[seq.info.seq_id] for seq in plan.scheduled]
    return _decode_batch(plan, sources)


def _decode_batch(plan: StepPlan, sources: list[int] | None = None) -> Batch:
    """A step in which every sequence computes its newest token: all columns at once."""
    scheduled = plan.scheduled
    num_seqs = len(scheduled)
    lens = [seq.num_tokens for seq in scheduled]
    if sources is None:
        # -1: the newest token. The log may be longer than the snapshot, so not index -1.
        input_ids = _int32([seq.token_log[seq.num_tokens - 1] for seq in scheduled])
    else:
        input_ids = np.zeros(num_seqs, np.int32)
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
        sources=None if sources is None else _int32(sources),
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
    scored = [
        (int(cu_seqlens_q[row]), seq)
        for row, seq in enumerate(scheduled[plan.num_decode_tokens :], plan.num_decode_tokens)
        if seq.num_scored_tokens > 0
    ]
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
        **(_scores(scored) if scored else {}),
    )


def _scores(scored: list[tuple[int, Sequence]]) -> dict[str, Int32Array]:
    """The last fields of a `Batch`, of sequences with the packed position that each starts at."""
    indices: list[int] = []
    ids: list[int] = []
    num_top: list[int] = []
    for first, seq in scored:
        count = seq.num_scored_tokens
        after = seq.num_cached_tokens + 1  # +1: the token after the position
        indices += range(first, first + count)
        ids += seq.token_log[after : after + count]
        num_top += [seq.info.sampling_params.prompt_logprobs or 0] * count
    return {
        "scored_indices": _int32(indices),
        "scored_ids": _int32(ids),
        "scored_num_top": _int32(num_top),
    }


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
