"""The transitions that no step makes: admit, abort, expire, reset the prefix cache. Pure."""

import math
from bisect import bisect

import attrs

from nanovllm.core.sequence import Sequence
from nanovllm.core.state import EngineState, SchedulerLimits, count_begun
from nanovllm.errors import RequestError


def check_prompt_length(num_prompt_tokens: int, max_model_len: int) -> None:
    """Refuse a prompt that leaves no room for a token.

    Raises:
        RequestError: With both numbers.
    """
    if num_prompt_tokens >= max_model_len:
        raise RequestError(
            f"The prompt has {num_prompt_tokens} tokens but `max_model_len` is {max_model_len}, "
            f"prompt and completion together; shorten the prompt to at most {max_model_len - 1} "
            "tokens or raise `max_model_len`."
        )


def admit(state: EngineState, seq: Sequence, limits: SchedulerLimits) -> EngineState:
    """Add a sequence to the queue: behind all that are as urgent, before all that are less.

    Raises:
        RequestError: The id is taken, or the sequence could never run under these limits.
    """
    num_prompt_tokens = seq.num_prompt_tokens
    check_prompt_length(num_prompt_tokens, limits.max_model_len)
    params = seq.sampling_params
    max_num_tokens = min(num_prompt_tokens + params.max_tokens, limits.max_model_len)
    pool = state.pool
    # -1: nothing is ever computed from the last token, so its K/V are not needed.
    num_blocks = -(-(max_num_tokens - 1) // pool.block_size)
    if num_blocks > pool.num_blocks:
        raise RequestError(
            f"The request needs {num_blocks} blocks of {pool.block_size} tokens for "
            f"{num_prompt_tokens} prompt and {max_num_tokens - num_prompt_tokens} new tokens, but "
            f"the K/V cache has {pool.num_blocks}; lower `max_tokens` or shorten the prompt, or "
            "give the engine more blocks."
        )
    seq_id = seq.info.seq_id
    highest = state.highest_seq_id
    # Ids mostly rise, so that the queue rarely has to be searched.
    if highest is not None and seq_id <= highest and state.find(seq_id) is not None:
        raise RequestError(
            f"Sequence id {seq_id} belongs to a live request; use another or wait for its end."
        )
    draft = seq.thaw()
    draft.info = attrs.evolve(
        seq.info,
        arrival=state.next_arrival,
        max_num_tokens=max_num_tokens,
        stop_token_ids=frozenset(params.stop_token_ids)
        | (frozenset() if params.ignore_eos else limits.eos_token_ids),
        block_size=pool.block_size,
    )
    admitted = draft.freeze()
    deadline_s = math.inf if seq.info.deadline_s is None else seq.info.deadline_s
    return attrs.evolve(
        state,
        waiting=_insert(state.waiting, admitted),
        next_arrival=state.next_arrival + 1,
        highest_seq_id=seq_id if highest is None else max(highest, seq_id),
        next_deadline_s=min(state.next_deadline_s, deadline_s),
    )


def _insert(waiting: tuple[Sequence, ...], seq: Sequence) -> tuple[Sequence, ...]:
    rank = seq.info.rank
    if not waiting or waiting[-1].info.rank < rank:
        return (*waiting, seq)
    place = bisect(waiting, rank, lo=count_begun(waiting), key=lambda other: other.info.rank)
    return (*waiting[:place], seq, *waiting[place:])


def abort(state: EngineState, seq_id: int) -> EngineState:
    """Remove a sequence and free its blocks, at rest or between `schedule` and `postprocess`.

    An id that is not live leaves the state as it is, so aborting twice is no error.
    """
    seq = state.find(seq_id)
    return state if seq is None else _remove(state, [seq])


def expire(state: EngineState, now_s: float) -> tuple[EngineState, tuple[int, ...]]:
    """Remove every sequence whose deadline has come, and free its blocks.

    Looks at the sequences only when a deadline may have come, so it may be called at every step.

    Args:
        state: At rest, or between `schedule` and `postprocess`.
        now_s: The time, on the clock of the deadlines.

    Returns:
        The state without them, and their ids.
    """
    if now_s < state.next_deadline_s:
        return state, ()
    expired, next_deadline_s = [], math.inf
    for seq in (*state.running, *state.waiting):
        deadline_s = seq.info.deadline_s
        if deadline_s is None:
            continue
        if deadline_s <= now_s:
            expired.append(seq)
        else:
            next_deadline_s = min(next_deadline_s, deadline_s)
    state = attrs.evolve(_remove(state, expired), next_deadline_s=next_deadline_s)
    return state, tuple(seq.info.seq_id for seq in expired)


def _remove(state: EngineState, seqs: list[Sequence]) -> EngineState:
    """The state without some of its snapshots. A queue that loses none stays the same object."""
    pool = state.pool
    if any(seq.packed_block_table for seq in seqs):
        editor = pool.thaw()
        for seq in seqs:
            editor.release(seq.block_table)
        pool = editor.freeze()
    gone = set(map(id, seqs))
    running = tuple(seq for seq in state.running if id(seq) not in gone)
    waiting = tuple(seq for seq in state.waiting if id(seq) not in gone)
    return attrs.evolve(
        state,
        running=state.running if len(running) == len(state.running) else running,
        waiting=state.waiting if len(waiting) == len(state.waiting) else waiting,
        pool=pool,
    )


def reset_prefix_cache(state: EngineState) -> EngineState:
    """Forget every cached prefix; sequences in flight keep their blocks and go on."""
    return attrs.evolve(state, pool=state.pool.forget_prefixes())
