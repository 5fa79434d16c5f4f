"""`EngineState` and the transitions that no step makes: admit, abort, reset the prefix cache.

`EngineState` is everything that the scheduler knows. `StepPlan` is what one step is to do: the
only thing that passes from `schedule` to `build_batch` and `postprocess`.
"""

import attrs

from nanovllm.core.blocks import BlockPool
from nanovllm.core.sequence import Sequence, SequenceStatus
from nanovllm.errors import ConfigError, RequestError


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"`{name}` is {value!r} but must be an integer >= 1.")


@attrs.frozen
class SchedulerLimits:
    """What a step may do at most.

    Attributes:
        max_num_seqs: Sequences that may hold blocks at a time.
        max_num_batched_tokens: Positions that one step may compute.
        max_model_len: Prompt and completion tokens of one sequence.
        max_prefill_chunk: Prefill positions in a step that also decodes, which bounds how long a
            prompt can delay the tokens of others. None: as many as the step has room for.
        eos_token_ids: The model's own end-of-text ids.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_prefill_chunk: int | None = None
    eos_token_ids: frozenset[int] = frozenset()

    def __attrs_post_init__(self) -> None:
        _check_positive("max_num_seqs", self.max_num_seqs)
        _check_positive("max_num_batched_tokens", self.max_num_batched_tokens)
        _check_positive("max_model_len", self.max_model_len)
        if self.max_prefill_chunk is not None:
            _check_positive("max_prefill_chunk", self.max_prefill_chunk)

    @property
    def num_seats(self) -> int:
        """Sequences that may hold blocks: no more than a step can serve with one token each."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


@attrs.frozen
class StalledHead:
    """The sequence at the head of the queue that could not start, and the free blocks it needs.

    Remembered so that a long prompt is not looked up in the prefix map again at every step.
    """

    seq_id: int
    num_blocks: int


@attrs.frozen
class EngineState:
    """Everything the scheduler knows. Immutable and safe to keep.

    Attributes:
        waiting: Sequences to prefill, oldest first; some may hold blocks and be partly cached.
        running: Sequences that decode, in the order in which their prefill ended.
        pool: The blocks.
        next_arrival: Rank that the next admitted sequence gets.
        highest_seq_id: The highest id admitted so far, None at first.
        stalled_head: See `StalledHead`.
    """

    waiting: tuple[Sequence, ...]
    running: tuple[Sequence, ...]
    pool: BlockPool
    next_arrival: int = 0
    highest_seq_id: int | None = None
    stalled_head: StalledHead | None = None

    @classmethod
    def create(
        cls, num_blocks: int, block_size: int, enable_prefix_caching: bool = True
    ) -> "EngineState":
        """A state at rest with no sequence and an empty cache."""
        _check_positive("num_blocks", num_blocks)
        _check_positive("block_size", block_size)
        pool = BlockPool.create(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
        return cls(waiting=(), running=(), pool=pool)

    @property
    def num_unfinished(self) -> int:
        """Sequences that wait or run."""
        return len(self.waiting) + len(self.running)

    def find(self, seq_id: int) -> Sequence | None:
        """The live sequence of that id."""
        for seq in (*self.running, *self.waiting):
            if seq.info.seq_id == seq_id:
                return seq
        return None


@attrs.frozen
class StepPlan:
    """What one step is to do.

    Attributes:
        scheduled: Snapshots with `num_scheduled_tokens` set: first the decodes, then the prefills.
        num_decode_tokens: Positions of sequences that were running before: one each, and first.
        num_prefill_tokens: Positions of the others.
        preempted: Ids of the sequences that lost their blocks, youngest first.
        prefix_hits: (sequence id, tokens found cached) of each sequence that starts in this step.
        block_size: Tokens a block.
        running: The `running` of the state that `schedule` returned with this plan.
        waiting: Its `waiting`.
    """

    scheduled: tuple[Sequence, ...]
    num_decode_tokens: int
    num_prefill_tokens: int
    preempted: tuple[int, ...]
    prefix_hits: tuple[tuple[int, int], ...]
    block_size: int
    running: tuple[Sequence, ...]
    waiting: tuple[Sequence, ...]

    @property
    def num_tokens(self) -> int:
        """Positions that the step computes."""
        return self.num_decode_tokens + self.num_prefill_tokens


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
    """Add a sequence at the end of the queue.

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
    return attrs.evolve(
        state,
        waiting=(*state.waiting, draft.freeze()),
        next_arrival=state.next_arrival + 1,
        highest_seq_id=seq_id if highest is None else max(highest, seq_id),
    )


def abort(state: EngineState, seq_id: int) -> EngineState:
    """Remove a sequence and free its blocks, at rest or between `schedule` and `postprocess`.

    An id that is not live leaves the state as it is, so aborting twice is no error.
    """
    seq = state.find(seq_id)
    if seq is None:
        return state
    pool = state.pool
    if seq.packed_block_table:
        editor = pool.thaw()
        editor.release(seq.block_table)
        pool = editor.freeze()
    if seq.status is SequenceStatus.RUNNING:
        running = tuple(other for other in state.running if other is not seq)
        return attrs.evolve(state, running=running, pool=pool)
    waiting = tuple(other for other in state.waiting if other is not seq)
    return attrs.evolve(state, waiting=waiting, pool=pool)


def reset_prefix_cache(state: EngineState) -> EngineState:
    """Forget every cached prefix; sequences in flight keep their blocks and go on."""
    return attrs.evolve(state, pool=state.pool.forget_prefixes())
