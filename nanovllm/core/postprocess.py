"""`postprocess`: take in what a step computed. Pure."""

from collections.abc import Sequence as ReadOnlySequence
from typing import NamedTuple

from nanovllm.core.blocks import PoolEditor
from nanovllm.core.sequence import (
    BLOCK_ID_BYTES,
    FinishReason,
    Sequence,
    SequenceDraft,
    SequenceInfo,
    SequenceStatus,
)
from nanovllm.core.state import EngineState, StepPlan


class SequenceOutput(NamedTuple):
    """What one step did to one scheduled sequence.

    Attributes:
        seq_id: Whose it is.
        new_token_id: The token that was appended; None after an intermediate chunk.
        finish_reason: Why the sequence ended; None if it goes on.
        sequence: The snapshot after the step.
    """

    seq_id: int
    new_token_id: int | None
    finish_reason: FinishReason | None
    sequence: Sequence


def postprocess(
    state: EngineState, plan: StepPlan, token_ids: ReadOnlySequence[int]
) -> tuple[EngineState, tuple[SequenceOutput, ...]]:
    """Count the computed positions as cached, append the drawn tokens, end what has ended.

    Args:
        state: The state in flight; sequences aborted since `schedule` are passed over.
        plan: The plan that was computed.
        token_ids: One id per entry of `plan.scheduled`; ignored for an intermediate chunk.

    Returns:
        The state at rest, and one output per scheduled sequence that is still live, in order.
    """
    if len(token_ids) != len(plan.scheduled):
        raise ValueError(
            f"{len(token_ids)} token ids for {len(plan.scheduled)} scheduled sequences; "
            "give one per sequence."
        )
    untouched = state.running is plan.running and state.waiting is plan.waiting
    live = None if untouched else {id(seq) for seq in (*state.running, *state.waiting)}
    pool, block_size = state.pool, state.pool.block_size
    caching = pool.enable_prefix_caching
    editor: PoolEditor | None = None
    outputs: list[SequenceOutput] = []
    running: list[Sequence] = []
    chunks: dict[int, Sequence] = {}  # intermediate ones, by the id of the snapshot in flight
    # This loop runs for every token, so what it calls for all of them is looked up once, written
    # out in place, or made without a Python-level constructor.
    running_status, new_tuple = SequenceStatus.RUNNING, tuple.__new__

    for seq, token_id in zip(plan.scheduled, token_ids, strict=True):
        if live is not None and id(seq) not in live:
            continue
        info, num_cached, num_scheduled = seq.info, seq.num_cached_tokens, seq.num_scheduled_tokens
        draft = SequenceDraft(
            info,
            seq.token_log,
            seq.num_tokens,
            num_cached + num_scheduled,
            0,
            seq.packed_block_table,
            seq.status,
            seq.prefix,
        )
        if caching and num_cached % block_size + num_scheduled >= block_size:
            editor = pool.thaw() if editor is None else editor
            register_full_blocks(editor, draft, num_cached // block_size, block_size)
        if draft.status is not running_status:
            after = chunks[id(seq)] = draft.freeze()
            outputs.append(SequenceOutput(info.seq_id, None, None, after))
            continue
        if len(draft.token_log) == draft.num_tokens:
            draft.token_log.append(token_id)
            draft.num_tokens += 1
        else:
            draft.append_token(token_id)  # another snapshot's tokens follow in this log
        finish_reason = None
        if token_id in info.stop_token_ids or draft.num_tokens >= info.max_num_tokens:
            finish_reason = finish_reason_of(info, draft.num_tokens, token_id)
        if finish_reason is None:
            after = draft.freeze()
            running.append(after)
        else:
            editor = pool.thaw() if editor is None else editor
            editor.release(memoryview(draft.packed_block_table).cast("i"))
            draft.release()
            draft.status = SequenceStatus.FINISHED
            after = draft.freeze()
        outputs.append(new_tuple(SequenceOutput, (info.seq_id, token_id, finish_reason, after)))

    waiting = state.waiting
    if chunks:
        waiting = tuple(chunks.get(id(seq), seq) for seq in waiting)
    if editor is not None:
        pool = editor.freeze()
    at_rest = EngineState(
        waiting,
        tuple(running),
        pool,
        state.next_arrival,
        state.highest_seq_id,
        state.stalled_head,
        state.next_deadline_s,
    )
    return at_rest, tuple(outputs)


def register_full_blocks(
    editor: PoolEditor, draft: SequenceDraft, first_block: int, block_size: int
) -> None:
    """Enter the blocks from the first on that are full into the prefix map; their K/V exist."""
    num_full = draft.num_cached_tokens // block_size
    table = draft.packed_block_table[first_block * BLOCK_ID_BYTES : num_full * BLOCK_ID_BYTES]
    draft.prefix = editor.register(
        draft.prefix,
        memoryview(table).cast("i"),
        draft.token_log,
        first_block * block_size,
    )


def finish_reason_of(info: SequenceInfo, num_tokens: int, token_id: int) -> FinishReason | None:
    """Why a sequence ends with its newest token, if it does."""
    num_completion_tokens = num_tokens - info.num_prompt_tokens
    if token_id in info.stop_token_ids and num_completion_tokens > info.sampling_params.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if num_tokens >= info.max_num_tokens else None
