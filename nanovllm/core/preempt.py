"""Who loses its blocks to whom. Pure.

Sequences stand in one total order, `SequenceInfo.rank`, and blocks only ever move up in it: the
first of all live sequences never loses its own, so something always ends. What was preempted keeps
its tokens and queues again by its rank; its blocks stay hittable until they are taken.
"""

from nanovllm.core.blocks import BlockPool, PoolEditor
from nanovllm.core.sequence import Sequence, SequenceDraft, SequenceStatus
from nanovllm.core.state import SchedulerLimits, StalledHead
from nanovllm.core.step import StepDraft, may_grow, needs_block


def make_room(step: StepDraft) -> None:
    """Preempt the least urgent block holders until every running one can get its next block.

    Nothing starts in a step that had to: it would take the blocks that were just made free.
    """
    if step.num_free >= len(step.running):
        return  # enough even if each one needs a block
    block_size = step.pool.block_size
    num_needed = sum(needs_block(seq, block_size) for seq in step.running)
    if num_needed <= step.num_free:
        return
    holders = [*step.running, *step.waiting[: step.num_begun]]
    holders.sort(key=_rank)
    victims = []
    while num_needed > step.num_free:
        victim = holders.pop()
        step.edit_pool().release(victim.block_table)
        if victim.status is SequenceStatus.RUNNING:
            num_needed -= needs_block(victim, block_size)
        victims.append(victim)
    _queue_again(step, victims)
    step.may_start = False


def give_way(step: StepDraft, limits: SchedulerLimits) -> None:
    """Preempt holders of a lower priority than the first in the queue that has no blocks.

    Only if that makes enough room for it to start, and only as many as it takes. An older one or
    one with an earlier deadline waits its turn: it takes the blocks of nobody.
    """
    if not step.may_start or step.num_begun == len(step.waiting):
        return
    head, begun = step.waiting[step.num_begun], step.waiting[: step.num_begun]
    priority = head.info.priority
    holders = [seq for seq in step.running if seq.info.priority > priority]
    holders += [seq for seq in begun if seq.info.priority > priority]
    if not holders or any(
        seq.info.group_id == head.info.group_id and computes_shared_blocks(seq, step.pool)
        for seq in begun
    ):
        return
    holders.sort(key=_rank)
    block_size = step.pool.block_size
    num_free_seats = limits.num_seats - len(step.running) - len(begun)
    # What the others take in this step, and one more for each of them that may then still grow.
    num_claimed = sum(_num_claimed(seq, block_size) for seq in (*step.running, *begun))
    editor = step.pool.thaw()
    num_needed = _num_needed(step, editor, head)
    victims: list[Sequence] = []
    while num_free_seats < 1 or editor.num_free < num_needed + num_claimed:
        if not holders:
            return
        victim = holders.pop()
        editor.release(victim.block_table)
        num_free_seats += 1
        num_claimed -= _num_claimed(victim, block_size)
        victims.append(victim)
    if victims:
        step.adopt(editor)
        _queue_again(step, victims)


def computes_shared_blocks(seq: Sequence | SequenceDraft, pool: BlockPool) -> bool:
    """Whether siblings behind it do well to wait: it still has blocks to compute that they share.

    They then start with all full blocks of the prompt found cached, so that each computes what is
    left of the last block and no more.
    """
    if seq.info.group_id is None or not pool.enable_prefix_caching:
        return False
    # -1: the last token is always computed, so a block that ends in it is never found.
    num_shared_blocks = (seq.info.num_prompt_tokens - 1) // pool.block_size
    return seq.num_cached_tokens < num_shared_blocks * pool.block_size


def _num_needed(step: StepDraft, editor: PoolEditor, head: Sequence) -> int:
    """Free blocks that the head of the queue takes to start; looked up once and remembered.

    It may come to need more, if blocks that it would share are among those that are made free. It
    then does not start in this step, and the next one knows better.
    """
    stalled = step.stalled_head
    if stalled is None or stalled.seq_id != head.info.seq_id:
        cached: list[int] = []
        if step.pool.enable_prefix_caching and not head.needs_prompt_logits:
            cached, _ = editor.find_prefix(head.token_log, head.num_tokens)
        num_needed = head.num_blocks - len(cached) + editor.count_free(cached)
        stalled = step.stalled_head = StalledHead(head.info.seq_id, num_needed)
    return stalled.num_blocks


def _num_claimed(seq: Sequence, block_size: int) -> int:
    num_new_blocks = int(needs_block(seq, block_size))
    return num_new_blocks + may_grow(seq, block_size, num_new_blocks)


def _queue_again(step: StepDraft, victims: list[Sequence]) -> None:
    """Take what lost its blocks out of its place, and queue it by its rank."""
    gone = set(map(id, victims))
    step.preempted += [seq.info.seq_id for seq in victims]
    step.running = [seq for seq in step.running if id(seq) not in gone]
    begun = [seq for seq in step.waiting[: step.num_begun] if id(seq) not in gone]
    queue = [*map(_without_blocks, victims), *step.waiting[step.num_begun :]]
    queue.sort(key=_rank)
    step.waiting = (*begun, *queue)
    step.num_begun = len(begun)


def _without_blocks(seq: Sequence) -> Sequence:
    draft = seq.thaw()
    draft.release()
    draft.status = SequenceStatus.WAITING
    return draft.freeze()


def _rank(seq: Sequence) -> tuple[int, float, int]:
    return seq.info.rank
