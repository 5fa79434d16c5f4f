"""Faults from the field, put into the kernels one at a time: each is caught by what is said here.

Runs on Triton's interpreter: see test_interpreted. The unchanged kernels must pass the very check
that the faulty ones fail.
"""

import mmap

import attrs
import pytest
import torch

from nanovllm.kernels import ops
from nanovllm.kernels.triton import decode, prefill, rope_store
from tests.kernels.faults import with_fault
from tests.kernels.interpreter import _mended_interpreter  # noqa: F401  a fixture
from tests.kernels.paged_case import assert_near, paged_case

NUM_VALUES = 2**31
"""The first offset that int32 does not hold."""

MAP_NORESERVE = 0x4000
"""Of Linux, where Triton runs; Python has no name for it before 3.13."""


def agrees(expected, actual):
    try:
        assert_near(expected, actual)
    except AssertionError:
        return False
    return True


def decodes(module, case):
    return all(
        agrees(case.decode(ops.paged_decode, num), case.decode(module.paged_decode, num))
        for num in (1, 3)
    )


def prefills(module, case):
    return agrees(case.prefill(ops.paged_prefill), case.prefill(module.paged_prefill))


# Pitfall 32: a NaN in a page that nobody owns, behind a weight of 0.

VALUE_MASK = "mask=is_context[:, None] & is_channel[None, :]", "mask=is_channel[None, :]"
SCORE_MASKS = {
    decode: ('scores = tl.where(is_context[None, :], scores, float("-inf"))', "pass"),
    prefill: ("is_visible & is_context[None, :]", "is_visible | (position[None, :] >= 0)"),
}


@pytest.mark.parametrize(
    ("module", "agree"), [(decode, decodes), (prefill, prefills)], ids=["decode", "prefill"]
)
def test_what_lies_behind_a_context_does_not_leak(module, agree, tmp_path):
    case = paged_case([70, 9], [3, 2] if module is prefill else None)
    # A masked table look-up gives block 0: make that one nobody's.
    free = set(range(len(case.key_cache) // 16)) - set(case.block_tables.flatten().tolist())
    swap_blocks(case, 0, min(free))

    assert agree(module, case)
    assert not agree(with_fault(module, tmp_path, VALUE_MASK), case)
    assert not agree(with_fault(module, tmp_path, SCORE_MASKS[module]), case)


def swap_blocks(case, first, second):
    for cache in (case.key_cache, case.value_cache):
        blocks = cache.view(-1, 16, *cache.shape[1:])
        blocks[[first, second]] = blocks[[second, first]]
    tables = case.block_tables.clone()
    case.block_tables[tables == first] = second
    case.block_tables[tables == second] = first


# Pitfall 22: rows of a table that are further apart than they are long.

STRIDE = "block_tables.stride(0)", "block_tables.shape[1]"


@pytest.mark.parametrize(
    ("module", "agree"), [(decode, decodes), (prefill, prefills)], ids=["decode", "prefill"]
)
def test_the_rows_of_a_table_may_be_far_apart(module, agree, tmp_path):
    case = paged_case([20, 40], [1, 4] if module is prefill else None)
    assert case.block_tables.stride(0) > case.block_tables.shape[1]

    assert agree(module, case)
    # The faulty one reads block ids that no cache has: here they are of block 0.
    whole = case.block_tables.as_strided((2, case.block_tables.stride(0)), (7, 1))
    whole[whole > 1000] = 0
    assert not agree(with_fault(module, tmp_path, STRIDE), case)


# Pitfall 21: page arithmetic in int32.


@pytest.fixture
def huge_cache():
    """Keys and values of one head, 16 channels each, in more than 2**32 values of address space.

    The cache begins in its middle, so that an offset that wraps around finds memory too: zeros,
    of which the system keeps only those pages that are written.
    """
    num_bytes = 2 * (2 * NUM_VALUES + 2**20)  # float16
    try:
        memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    except OSError as error:
        pytest.skip(f"the system reserves no 8 GiB of addresses: {error}")
    values = torch.frombuffer(memory, dtype=torch.float16)[NUM_VALUES:]
    return values.view(-1, 1, 16)


BLOCK_CAST = "mask=is_context, other=0).to(tl.int64)", "mask=is_context, other=0)"


@pytest.mark.parametrize(
    ("module", "agree"), [(decode, decodes), (prefill, prefills)], ids=["decode", "prefill"]
)
def test_pages_behind_two_to_the_31_values_are_read(module, agree, huge_cache, tmp_path):
    case = paged_case([20], [3] if module is prefill else None, num_heads=2, num_kv_heads=1)
    block_id = NUM_VALUES // (16 * 16)
    case.block_tables[0, :2] = torch.tensor([block_id + 1, 3])
    slots = torch.cat((torch.arange(16) + (block_id + 1) * 16, torch.arange(4) + 3 * 16))
    huge_cache[slots] = case.keys[0].half()
    case = attrs.evolve(case, query=case.query.half(), key_cache=huge_cache, value_cache=huge_cache)

    assert agree(module, case)
    assert not agree(with_fault(module, tmp_path, BLOCK_CAST), case)


SLOT_CAST = "(slot_mapping + token).to(tl.int64)", "(slot_mapping + token)"


def test_pages_behind_two_to_the_31_values_are_written(huge_cache, tmp_path):
    slot = NUM_VALUES // 16 + 5

    def writes(module):
        huge_cache[slot] = 0
        module.qkv_rope_store(
            torch.ones(1, 3 * 16, dtype=torch.float16),
            torch.zeros(1, dtype=torch.int32),
            torch.tensor([slot], dtype=torch.int32),
            torch.ones(1, 16),
            None,
            None,
            1e-6,
            huge_cache,  # what is stored here
            huge_cache,  # is overwritten by the values
        )
        return bool((huge_cache[slot] == 1).all())

    assert writes(rope_store)
    assert not writes(with_fault(rope_store, tmp_path, SLOT_CAST))
