"""The pool: blocks in order of their last use, prefixes that are what they say, and values."""

from array import array

import pytest

from nanovllm.core import blocks as blocks_module
from nanovllm.core.blocks import NO_PREFIX_ID, BlockPool
from nanovllm.core.sequence import ROOT_PREFIX


def make(num_blocks=6, block_size=2):
    return BlockPool.create(num_blocks, block_size, enable_prefix_caching=True)


def log(*token_ids):
    return array("i", token_ids)


def hold(pool, token_ids):
    """Take blocks for the full blocks of these tokens and register them."""
    editor = pool.thaw()
    block_ids = editor.take(len(token_ids) // pool.block_size)
    prefix = editor.register(ROOT_PREFIX, block_ids, token_ids, 0)
    return editor.freeze(), block_ids, prefix


def release(pool, block_ids):
    editor = pool.thaw()
    editor.release(block_ids)
    return editor.freeze()


def test_a_new_pool_is_all_free_in_order():
    pool = make(4)

    assert pool.free_block_ids == (0, 1, 2, 3)
    assert (pool.num_free, pool.num_used, pool.num_cached) == (4, 0, 0)
    assert "num_free=4" in repr(pool)


def test_blocks_are_taken_least_recently_used_first_and_tails_before_heads():
    editor = make(6).thaw()
    first, second = editor.take(3), editor.take(2)
    editor.release(first)
    editor.release(second)
    pool = editor.freeze()

    assert pool.free_block_ids == (5, 2, 1, 0, 4, 3)
    assert pool.thaw().take(6) == [5, 2, 1, 0, 4, 3]


def test_an_edit_leaves_the_pool_it_started_from_as_it_was():
    pool = make()
    held, block_ids, _ = hold(pool, log(1, 2, 3, 4))
    release(held, block_ids)

    assert pool == make()
    assert held.num_free == 4 and held.num_cached == 2


def test_a_shared_block_is_free_only_when_the_last_holder_lets_go():
    pool, block_ids, _ = hold(make(), log(1, 2, 3, 4))
    editor = pool.thaw()
    editor.share(block_ids)
    editor.release(block_ids)

    assert editor.num_free == 4
    editor.release(block_ids)
    assert editor.num_free == 6
    assert set(editor.freeze().ref_counts) == {0}


def test_a_hit_takes_a_free_block_out_of_the_middle_of_the_list():
    pool, block_ids, _ = hold(make(), log(1, 2, 3, 4))
    pool = release(pool, block_ids)
    editor = pool.thaw()

    assert editor.count_free(block_ids) == 2
    editor.share(block_ids[:1])
    assert editor.freeze().free_block_ids == (2, 3, 4, 5, 1)


@pytest.mark.parametrize(
    ("tokens", "num_hit_blocks"),
    [
        ((1, 2, 3, 4, 5), 2),
        ((1, 2, 3, 4), 1),  # one token is always left to compute
        ((1, 2, 3), 1),
        ((1, 2), 0),
        ((1, 2, 9, 9, 9), 1),
        ((9, 9, 3, 4, 5), 0),  # the same tokens after other ones are another prefix
        ((3, 4, 5), 0),
    ],
)
def test_finds_the_longest_cached_run_and_leaves_one_token(tokens, num_hit_blocks):
    pool, block_ids, _ = hold(make(), log(1, 2, 3, 4))

    assert pool.find_prefix(log(*tokens), len(tokens))[0] == block_ids[:num_hit_blocks]


def test_freed_blocks_stay_hittable_until_they_are_taken():
    pool, block_ids, _ = hold(make(4), log(1, 2, 3, 4))
    pool = release(pool, block_ids)
    editor = pool.thaw()
    editor.take(3)  # the two that were never used, then the tail of what was freed
    after = editor.freeze()

    assert pool.find_prefix(log(1, 2, 3, 4, 5), 5)[0] == block_ids
    assert after.find_prefix(log(1, 2, 3, 4, 5), 5)[0] == block_ids[:1]


def test_the_same_prefix_twice_is_registered_once_and_both_can_go_on():
    pool, first, first_prefix = hold(make(), log(1, 2, 3, 4))
    pool, second, second_prefix = hold(pool, log(1, 2, 3, 4))
    editor = pool.thaw()
    tail = editor.take(1)
    editor.register(second_prefix, tail, log(1, 2, 3, 4, 5, 6), 4)
    pool = editor.freeze()

    assert first_prefix == second_prefix and set(first).isdisjoint(second)
    assert pool.num_cached == 3
    assert pool.find_prefix(log(1, 2, 3, 4, 5, 6, 7), 7)[0] == first + tail


def test_forgetting_prefixes_frees_nothing_and_finds_nothing():
    pool, block_ids, prefix = hold(make(), log(1, 2, 3, 4))
    forgotten = pool.forget_prefixes()
    editor = forgotten.thaw()
    tail = editor.take(1)
    editor.register(prefix, tail, log(1, 2, 3, 4, 5, 6), 4)  # a sequence in flight goes on
    after = editor.freeze()
    refilled, again, _ = hold(after, log(1, 2, 3, 4))

    assert forgotten.num_cached == 0 and forgotten.num_free == pool.num_free
    assert after.find_prefix(log(1, 2, 3, 4, 5, 6, 7), 7)[0] == []
    # What was registered under the forgotten parent is not taken for a child of the new one.
    assert refilled.find_prefix(log(1, 2, 3, 4, 5, 6, 7), 7)[0] == again


def test_a_block_whose_parent_was_evicted_does_not_keep_the_same_prefix_out_for_ever():
    pool, block_ids, _ = hold(make(4), log(1, 2, 3, 4))
    pool = release(pool, block_ids[:1])  # as if the head's sequence had ended first
    editor = pool.thaw()
    editor.release(editor.take(3))  # evicts the head; its child stays, held and unreachable
    pool, again, _ = hold(editor.freeze(), log(1, 2, 3, 4))

    assert pool.find_prefix(log(1, 2, 3, 4, 5), 5)[0] == again
    assert pool.keys[block_ids[1]] == 0
    assert pool.num_cached == 2


class TestCollidingKeys:
    """With a hash of almost no bits, wrong hits would be everywhere if keys were trusted."""

    @pytest.fixture(autouse=True)
    def hash_of_one_bit(self, monkeypatch):
        monkeypatch.setattr(
            blocks_module, "xxh64_intdigest", lambda data, seed: 1 + (sum(data) + seed) % 2
        )

    def test_a_collision_costs_a_miss_and_never_other_tokens(self):
        pool, first, _ = hold(make(), log(1, 1))
        pool, _, prefix = hold(pool, log(3, 3))

        assert prefix[1] == NO_PREFIX_ID and pool.num_cached == 1
        assert pool.find_prefix(log(1, 1, 9), 3)[0] == first
        assert pool.find_prefix(log(3, 3, 9), 3)[0] == []

    def test_what_follows_a_collision_is_not_found_under_the_other_prompt(self):
        pool, first, _ = hold(make(), log(1, 1))
        pool, _, _ = hold(pool, log(3, 3, 4, 5))

        assert pool.num_cached == 1
        assert pool.find_prefix(log(1, 1, 4, 5, 9), 5)[0] == first


def test_a_digest_of_zero_is_a_miss(monkeypatch):
    monkeypatch.setattr(blocks_module, "xxh64_intdigest", lambda data, seed: 0)
    pool, _, prefix = hold(make(), log(1, 2, 3, 4))

    assert prefix[1] == NO_PREFIX_ID and pool.num_cached == 0
    assert pool.find_prefix(log(1, 2, 3), 3)[0] == []


def test_taking_more_than_is_free_is_a_bug_of_the_caller():
    with pytest.raises(AssertionError):
        make(2).thaw().take(3)
