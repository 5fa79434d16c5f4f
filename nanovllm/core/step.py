"""`StepDraft`: one step while it is being decided, and what its rules ask of a sequence."""

from nanovllm.core.blocks import PoolEditor
from nanovllm.core.sequence import BLOCK_ID_BYTES, Sequence, SequenceDraft
from nanovllm.core.state import EngineState, count_begun


class StepDraft:
    """The parts of a state, thawed for one step.

    Attributes:
        pool: The blocks as the step found them.
        running: Sequences that decode.
        waiting: The queue.
        num_begun: How many of the queue hold blocks; the first ones.
        stalled_head: As in `EngineState`.
        scheduled: What the step computes.
        preempted: Ids of what lost its blocks.
        prefix_hits: (sequence id, tokens found cached) of what starts.
        may_start: Whether a sequence without blocks may get some in this step.
    """

    __slots__ = (
        "_editor",
        "may_start",
        "num_begun",
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
        self._editor: PoolEditor | None = None
        self.running: list[Sequence] | tuple[Sequence, ...] = state.running
        self.waiting: tuple[Sequence, ...] = state.waiting
        self.num_begun = count_begun(state.waiting)
        self.stalled_head = state.stalled_head
        self.scheduled: list[Sequence] = []
        self.preempted: list[int] = []
        self.prefix_hits: list[tuple[int, int]] = []
        self.may_start = True

    @property
    def num_free(self) -> int:
        """Free blocks, as edited so far."""
        return self.pool.num_free if self._editor is None else self._editor.num_free

    def edit_pool(self) -> PoolEditor:
        """The pool's editor; the pool is copied only in steps that change it."""
        if self._editor is None:
            self._editor = self.pool.thaw()
        return self._editor

    def adopt(self, editor: PoolEditor) -> None:
        """Go on with an edit that was tried out apart."""
        assert self._editor is None
        self._editor = editor

    def freeze(self, state: EngineState) -> EngineState:
        """The state in flight; `state` is the one that the step started from."""
        return EngineState(
            self.waiting,
            tuple(self.running),
            self.pool if self._editor is None else self._editor.freeze(),
            state.next_arrival,
            state.highest_seq_id,
            self.stalled_head,
            state.next_deadline_s,
        )


def needs_block(seq: Sequence, block_size: int) -> bool:
    """Whether the table is one block short of the newest token, which this step computes."""
    return seq.num_tokens > len(seq.packed_block_table) // BLOCK_ID_BYTES * block_size


def may_grow(seq: Sequence | SequenceDraft, block_size: int, num_new_blocks: int = 0) -> bool:
    """Whether the sequence may come to need more blocks than it holds and those it gets now."""
    held = len(seq.packed_block_table) // BLOCK_ID_BYTES + num_new_blocks
    # -1: the last token that it can get needs no K/V.
    return seq.info.max_num_tokens - 1 > held * block_size
