"""`schedule`: decide what one step computes. Pure.

The rules, in the order in which they are applied:

1. Every running sequence decodes one token. If the blocks that this needs are not free, the
   youngest sequences that hold any lose theirs, until they are: the oldest can always go on, so
   something always ends. What was preempted queues again by its age.
2. What is left of the step's budget goes to prefill, oldest first. A sequence gets all blocks for
   its tokens when it starts, and only if one more stays free for each sequence that holds some;
   nothing starts behind a sequence that has to wait for blocks, or in a step that preempted.
3. A prompt that does not fit into the budget is cut into chunks. Up to half of the budget then
   goes to younger prompts that fit whole, so that a short prompt does not wait for a long one.
"""

from nanovllm.core.blocks import PoolEditor
from nanovllm.core.sequence import (
    BLOCK_ID_BYTES,
    Sequence,
    SequenceDraft,
    SequenceStatus,
    pack_block_ids,
)
from nanovllm.core.state import EngineState, SchedulerLimits, StalledHead, StepPlan

OVERTAKING_SHARE = 2
"""A prompt in chunks leaves up to one part in this many of the budget to those behind it."""


class _Step:
    """One step while it is being decided: the state's parts, thawed."""

    __slots__ = (
        "editor",
        "pool",
        "preempted",
        "prefix_hits",
        "running",
        "scheduled",
        "stalled_head",
        "waiting",
    )

    def __init__(self, state: EngineState) -> None:
        self.pool = state.pool
        self.editor: PoolEditor | None = None
        self.running: list[Sequence] | tuple[Sequence, ...] = state.running
        self.waiting: tuple[Sequence, ...] = state.waiting
        self.stalled_head = state.stalled_head
        self.scheduled: list[Sequence] = []
        self.preempted: list[int] = []
        self.prefix_hits: list[tuple[int, int]] = []

    @property
    def num_free(self) -> int:
        return self.pool.num_free if self.editor is None else self.editor.num_free

    def edit_pool(self) -> PoolEditor:
        """The pool's editor; the pool is copied only in steps that change it."""
        if self.editor is None:
            self.editor = self.pool.thaw()
        return self.editor


def schedule(state: EngineState, limits: SchedulerLimits) -> tuple[EngineState, StepPlan]:
    """Plan one step.

    Returns:
        The state in flight, in which the scheduled snapshots have `num_scheduled_tokens` set and
        their tables cover what the step computes, and the plan. A plan without a scheduled
        sequence means that there is nothing to do.
    """
    step = _Step(state)
    _make_room(step)
    _schedule_decodes(step)
    num_decode_tokens = len(step.scheduled)
    budget = limits.max_num_batched_tokens - num_decode_tokens
    if num_decode_tokens and limits.max_prefill_chunk is not None:
        budget = min(budget, limits.max_prefill_chunk)
    num_prefill_tokens = 0
    if step.waiting and budget > 0:
        num_prefill_tokens = _schedule_prefills(step, limits, budget)
    running = tuple(step.running)
    plan = StepPlan(
        scheduled=tuple(step.scheduled),
        num_decode_tokens=num_decode_tokens,
        num_prefill_tokens=num_prefill_tokens,
        preempted=tuple(step.preempted),
        prefix_hits=tuple(step.prefix_hits),
        block_size=state.pool.block_size,
        running=running,
        waiting=step.waiting,
    )
    pool = state.pool if step.editor is None else step.editor.freeze()
    in_flight = EngineState(
        step.waiting,
        running,
        pool,
        state.next_arrival,
        state.highest_seq_id,
        step.stalled_head,
    )
    return in_flight, plan


def _needs_block(seq: Sequence, block_size: int) -> bool:
    """Whether the table is one block short of the newest token, which this step computes."""
    return seq.num_tokens > len(seq.packed_block_table) // BLOCK_ID_BYTES * block_size


