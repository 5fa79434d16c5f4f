"""`schedule`: decide what one step computes. Pure.

The rules, in the order in which they are applied. "First" is by `SequenceInfo.rank`: by priority,
among equals by deadline, then by age.

1. Every running sequence decodes one token. If the blocks that this needs are not free, the last
   sequences that hold any lose theirs, until they are: the first can always go on, so something
   always ends. What was preempted queues again by its rank.
2. If the first in the queue can't start for want of blocks or of a seat, sequences of a lower
   priority lose theirs to it, the last first.
3. What is left of the step's budget goes to prefill, in order. A sequence gets all blocks for its
   tokens when it starts, and only if one more stays free for each sequence that holds some;
   nothing starts behind a sequence that has to wait for blocks, or in a step that ran short (1).
4. A prompt that does not fit into the budget is cut into chunks. Up to half of the budget then
   goes to later prompts that fit whole, so that a short prompt does not wait for a long one.
5. Sequences that share their prompt (`group_id`) wait, passed by others, until the first of them
   has computed it; then they find it cached.

What follows: a sequence is only ever held up by those before it, by those that hold blocks and
seats of the same priority, and, for up to half of the budget, by short prompts. Whoever keeps the
engine full with one priority starves the lower ones; that is what a priority says.
"""

from nanovllm.core.preempt import computes_shared_blocks, give_way, make_room
from nanovllm.core.sequence import (
    BLOCK_ID_BYTES,
    Sequence,
    SequenceDraft,
    SequenceStatus,
    pack_block_ids,
)
from nanovllm.core.state import EngineState, SchedulerLimits, StalledHead, StepPlan
from nanovllm.core.step import StepDraft, may_grow

OVERTAKING_SHARE = 2
"""A prompt in chunks leaves up to one part in this many of the budget to those behind it."""


def schedule(state: EngineState, limits: SchedulerLimits) -> tuple[EngineState, StepPlan]:
    """Plan one step.

    Returns:
        The state in flight, in which the scheduled snapshots have `num_scheduled_tokens` set and
        their tables cover what the step computes, and the plan. A plan without a scheduled
        sequence means that there is nothing to do.
    """
    step = StepDraft(state)
    make_room(step)
    give_way(step, limits)
    _schedule_decodes(step)
    num_decode_tokens = len(step.scheduled)
    budget = limits.max_num_batched_tokens - num_decode_tokens
    if num_decode_tokens and limits.max_prefill_chunk is not None:
        budget = min(budget, limits.max_prefill_chunk)
    num_prefill_tokens = 0
    if step.waiting and budget > 0:
        num_prefill_tokens = _schedule_prefills(step, limits, budget)
    in_flight = step.freeze(state)
    plan = StepPlan(
        scheduled=tuple(step.scheduled),
        num_decode_tokens=num_decode_tokens,
        num_prefill_tokens=num_prefill_tokens,
        preempted=tuple(step.preempted),
        prefix_hits=tuple(step.prefix_hits),
        block_size=state.pool.block_size,
        running=in_flight.running,
        waiting=in_flight.waiting,
    )
    return in_flight, plan


def _schedule_decodes(step: StepDraft) -> None:
    """Schedule one token of every running sequence."""
    block_size = step.pool.block_size
    scheduled = step.scheduled
    ending = []  # those whose last token is on its way, see `nanovllm.core.lookahead`
    for seq in step.running:
        if seq.num_tokens >= seq.info.max_num_tokens:
            ending.append(seq)
            continue
        table = seq.packed_block_table
        # `needs_block`, written out: this loop runs for every token.
        if seq.num_tokens > len(table) // BLOCK_ID_BYTES * block_size:
            table += pack_block_ids(step.edit_pool().take(1))
        scheduled.append(
            SequenceDraft(
                seq.info,
                seq.token_log,
                seq.num_tokens,
                seq.num_cached_tokens,
                1,
                table,
                seq.status,
                seq.prefix,
            ).freeze()
        )
    step.running = scheduled + ending


