"""`check`: the laws of a state, as a list that can be read. For tests and debugging; O(state)."""

from collections import Counter
from collections.abc import Callable, Iterator

from nanovllm.core.sequence import ROOT_PREFIX, Sequence, SequenceStatus
from nanovllm.core.state import EngineState, SchedulerLimits, count_begun


class BrokenLawError(AssertionError):
    """A state that no sequence of transitions can produce: a bug of the engine, not of its user."""


def check(
    state: EngineState, limits: SchedulerLimits | None = None, *, at_rest: bool = False
) -> None:
    """Check every law of a state.

    Args:
        state: A state at rest or in flight (between `schedule` and `postprocess`).
        limits: Check what depends on them too.
        at_rest: The state is known to be at rest: nothing may be scheduled.

    Raises:
        BrokenLawError: Naming the law and what breaks it.
    """
    for law, violations in _LAWS.items():
        for violation in violations(state):
            raise BrokenLawError(f"{law}: {violation}")
    if limits is not None:
        num_holders = sum(bool(seq.packed_block_table) for seq in _live(state))
        if num_holders > limits.max_num_seqs:
            raise BrokenLawError(
                f"`max_num_seqs` bounds the sequences that hold blocks: "
                f"{num_holders} of {limits.max_num_seqs}"
            )
    if at_rest:
        for seq in _live(state):
            if seq.num_scheduled_tokens:
                raise BrokenLawError(f"nothing is scheduled at rest: {seq!r}")


def _live(state: EngineState) -> Iterator[Sequence]:
    yield from state.running
    yield from state.waiting


def _ids_are_unique(state: EngineState) -> Iterator[str]:
    for what in ("seq_id", "arrival"):
        counts = Counter(getattr(seq.info, what) for seq in _live(state))
        for value, count in counts.items():
            if count > 1:
                yield f"{count} sequences have {what} {value}"


def _cached_within_tokens(state: EngineState) -> Iterator[str]:
    for seq in _live(state):
        counts = (seq.num_cached_tokens, seq.num_scheduled_tokens)
        if min(counts) < 0 or sum(counts) > seq.num_tokens:
            yield repr(seq)


def _status_follows_from_counts(state: EngineState) -> Iterator[str]:
    for seq in state.waiting:
        num_covered = seq.num_cached_tokens + seq.num_scheduled_tokens
        if seq.status is not SequenceStatus.WAITING or num_covered >= seq.num_tokens:
            yield f"waits: {seq!r}"
    for seq in state.running:
        num_covered = seq.num_cached_tokens + (seq.num_scheduled_tokens or 1)
        if seq.status is not SequenceStatus.RUNNING or num_covered != seq.num_tokens:
            yield f"runs: {seq!r}"


def _tables_cover_what_is_cached(state: EngineState) -> Iterator[str]:
    block_size = state.pool.block_size
    for seq in _live(state):
        num_covered = seq.num_cached_tokens + seq.num_scheduled_tokens
        if seq.num_held_blocks * block_size < num_covered:
            yield f"too short: {seq!r}"
        if seq.num_held_blocks > seq.num_blocks:
            yield f"too long: {seq!r}"
        if not seq.packed_block_table and (seq.num_cached_tokens or seq.prefix != ROOT_PREFIX):
            yield f"cached without blocks: {seq!r}"


def _queue_is_in_order(state: EngineState) -> Iterator[str]:
    num_begun = count_begun(state.waiting)
    for part in (state.waiting[:num_begun], state.waiting[num_begun:]):
        ranks = [seq.info.rank for seq in part]
        if ranks != sorted(ranks):
            yield f"ranks are {ranks}"
    for seq in state.waiting[num_begun:]:
        if seq.packed_block_table:
            yield f"what holds blocks stands in front: {seq!r}"


def _no_deadline_is_overlooked(state: EngineState) -> Iterator[str]:
    for seq in _live(state):
        if seq.info.deadline_s is not None and seq.info.deadline_s < state.next_deadline_s:
            yield f"{seq.info.deadline_s} before {state.next_deadline_s}: {seq!r}"


