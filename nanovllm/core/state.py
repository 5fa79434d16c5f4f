"""`EngineState`, everything that the scheduler knows, and `StepPlan`, what one step is to do.

A plan is the only thing that passes from `schedule` to `build_batch` and `postprocess`.
"""

import math

import attrs

from nanovllm.core.blocks import BlockPool
from nanovllm.core.sequence import Sequence
from nanovllm.errors import ConfigError


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

    Remembered so that a long prompt is not looked up in the prefix map again at every step. It
    speaks of this one sequence only: whoever comes to stand before it is looked up anew.
    """

    seq_id: int
    num_blocks: int


@attrs.frozen
class EngineState:
    """Everything the scheduler knows. Immutable and safe to keep.

    Attributes:
        waiting: Sequences to prefill: first those that hold blocks and are partly computed, then
            the others; both by `SequenceInfo.rank`, the most urgent first.
        running: Sequences that decode, in the order in which their prefill ended.
        pool: The blocks.
        next_arrival: Rank by age that the next admitted sequence gets.
        highest_seq_id: The highest id admitted so far, None at first.
        stalled_head: See `StalledHead`.
        next_deadline_s: No deadline of a live sequence is earlier; inf if none has one.
    """

    waiting: tuple[Sequence, ...]
    running: tuple[Sequence, ...]
    pool: BlockPool
    next_arrival: int = 0
    highest_seq_id: int | None = None
    stalled_head: StalledHead | None = None
    next_deadline_s: float = math.inf

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


def count_begun(waiting: tuple[Sequence, ...]) -> int:
    """How many of a queue hold blocks: the first ones, no more than there are seats."""
    count = 0
    while count < len(waiting) and waiting[count].packed_block_table:
        count += 1
    return count


@attrs.frozen
class StepPlan:
    """What one step is to do.

    Attributes:
        scheduled: Snapshots with `num_scheduled_tokens` set: first the decodes, then the prefills.
        num_decode_tokens: Positions of sequences that were running before: one each, and first.
        num_prefill_tokens: Positions of the others.
        preempted: Ids of the sequences that lost their blocks, the least urgent first.
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
