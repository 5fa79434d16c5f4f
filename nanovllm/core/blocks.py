"""`BlockPool`: who holds which block of K/V memory, which are free, and which prefixes they hold.

A pool is a value. To change one, `thaw` it into a `PoolEditor`, edit, and `freeze` the result; a
step does that at most twice, and only when it needs it. Thawing copies four flat integer arrays
and the top of a sharded map, a few microseconds, so no step costs more because more was cached.

Free blocks form a list in order of their last use, linked through two arrays, so that a prefix
hit can take one out of the middle. A freed block keeps its K/V and stays in the prefix map until
the list hands it out again.

Prefixes: a full block is keyed by xxh64 over its token ids, seeded with the key of the block
before it. A key is only a hint. A hit must also find the same tokens and the same parent, named
by a number that is never used twice, so that two prompts whose keys collide cost a miss and never
share K/V.
"""

from array import array
from collections.abc import Sequence as ReadOnlySequence
from typing import NamedTuple

import attrs
from xxhash import xxh64_intdigest

from nanovllm.core.sequence import ROOT_PREFIX

NO_PREFIX_ID = -1
"""Prefix id of a block that could not be registered: nothing after it can be found either."""

NO_KEY = 0
"""Key of a block that is not registered. A digest of 0 is treated as a collision: a miss."""

BLOCKS_PER_SHARD = 64
"""Entries of one shard of the prefix map, on average: changing one entry copies that many."""


class CachedBlock(NamedTuple):
    """One entry of the prefix map.

    Attributes:
        block_id: The block that holds the K/V.
        prefix_id: Names this block's tokens and all before them; never used twice in a pool.
        parent_id: The prefix id of the block before, 0 at the start of a prompt.
        tokens: The block's own token ids, native int32.
    """

    block_id: int
    prefix_id: int
    parent_id: int
    tokens: bytes


PrefixShards = tuple[dict[int, CachedBlock], ...]