def _every_sequence_can_fit(state: EngineState) -> Iterator[str]:
    for seq in _live(state):
        num_blocks = -(-(seq.info.max_num_tokens - 1) // state.pool.block_size)
        # One whose last token is on its way has as many as it may have; see `core.lookahead`.
        is_ending = seq.num_cached_tokens == seq.info.max_num_tokens - 1
        if (
            num_blocks > state.pool.num_blocks
            or seq.num_tokens >= seq.info.max_num_tokens + is_ending
        ):
            yield repr(seq)


def _references_equal_table_entries(state: EngineState) -> Iterator[str]:
    entries = Counter(block_id for seq in _live(state) for block_id in seq.block_table)
    for block_id, ref_count in enumerate(state.pool.ref_counts):
        if ref_count != entries[block_id]:
            yield f"block {block_id}: {ref_count} references, {entries[block_id]} entries"
    for seq in _live(state):
        if len(set(seq.block_table)) != seq.num_held_blocks:
            yield f"the same block twice in one table: {seq!r}"


def _free_list_holds_what_nobody_uses(state: EngineState) -> Iterator[str]:
    pool = state.pool
    end = pool.num_blocks
    seen: list[int] = []
    before, block_id = end, pool.next_free[end]
    while block_id != end and len(seen) <= pool.num_blocks:
        if pool.previous_free[block_id] != before:
            yield f"block {block_id} follows {before} but names {pool.previous_free[block_id]}"
        seen.append(block_id)
        before, block_id = block_id, pool.next_free[block_id]
    if pool.previous_free[end] != before:
        yield f"the list ends in {before} but its tail is {pool.previous_free[end]}"
    unused = [block for block, count in enumerate(pool.ref_counts) if count == 0]
    if sorted(seen) != unused:
        yield f"free list {sorted(seen)}, unused {unused}"
    if len(seen) != pool.num_free:
        yield f"`num_free` is {pool.num_free}, the list has {len(seen)}"


def _prefix_map_is_consistent(state: EngineState) -> Iterator[str]:
    pool = state.pool
    num_entries = 0
    for index, shard in enumerate(pool.shards):
        for key, entry in shard.items():
            num_entries += 1
            if pool.keys[entry.block_id] != key or key & (len(pool.shards) - 1) != index:
                yield f"key {key} of {entry} is not its block's or not of shard {index}"
            if len(entry.tokens) != 4 * pool.block_size:
                yield f"{entry} is not a full block"
            if not 0 <= entry.parent_id < entry.prefix_id < pool.next_prefix_id:
                yield f"{entry} does not come after its parent"
    if num_entries != sum(key != 0 for key in pool.keys):
        yield f"{num_entries} entries, {sum(key != 0 for key in pool.keys)} keyed blocks"


def _cached_blocks_hold_their_tokens(state: EngineState) -> Iterator[str]:
    pool = state.pool
    for seq in _live(state):
        for index, block_id in enumerate(seq.block_table):
            key = pool.keys[block_id]
            if key == 0:
                continue
            start = index * pool.block_size
            tokens = seq.token_log[start : start + pool.block_size].tobytes()
            if start + pool.block_size > seq.num_cached_tokens:
                yield f"block {block_id} is registered before its K/V exist: {seq!r}"
            elif pool.shards[key & (len(pool.shards) - 1)][key].tokens != tokens:
                yield f"block {block_id} is registered with other tokens: {seq!r}"


_LAWS: dict[str, Callable[[EngineState], Iterator[str]]] = {
    "ids are unique": _ids_are_unique,
    "cached and scheduled tokens are tokens": _cached_within_tokens,
    "status follows from the counts": _status_follows_from_counts,
    "a table covers what is cached and scheduled": _tables_cover_what_is_cached,
    "the queue is in order": _queue_is_in_order,
    "no deadline is overlooked": _no_deadline_is_overlooked,
    "every sequence can fit": _every_sequence_can_fit,
    "references equal table entries": _references_equal_table_entries,
    "the free list holds what nobody uses": _free_list_holds_what_nobody_uses,
    "the prefix map and the blocks' keys agree": _prefix_map_is_consistent,
    "cached blocks hold their tokens": _cached_blocks_hold_their_tokens,
}
