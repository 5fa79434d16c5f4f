from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.kernels import ops
from nanovllm.model.attention import AttentionMetadata, PrefillRow, attend
from tests.kernels.paged_case import assert_near, paged_case

SHAPES = st.fixed_dictionaries(
    {
        "num_heads": st.sampled_from([4, 8]),
        "num_kv_heads": st.sampled_from([1, 2, 4]),
        "head_dim": st.sampled_from([16, 48]),
        "block_size": st.sampled_from([1, 3, 16]),
        "seed": st.integers(0, 99),
    }
)
# Queries of each sequence, and what is cached before them.
LENS = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 40)), min_size=1, max_size=5)


def slots_of(case, row):
    positions = torch.arange(int(case.context_lens[row]))
    blocks = case.block_tables[row].long()[positions // case.block_size]
    return blocks * case.block_size + positions % case.block_size


def attend_as_the_model(case):
    """By the decoder's own attention: every sequence a prefill after what is cached."""
    rows, stored = [], []
    cu_seqlens = case.cu_seqlens_q.tolist()
    for row, (first, end) in enumerate(pairwise(cu_seqlens)):
        slots = slots_of(case, row)
        start = len(slots) - (end - first)
        mask = torch.arange(len(slots)) <= torch.arange(start, len(slots))[:, None]
        rows.append(PrefillRow(first, end, slots, mask))
        stored.append(slots[start:])
    slot_mapping = torch.cat(stored)
    metadata = AttentionMetadata(slot_mapping, 0, torch.empty(0), torch.empty(0), tuple(rows))
    key, value = case.key_cache[slot_mapping], case.value_cache[slot_mapping]
    return attend(case.query, key, value, case.key_cache, case.value_cache, metadata)


@settings(max_examples=25, deadline=None)
@given(lens=LENS, shape=SHAPES)
def test_prefill_attends_as_the_model_does(lens, shape):
    """Whatever stands in free blocks, behind a context and behind a table's columns."""
    lens_q = [num for num, _ in lens]
    case = paged_case([num + cached for num, cached in lens], lens_q, **shape)

    assert_near(attend_as_the_model(case), case.prefill(ops.paged_prefill))


@settings(max_examples=25, deadline=None)
@given(
    context_lens=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    num_splits=st.integers(1, 9),
    shape=SHAPES,
)
def test_decode_attends_as_the_model_does(context_lens, num_splits, shape):
    case = paged_case(context_lens, **shape)

    assert_near(attend_as_the_model(case), case.decode(ops.paged_decode, num_splits))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_attends_as_the_model_does(dtype):
    case = paged_case([33, 70], [2, 70], dtype=dtype)

    assert_near(attend_as_the_model(case), case.prefill(ops.paged_prefill))


def test_a_row_without_context_gives_zeros():
    case = paged_case([3, 5])
    case.context_lens[0] = 0

    assert not case.decode(ops.paged_decode, 1)[0].any()
    assert case.decode(ops.paged_decode, 1)[1].all()
