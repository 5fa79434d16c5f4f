"""`Sequence`: an immutable snapshot of one request's tokens, its K/V blocks and where it stands.

A snapshot is cheap to replace, because what never changes sits in one shared `SequenceInfo`, and
the token ids sit in a log that successive snapshots share: a snapshot is that log plus its own
length. The log only ever grows past the lengths that exist, so no snapshot sees another's tokens.
"""

import enum
import math
from array import array
from collections.abc import Collection, Iterable
from typing import Any, Self, cast

import attrs

from nanovllm.errors import RequestError
from nanovllm.sampling_params import SamplingParams

MAX_TOKEN_ID = 2**31 - 1
"""Ids are kept as int32."""

DEFAULT_BLOCK_SIZE = 256
"""Tokens a block where nothing else is said: the page size that every attention kernel takes."""

BLOCK_ID_BYTES = 4
"""A block table is kept packed, one native int32 a block, ready to be copied into a batch."""

ROOT_PREFIX = (0, 0)
"""The prefix before the first block: (key, prefix id). See `nanovllm.core.blocks`."""


class SequenceStatus(enum.Enum):
    """Where a sequence stands. Only preemption leads back, from RUNNING to WAITING."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    """Why a sequence ended. The values are what users see as `finish_reason`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@attrs.frozen(kw_only=True)
class SequenceInfo:
    """What stays the same from admission to the end.

    Attributes:
        seq_id: Chosen by the caller; unique among the live sequences of a state.
        num_prompt_tokens: Length of the prompt.
        sampling_params: As the request gave them.
        arrival: Rank by age, given at admission: the lower, the older.
        max_num_tokens: Prompt and completion together, as `max_tokens` and the model allow.
        stop_token_ids: Every id that ends the sequence, the model's own included.
        block_size: Tokens a block.
        priority: The lower, the more urgent.
        deadline_s: When it must have ended, on the caller's clock; None: whenever.
        group_id: The same for sequences that share their prompt, so that it is computed once.
    """

    seq_id: int
    num_prompt_tokens: int
    sampling_params: SamplingParams
    arrival: int
    max_num_tokens: int
    stop_token_ids: frozenset[int]
    block_size: int
    priority: int = 0
    deadline_s: float | None = None
    group_id: int | None = None

    @property
    def rank(self) -> tuple[int, float, int]:
        """The place in the total order in which sequences are served: the least goes first.

        By priority, then by deadline (none is the latest), then by age.
        """
        deadline_s = math.inf if self.deadline_s is None else self.deadline_s
        return self.priority, deadline_s, self.arrival


class SequenceDraft:
    """A `Sequence` that is still being edited: the only way to make or change one.

    It has the very layout of `Sequence`, so `freeze` can turn it into one in place. That costs
    about 0.25 us where attrs' own frozen `__init__` takes 0.6 and `attrs.evolve` 1.8, and a step
    makes two snapshots per sequence.
    """

    __slots__ = (
        "info",
        "num_cached_tokens",
        "num_scheduled_tokens",
        "num_tokens",
        "packed_block_table",
        "prefix",
        "status",
        "token_log",
    )

    def __init__(
        self,
        info: SequenceInfo,
        token_log: "array[int]",
        num_tokens: int,
        num_cached_tokens: int,
        num_scheduled_tokens: int,
        packed_block_table: bytes,
        status: SequenceStatus,
        prefix: tuple[int, int],
    ) -> None:
        """Start from the given fields; `Sequence` documents them."""
        self.info = info
        self.token_log = token_log
        self.num_tokens = num_tokens
        self.num_cached_tokens = num_cached_tokens
        self.num_scheduled_tokens = num_scheduled_tokens
        self.packed_block_table = packed_block_table
        self.status = status
        self.prefix = prefix

    def append_token(self, token_id: int) -> None:
        """Add one token. A log that already goes on differently after this snapshot is copied."""
        if len(self.token_log) != self.num_tokens:
            self.token_log = self.token_log[: self.num_tokens]
        self.token_log.append(token_id)
        self.num_tokens += 1

    def release(self) -> None:
        """Forget the K/V: the table and what was cached. The tokens stay."""
        self.packed_block_table = b""
        self.num_cached_tokens = 0
        self.num_scheduled_tokens = 0
        self.prefix = ROOT_PREFIX

    def freeze(self) -> "Sequence":
        """Turn this very object into an immutable `Sequence`; it can't be edited any more."""
        self.__class__ = Sequence  # type: ignore[assignment]  # same slots; a test holds them equal
        return self  # type: ignore[return-value]  # for the same reason


