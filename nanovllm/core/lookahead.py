"""Plan a step before the tokens of the step before it are known. Pure.

What a step computes depends on how many tokens each sequence has, and hardly ever on which:

    state, plan = schedule(state, limits)        # the step is on its way
    state, next_plan = schedule(advance(state), limits)      # so is the next one
    state, outputs = settle(state, plan, token_ids)          # the first one's tokens are there

`settle(advance(state), plan, token_ids)` is `postprocess(state, plan, token_ids)`. A sequence that
its token ends is found out one step late: it is gone from the state by then, and what the next
step draws for it is passed over. That step still writes one position of its K/V, into a block that
nobody finds by its prefix; whoever gets the block uses it in a later step, so a device that runs
steps in order needs no other fence.
"""

from collections.abc import Sequence as ReadOnlySequence

import attrs

from nanovllm.core.postprocess import SequenceOutput, finish_reason_of, register_full_blocks
from nanovllm.core.sequence import Sequence, SequenceDraft, SequenceStatus
from nanovllm.core.state import EngineState, StepPlan


def advance(state: EngineState) -> EngineState:
    """The state in flight as it will be when its step has been computed, but for the tokens.

    Each sequence that draws one counts it already: its newest token is in none of the snapshots
    that exist, and only a step may read it, from the step that draws it. A sequence with as many
    tokens as it may have stays, and is not scheduled again.
    """
    return attrs.evolve(
        state, waiting=_advance_all(state.waiting), running=_advance_all(state.running)
    )


def _advance_all(seqs: tuple[Sequence, ...]) -> tuple[Sequence, ...]:
    return tuple(_advance(seq) if seq.num_scheduled_tokens else seq for seq in seqs)


def _advance(seq: Sequence) -> Sequence:
    return SequenceDraft(
        seq.info,
        seq.token_log,
        seq.num_tokens + (seq.status is SequenceStatus.RUNNING),  # +1: the token on its way
        seq.num_cached_tokens + seq.num_scheduled_tokens,
        0,
        seq.packed_block_table,
        seq.status,
        seq.prefix,
    ).freeze()


def settle(
    state: EngineState, plan: StepPlan, token_ids: ReadOnlySequence[int]
) -> tuple[EngineState, tuple[SequenceOutput, ...]]:
    """Take in the tokens of a step that the state counts as computed.

    Args:
        state: What `advance` made of the state in flight, at rest or with the next step in flight.
            Sequences that were aborted since are passed over.
        plan: The plan of the step.
        token_ids: One id per entry of `plan.scheduled`; ignored for an intermediate chunk.

    Returns:
        The state, and one output per scheduled sequence that is still live, in order.
    """
    if len(token_ids) != len(plan.scheduled):
        raise ValueError(
            f"{len(token_ids)} token ids for {len(plan.scheduled)} scheduled sequences; "
            "give one per sequence."
        )
    live = {seq.info.seq_id: seq for seq in (*state.running, *state.waiting)}
    editor, block_size = state.pool.thaw(), plan.block_size
    caching = state.pool.enable_prefix_caching
    after: dict[int, Sequence | None] = {}  # by id; None: it ended
    outputs = []
    for scheduled, token_id in zip(plan.scheduled, token_ids, strict=True):
        seq_id = scheduled.info.seq_id
        current = live.get(seq_id)
        if current is None:
            continue
        draft = current.thaw()
        first_block = scheduled.num_cached_tokens // block_size
        # Unless it lost its blocks since.
        if caching and draft.num_cached_tokens // block_size > first_block:
            register_full_blocks(editor, draft, first_block, block_size)
        if scheduled.status is not SequenceStatus.RUNNING:  # a prompt that was cut short
            after[seq_id] = chunk = draft.freeze()
            outputs.append(SequenceOutput(seq_id, None, None, chunk))
            continue
        _append(draft, scheduled.num_tokens, token_id)
        reason = finish_reason_of(draft.info, scheduled.num_tokens + 1, token_id)  # +1: this token
        if reason is not None:
            if draft.packed_block_table:
                editor.release(memoryview(draft.packed_block_table).cast("i"))
            draft.num_tokens = scheduled.num_tokens + 1  # without one that a step may be drawing
            draft.release()
            draft.status = SequenceStatus.FINISHED
        snapshot = draft.freeze()
        after[seq_id] = snapshot if reason is None else None
        outputs.append(SequenceOutput(seq_id, token_id, reason, snapshot))
    settled = attrs.evolve(
        state,
        waiting=_replace(state.waiting, after),
        running=_replace(state.running, after),
        pool=editor.freeze(),
    )
    return settled, tuple(outputs)


def _append(draft: SequenceDraft, num_tokens: int, token_id: int) -> None:
    """Put the token where the draft counts it already: behind the first `num_tokens`."""
    if len(draft.token_log) != num_tokens:  # another snapshot's tokens follow in this log
        draft.token_log = draft.token_log[:num_tokens]
    draft.token_log.append(token_id)


def _replace(seqs: tuple[Sequence, ...], after: dict[int, Sequence | None]) -> tuple[Sequence, ...]:
    replaced = (after.get(seq.info.seq_id, seq) for seq in seqs)
    return tuple(seq for seq in replaced if seq is not None)