def _make_room(step: _Step) -> None:
    """Preempt the youngest block holders until every running sequence can get its next block."""
    if step.num_free >= len(step.running):
        return  # enough even if each one needs a block
    block_size = step.pool.block_size
    num_needed = sum(_needs_block(seq, block_size) for seq in step.running)
    if num_needed <= step.num_free:
        return
    running = list(step.running)
    holders = [*running, *(seq for seq in step.waiting if seq.packed_block_table)]
    holders.sort(key=lambda seq: seq.info.arrival)
    evicted: dict[int, Sequence] = {}  # by arrival
    while num_needed > step.num_free:
        youngest = holders.pop()
        step.edit_pool().release(youngest.block_table)
        step.preempted.append(youngest.info.seq_id)
        if youngest.status is SequenceStatus.RUNNING:
            num_needed -= _needs_block(youngest, block_size)
        draft = youngest.thaw()
        draft.release()
        draft.status = SequenceStatus.WAITING
        evicted[youngest.info.arrival] = draft.freeze()
    step.running = [seq for seq in running if seq.info.arrival not in evicted]
    queue = [seq for seq in step.waiting if seq.info.arrival not in evicted]
    queue.extend(evicted.values())
    queue.sort(key=lambda seq: seq.info.arrival)
    step.waiting = tuple(queue)


def _schedule_decodes(step: _Step) -> None:
    """Schedule one token of every running sequence."""
    block_size = step.pool.block_size
    scheduled = step.scheduled
    for seq in step.running:
        table = seq.packed_block_table
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
    step.running = scheduled.copy()


def _schedule_prefills(step: _Step, limits: SchedulerLimits, budget: int) -> int:
    """Share the budget out over the queue; return how much of it was used."""
    block_size = step.pool.block_size
    # Only the first in the queue can hold blocks: a prompt that was cut short in an earlier step.
    num_partial = int(bool(step.waiting[0].packed_block_table))
    num_free_seats = limits.num_seats - len(step.running) - num_partial
    headroom = -1  # not known yet
    left = reserved = budget
    chunked: SequenceDraft | None = None  # the oldest prompt that does not fit whole
    drafts: list[tuple[int, SequenceDraft]] = []  # with the place in the queue
    # Nothing further back than there are seats can start, so the step's cost does not grow with
    # the length of the queue.
    for place, seq in enumerate(step.waiting[: limits.num_seats]):
        if left <= 0:
            break
        if place < num_partial:
            draft = seq.thaw()
        elif step.preempted or num_free_seats <= 0:
            break
        elif chunked is not None and seq.num_tokens > left:
            continue  # it may be too long to overtake, whatever is cached of it
        else:
            if headroom < 0:
                holders = (*step.running, *step.waiting[:num_partial])
                headroom = sum(_may_grow(holder, block_size) for holder in holders)
            started = _start(step, seq, headroom)
            if started is None:
                break
            draft = started
            num_free_seats -= 1
            headroom += _may_grow(draft, block_size)
        remaining = draft.num_tokens - draft.num_cached_tokens
        if remaining <= left:
            draft.num_scheduled_tokens = remaining
            drafts.append((place, draft))
            left -= remaining
        else:
            assert chunked is None, "what starts behind a prompt in chunks fits whole"
            chunked = draft
            chunked.num_scheduled_tokens = left
            drafts.append((place, draft))
            left = reserved = left // OVERTAKING_SHARE
    if chunked is not None:
        chunked.num_scheduled_tokens -= reserved - left  # what those behind it took
    return _freeze_prefills(step, drafts)


def _start(step: _Step, seq: Sequence, headroom: int) -> SequenceDraft | None:
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
    if step.pool.enable_prefix_caching:
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


def _may_grow(seq: Sequence | SequenceDraft, block_size: int) -> bool:
    """Whether the sequence may come to need more blocks than it holds."""
    # -1: the last token that it can get needs no K/V.
    held = len(seq.packed_block_table) // BLOCK_ID_BYTES
    return seq.info.max_num_tokens - 1 > held * block_size


def _freeze_prefills(step: _Step, drafts: list[tuple[int, SequenceDraft]]) -> int:
    """Put the scheduled prefills into the plan, and move those that end in it to `running`."""
    if not drafts:
        return 0
    num_tokens = 0
    queue: list[Sequence | None] = list(step.waiting)
    running = list(step.running)
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
    step.waiting = tuple(seq for seq in queue if seq is not None)
    step.running = running
    return num_tokens