@attrs.frozen(eq=False, repr=False, init=False, weakref_slot=False, getstate_setstate=False)
class Sequence:
    """One request at one moment. Immutable: every change is a new snapshot.

    Attributes:
        info: What never changes.
        token_log: int32, prompt then completion; holds at least `num_tokens` ids, and may hold
            more that belong to later snapshots. Read `token_ids` instead.
        num_tokens: Prompt and generated tokens.
        num_cached_tokens: Positions `[0, n)` whose K/V are in the paged cache.
        num_scheduled_tokens: Positions that this step computes; zero on a state at rest.
        packed_block_table: The block table as native int32 bytes. Read `block_table` instead.
        status: WAITING, RUNNING or FINISHED.
        prefix: (key, prefix id) of the last full cached block, from which the next one is keyed.
    """

    info: SequenceInfo
    token_log: "array[int]"
    num_tokens: int
    num_cached_tokens: int
    num_scheduled_tokens: int
    packed_block_table: bytes
    status: SequenceStatus
    prefix: tuple[int, int]

    @classmethod
    def create(
        cls,
        seq_id: int,
        token_ids: Iterable[int],
        sampling_params: SamplingParams | None = None,
        *,
        block_size: int = DEFAULT_BLOCK_SIZE,
        priority: int = 0,
        deadline_s: float | None = None,
        group_id: int | None = None,
    ) -> Self:
        """Make a waiting sequence of a prompt.

        Admission replaces `block_size` by the pool's own, and completes what ends the sequence.
        `SequenceInfo` documents the arguments.

        Raises:
            RequestError: The prompt is empty or holds something that is no token id.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        log = _to_log(token_ids)
        info = SequenceInfo(
            seq_id=seq_id,
            num_prompt_tokens=len(log),
            sampling_params=params,
            arrival=0,
            max_num_tokens=len(log) + params.max_tokens,
            stop_token_ids=frozenset(params.stop_token_ids),
            block_size=block_size,
            priority=priority,
            deadline_s=deadline_s,
            group_id=group_id,
        )
        draft = SequenceDraft(info, log, len(log), 0, 0, b"", SequenceStatus.WAITING, ROOT_PREFIX)
        return draft.freeze()  # type: ignore[return-value]  # `Sequence` has no subclasses

    def thaw(self) -> SequenceDraft:
        """Copy this snapshot into a draft that can be edited and frozen again."""
        return SequenceDraft(
            self.info,
            self.token_log,
            self.num_tokens,
            self.num_cached_tokens,
            self.num_scheduled_tokens,
            self.packed_block_table,
            self.status,
            self.prefix,
        )

    # What the request is.

    @property
    def seq_id(self) -> int:
        """The caller's id."""
        return self.info.seq_id

    @property
    def sampling_params(self) -> SamplingParams:
        """As the request gave them."""
        return self.info.sampling_params

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return self.info.num_prompt_tokens

    @property
    def temperature(self) -> float:
        """0 means greedy."""
        return self.info.sampling_params.temperature

    @property
    def max_tokens(self) -> int:
        """Most tokens to generate, as the request gave it."""
        return self.info.sampling_params.max_tokens

    @property
    def ignore_eos(self) -> bool:
        """Whether the model's end-of-text ids are ordinary tokens."""
        return self.info.sampling_params.ignore_eos

    # Its tokens. These copy O(tokens), so no step uses them.

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and completion."""
        return tuple(self.token_log[: self.num_tokens])

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt."""
        return tuple(self.token_log[: self.info.num_prompt_tokens])

    @property
    def completion_token_ids(self) -> tuple[int, ...]:
        """What was generated."""
        return tuple(self.token_log[self.info.num_prompt_tokens : self.num_tokens])

    @property
    def last_token(self) -> int:
        """The newest token."""
        return self.token_log[self.num_tokens - 1]  # -1: the last index; the log may be longer

    @property
    def num_completion_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.info.num_prompt_tokens

    def __len__(self) -> int:
        return self.num_tokens

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return self.token_ids[index]

    # Its blocks.

    @property
    def block_table(self) -> tuple[int, ...]:
        """Physical block of each logical block."""
        return tuple(memoryview(self.packed_block_table).cast("i"))

    @property
    def num_held_blocks(self) -> int:
        """Length of the block table."""
        return len(self.packed_block_table) // BLOCK_ID_BYTES

    @property
    def num_blocks(self) -> int:
        """Blocks that all its tokens need."""
        return -(-self.num_tokens // self.info.block_size)

    @property
    def last_block_num_tokens(self) -> int:
        """Tokens in the last of those blocks: 1 to `block_size`, never 0."""
        return self.num_tokens - (self.num_blocks - 1) * self.info.block_size

    def block(self, index: int) -> tuple[int, ...]:
        """Tokens of one logical block."""
        if not 0 <= index < self.num_blocks:
            raise IndexError(f"block {index} of {self.num_blocks}")
        start = index * self.info.block_size
        return tuple(self.token_log[start : min(start + self.info.block_size, self.num_tokens)])

    # Where it stands.

    @property
    def is_finished(self) -> bool:
        """Whether it ended."""
        return self.status is SequenceStatus.FINISHED

    @property
    def is_prefill(self) -> bool:
        """Whether more than its newest token, or a prompt nothing was drawn from, is uncached."""
        if self.status is SequenceStatus.RUNNING:
            return self.num_tokens - self.num_cached_tokens > 1 or not self.num_completion_tokens
        return self.status is SequenceStatus.WAITING

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether its prompt is to be computed from its start on, whatever of it is cached.

        Not again after a preemption that came after its first token: all is known by then.
        """
        asked = self.info.sampling_params.prompt_logprobs is not None
        return asked and self.num_tokens == self.info.num_prompt_tokens

    @property
    def num_scored_tokens(self) -> int:
        """Positions of this step whose logits say how likely the prompt's next token was.

        The first of them is the first one scheduled. The prompt's last position is none of them:
        its next token is the first of the completion.
        """
        if not self.needs_prompt_logits:
            return 0
        end = self.num_cached_tokens + self.num_scheduled_tokens
        # -1: the position before the last one.
        return min(end, self.info.num_prompt_tokens - 1) - self.num_cached_tokens

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return self._value() == other._value()

    def __hash__(self) -> int:
        return hash((self.info.seq_id, self.num_tokens, self.num_cached_tokens))

    def __repr__(self) -> str:
        return (
            f"Sequence(seq_id={self.info.seq_id}, status={self.status.name}, "
            f"num_tokens={self.num_tokens}, num_cached_tokens={self.num_cached_tokens}, "
            f"num_scheduled_tokens={self.num_scheduled_tokens}, block_table={self.block_table})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, self._value()

    def _value(self) -> tuple[Any, ...]:
        """Every field, with the log cut to this snapshot's own tokens."""
        return (
            self.info,
            self.token_log[: self.num_tokens],
            self.num_tokens,
            self.num_cached_tokens,
            self.num_scheduled_tokens,
            self.packed_block_table,
            self.status,
            self.prefix,
        )


def pack_block_ids(block_ids: Iterable[int]) -> bytes:
    """Block ids as they are kept in a packed block table."""
    return array("i", block_ids).tobytes()


def _restore(*fields: Any) -> Sequence:
    return SequenceDraft(*fields).freeze()


def check_token_ids(token_ids: Collection[object], highest: int) -> None:
    """Refuse a prompt that is empty or holds something other than ids from 0 to the highest.

    Raises:
        RequestError: Saying what, and what is allowed.
    """
    if not token_ids:
        raise RequestError("The prompt is empty; give at least one token.")
    # Comparing the set of types takes a fraction of the time of looking at each id in turn.
    if set(map(type, token_ids)) != {int}:
        wrong = next(item for item in token_ids if type(item) is not int)
        raise RequestError(
            f"The prompt holds {wrong!r} of type {type(wrong).__name__}; "
            "token ids must be plain integers."
        )
    ids = cast("Collection[int]", token_ids)
    if min(ids) < 0 or max(ids) > highest:
        wrong = next(item for item in ids if not 0 <= item <= highest)
        raise RequestError(f"The prompt holds token id {wrong}; ids are 0 to {highest}.")


def _to_log(token_ids: Iterable[int]) -> "array[int]":
    """Copy a prompt into a new log, refusing what is no token id."""
    ids = list(token_ids)
    check_token_ids(ids, MAX_TOKEN_ID)
    return array("i", ids)