@attrs.frozen(eq=True, repr=False)
class BlockPool:
    """All blocks at one moment. Immutable.

    Attributes:
        num_blocks: Blocks in the pool, `N`.
        block_size: Tokens a block.
        enable_prefix_caching: Whether full blocks are registered and found again.
        num_free: Blocks that no sequence holds, whether or not they hold a cached prefix.
        ref_counts: `[N]` int32, block-table entries that name each block.
        next_free: `[N + 1]` int32, successor in the free list; entry `N` is the list's head.
        previous_free: `[N + 1]` int32, predecessor; entry `N` is the tail. Undefined when in use.
        keys: `[N]` uint64, key under which each block is registered, or `NO_KEY`.
        shards: The prefix map, key to entry, in shards of plain dicts that are never edited.
        next_prefix_id: The next number to name a prefix with.
    """

    num_blocks: int
    block_size: int
    enable_prefix_caching: bool
    num_free: int
    ref_counts: "array[int]"
    next_free: "array[int]"
    previous_free: "array[int]"
    keys: "array[int]"
    shards: PrefixShards
    next_prefix_id: int

    @classmethod
    def create(
        cls, num_blocks: int, block_size: int, *, enable_prefix_caching: bool
    ) -> "BlockPool":
        """A pool in which every block is free and nothing is cached."""
        ring = [*range(num_blocks + 1)]  # +1: the list's own entry, which closes the ring
        num_shards = 1 << (num_blocks // BLOCKS_PER_SHARD).bit_length()
        return cls(
            num_blocks=num_blocks,
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            num_free=num_blocks,
            ref_counts=array("i", bytes(4 * num_blocks)),
            next_free=array("i", ring[1:] + ring[:1]),
            previous_free=array("i", ring[-1:] + ring[:-1]),
            keys=array("Q", bytes(8 * num_blocks)),
            shards=tuple({} for _ in range(num_shards)),
            next_prefix_id=1,  # 0 names the empty prefix
        )

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold."""
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks in the prefix map."""
        return sum(map(len, self.shards))

    @property
    def free_block_ids(self) -> tuple[int, ...]:
        """The free list, least recently used first. Copies it."""
        block_ids = []
        block_id = self.next_free[self.num_blocks]
        while block_id != self.num_blocks:
            block_ids.append(block_id)
            block_id = self.next_free[block_id]
        return tuple(block_ids)

    def find_prefix(
        self, token_log: "array[int]", num_tokens: int
    ) -> tuple[list[int], tuple[int, int]]:
        """Find the longest run of cached blocks with which these tokens start.

        At least one token is left to compute, since the next one is drawn from its logits.

        Returns:
            The block ids, and the prefix (key, prefix id) that they end in.
        """
        return _find_prefix(self.shards, self.block_size, token_log, num_tokens)

    def thaw(self) -> "PoolEditor":
        """Copy the pool into an editor."""
        return PoolEditor(self)

    def forget_prefixes(self) -> "BlockPool":
        """The same pool with an empty prefix map. Prefix ids go on, so nothing old is found."""
        return attrs.evolve(
            self,
            keys=array("Q", bytes(8 * self.num_blocks)),
            shards=tuple({} for _ in self.shards),
        )

    def __repr__(self) -> str:
        return (
            f"BlockPool(num_blocks={self.num_blocks}, block_size={self.block_size}, "
            f"num_free={self.num_free}, num_cached={self.num_cached})"
        )


class PoolEditor:
    """A pool that is being edited inside one step; `freeze` ends the edit."""

    __slots__ = (
        "_block_size",
        "_keys",
        "_next",
        "_next_prefix_id",
        "_num_blocks",
        "_owned",
        "_pool",
        "_previous",
        "_ref_counts",
        "_shards",
        "num_free",
    )

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._num_blocks = pool.num_blocks
        self._block_size = pool.block_size
        self.num_free = pool.num_free
        self._ref_counts = pool.ref_counts[:]
        self._next = pool.next_free[:]
        self._previous = pool.previous_free[:]
        self._keys = pool.keys[:]
        self._shards = list(pool.shards)
        self._owned: set[int] = set()
        self._next_prefix_id = pool.next_prefix_id

    def take(self, count: int) -> list[int]:
        """Take the least recently used free blocks; what they had cached is forgotten."""
        assert count <= self.num_free, (count, self.num_free)
        keys, ref_counts, following = self._keys, self._ref_counts, self._next
        block_ids = []
        block_id = following[self._num_blocks]
        for _ in range(count):
            block_ids.append(block_id)
            ref_counts[block_id] = 1
            if keys[block_id] != NO_KEY:
                self._forget(block_id)
            block_id = following[block_id]
        # Close the ring over the whole run at once.
        following[self._num_blocks] = block_id
        self._previous[block_id] = self._num_blocks
        self.num_free -= count
        return block_ids

    def share(self, block_ids: ReadOnlySequence[int]) -> None:
        """Add a reference to each block, taking the free ones out of the free list."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                before, after = self._previous[block_id], self._next[block_id]
                self._next[before] = after
                self._previous[after] = before
                self.num_free -= 1
            self._ref_counts[block_id] += 1

    def release(self, block_ids: ReadOnlySequence[int]) -> None:
        """Drop a reference to each block of a table; those that nobody holds become free.

        The tail of the table goes first into the free list and so is taken first: the head of a
        prompt is what other prompts are likely to share.
        """
        end = self._num_blocks
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                last = self._previous[end]
                self._next[last] = block_id
                self._previous[block_id] = last
                self._next[block_id] = end
                self._previous[end] = block_id
                self.num_free += 1

    def count_free(self, block_ids: ReadOnlySequence[int]) -> int:
        """How many of the blocks nobody holds."""
        return sum(self._ref_counts[block_id] == 0 for block_id in block_ids)

    def find_prefix(
        self, token_log: "array[int]", num_tokens: int
    ) -> tuple[list[int], tuple[int, int]]:
        """As `BlockPool.find_prefix`, on the pool as edited so far."""
        return _find_prefix(self._shards, self._block_size, token_log, num_tokens)

    def register(
        self,
        prefix: tuple[int, int],
        block_ids: ReadOnlySequence[int],
        token_log: "array[int]",
        first_token: int,
    ) -> tuple[int, int]:
        """Enter consecutive full blocks, whose K/V exist now, into the prefix map.

        A block whose very prefix is registered already is left out, and the blocks after it are
        found through the registered one. After a collision the rest is left out too.

        Args:
            prefix: (key, prefix id) of the block before the first one.
            block_ids: The blocks to enter.
            token_log: The sequence's tokens.
            first_token: Position of the first block's first token.

        Returns:
            The prefix that the last block ends.
        """
        key, parent_id = prefix
        block_size, keys, shards, owned = self._block_size, self._keys, self._shards, self._owned
        mask, new_tuple = len(shards) - 1, tuple.__new__
        step = 4 * block_size
        next_prefix_id = self._next_prefix_id
        end = first_token + len(block_ids) * block_size
        tokens_of_all = token_log[first_token:end].tobytes()
        for index, block_id in enumerate(block_ids):
            if parent_id == NO_PREFIX_ID:
                break
            tokens = tokens_of_all[index * step : index * step + step]
            key = xxh64_intdigest(tokens, key)
            place = key & mask
            found = shards[place].get(key)
            if found is not None and found.parent_id == parent_id and found.tokens == tokens:
                parent_id = found.prefix_id
            elif key == NO_KEY or (found is not None and found.tokens != tokens):
                parent_id = NO_PREFIX_ID
            else:
                if found is not None:
                    # Its parent was evicted and came back under another number, so that nobody
                    # can find it any more: this block takes its place.
                    keys[found.block_id] = NO_KEY
                if place not in owned:
                    self._own_shard(place)
                shards[place][key] = new_tuple(
                    CachedBlock, (block_id, next_prefix_id, parent_id, tokens)
                )
                keys[block_id] = key
                parent_id = next_prefix_id
                next_prefix_id += 1
        self._next_prefix_id = next_prefix_id
        return key, parent_id

    def freeze(self) -> BlockPool:
        """The edited pool as a value."""
        pool = self._pool
        return BlockPool(
            pool.num_blocks,
            pool.block_size,
            pool.enable_prefix_caching,
            self.num_free,
            self._ref_counts,
            self._next,
            self._previous,
            self._keys,
            tuple(self._shards) if self._owned else pool.shards,
            self._next_prefix_id,
        )

    def _forget(self, block_id: int) -> None:
        """Take a block out of the prefix map."""
        key = self._keys[block_id]
        place = key & (len(self._shards) - 1)
        self._own_shard(place)
        del self._shards[place][key]
        self._keys[block_id] = NO_KEY

    def _own_shard(self, place: int) -> None:
        """Make a shard this edit's own copy, at the first need."""
        if place not in self._owned:
            self._owned.add(place)
            self._shards[place] = self._shards[place].copy()


def _find_prefix(
    shards: ReadOnlySequence[dict[int, CachedBlock]],
    block_size: int,
    token_log: "array[int]",
    num_tokens: int,
) -> tuple[list[int], tuple[int, int]]:
    block_ids: list[int] = []
    key, parent_id = ROOT_PREFIX
    mask = len(shards) - 1
    # -1: the last token is always computed, so a block that ends in it is no use.
    for end in range(block_size, num_tokens, block_size):
        tokens = token_log[end - block_size : end].tobytes()
        next_key = xxh64_intdigest(tokens, key)
        found = shards[next_key & mask].get(next_key)
        if found is None or found.parent_id != parent_id or found.tokens != tokens:
            break
        key, parent_id = next_key, found.prefix_id
        block_ids.append(found.block_id)
    return block_ids, (key, parent_id)