def _schedule_prefills(step: StepDraft, limits: SchedulerLimits, budget: int) -> int:
    """Share the budget out over the queue; return how much of it was used."""
    block_size, num_begun = step.pool.block_size, step.num_begun
    num_free_seats = limits.num_seats - len(step.running) - num_begun
    if num_begun == 0 and (num_free_seats <= 0 or not step.may_start):
        return 0
    num_begun_left = num_begun
    headroom = -1  # not known yet
    left = reserved = budget
    chunked: SequenceDraft | None = None  # the first prompt that does not fit whole
    drafts: list[tuple[int, SequenceDraft]] = []  # with the place in the queue
    groups: set[int | None] = set()  # whose shared prompts are not computed yet
    for place, seq in _candidates(step, limits.num_seats):
        may_start = step.may_start and num_free_seats > 0
        if left <= 0 or (not may_start and num_begun_left == 0):
            break
        is_begun = place < num_begun
        num_begun_left -= is_begun
        draft: SequenceDraft | None = None
        if chunked is not None and seq.num_tokens - seq.num_cached_tokens > left:
            pass  # it may be too long to overtake, whatever is cached of it
        elif is_begun:
            draft = seq.thaw()
        elif may_start and seq.info.group_id not in groups:
            if headroom < 0:
                holders = (*step.running, *step.waiting[:num_begun])
                headroom = sum(may_grow(holder, block_size) for holder in holders)
            draft = _start(step, seq, headroom)
            if draft is None:
                step.may_start = False
            else:
                num_free_seats -= 1
                headroom += may_grow(draft, block_size)
        if computes_shared_blocks(draft or seq, step.pool):
            groups.add(seq.info.group_id)
        if draft is None:
            continue
        remaining = draft.num_tokens - draft.num_cached_tokens
        if remaining <= left:
            draft.num_scheduled_tokens = remaining
            drafts.append((place, draft))
            left -= remaining
        else:
            assert chunked is None, "what goes on behind a prompt in chunks fits whole"
            chunked = draft
            chunked.num_scheduled_tokens = left
            drafts.append((place, draft))
            left = reserved = left // OVERTAKING_SHARE
    if chunked is not None:
        chunked.num_scheduled_tokens -= reserved - left  # what those behind it took
    return _freeze_prefills(step, drafts)


def _candidates(step: StepDraft, num_seats: int) -> list[tuple[int, Sequence]]:
    """What may get a share, in order, each with its place in the queue.

    Nothing further back than there are seats can start, so the step's cost does not grow with the
    length of the queue.
    """
    num_begun = step.num_begun
    candidates = list(enumerate(step.waiting[: num_begun + num_seats]))
    # Those that have begun stand in front; one that is more urgent may have come since.
    if 0 < num_begun < len(candidates):
        last_begun, first_new = candidates[num_begun - 1][1], candidates[num_begun][1]
        if first_new.info.rank < last_begun.info.rank:
            candidates.sort(key=lambda candidate: candidate[1].info.rank)
    return candidates


def _start(step: StepDraft, seq: Sequence, headroom: int) -> SequenceDraft | None:
    """Give a sequence all blocks for its tokens, cached ones first, if there are enough.

    `headroom` blocks stay free, one for every sequence that may still grow: without them the
    newcomer would only get somebody preempted.
    """
    stalled = step.stalled_head
    if stalled is not None and stalled.seq_id == seq.info.seq_id:
        if step.num_free < stalled.num_blocks + headroom:
            return None
        step.stalled_head = None
    cached: list[int] = []
    draft = seq.thaw()
    editor = step.edit_pool()
    if step.pool.enable_prefix_caching and not seq.needs_prompt_logits:
        cached, draft.prefix = editor.find_prefix(seq.token_log, seq.num_tokens)
    num_fresh = seq.num_blocks - len(cached)
    num_needed = num_fresh + editor.count_free(cached)
    if editor.num_free < num_needed + headroom:
        step.stalled_head = StalledHead(seq.info.seq_id, num_needed)
        return None
    editor.share(cached)
    draft.packed_block_table = pack_block_ids(cached + editor.take(num_fresh))
    draft.num_cached_tokens = len(cached) * step.pool.block_size
    step.prefix_hits.append((seq.info.seq_id, draft.num_cached_tokens))
    return draft


def _freeze_prefills(step: StepDraft, drafts: list[tuple[int, SequenceDraft]]) -> int:
    """Put the scheduled prefills into the plan, and move those that end in it to `running`."""
    if not drafts:
        return 0
    num_tokens = 0
    queue: list[Sequence | None] = list(step.waiting)
    running = list(step.running)
    begun: list[Sequence] = []  # in this step, without ending in it: at most one
    for place, draft in drafts:
        num_tokens += draft.num_scheduled_tokens
        ends = draft.num_cached_tokens + draft.num_scheduled_tokens == draft.num_tokens
        if ends:
            draft.status = SequenceStatus.RUNNING
        seq = draft.freeze()
        step.scheduled.append(seq)
        queue[place] = None if ends else seq
        if ends:
            running.append(seq)
        elif place >= step.num_begun:
            begun.append(seq)
            queue[place] = None
    # Whoever began before it and stands before it has ended its prompt; else that one were cut.
    step.waiting = tuple(seq for seq in (*begun, *queue) if seq is not None)
    step.running = running
    return num_tokens
