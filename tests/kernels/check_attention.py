"""Attention kernels against the plain operators, on Triton's interpreter: see test_interpreted."""

import attrs
import pytest
import torch

from nanovllm.kernels import ops
from nanovllm.kernels.triton import decode, prefill
from tests.kernels.interpreter import _mended_interpreter  # noqa: F401  a fixture
from tests.kernels.paged_case import NOWHERE, assert_near, paged_case

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SIZES = [(16, BF16), (64, BF16), (80, F16), (96, BF16), (128, F16), (256, F32)]
HEADS = [(2, 2), (3, 1), (8, 2), (8, 1)]  # ratios 1, 3, 4 and 8


@pytest.mark.parametrize("num_splits", [1, 2, 7])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_decode_shares_contexts_and_heads(num_heads, num_kv_heads, num_splits):
    """Lengths around a block, a tile of 64 and several tiles."""
    lens = [1, 15, 16, 17, 130]
    case = paged_case(lens, num_heads=num_heads, num_kv_heads=num_kv_heads)

    assert_near(
        case.decode(ops.paged_decode, num_splits), case.decode(decode.paged_decode, num_splits)
    )


@pytest.mark.parametrize(("head_dim", "dtype"), SIZES, ids=str)
def test_decode_takes_every_head_size_and_dtype(head_dim, dtype):
    case = paged_case([70, 9], num_heads=3, num_kv_heads=1, head_dim=head_dim, dtype=dtype)

    assert_near(case.decode(ops.paged_decode, 2), case.decode(decode.paged_decode, 2))


@pytest.mark.parametrize("block_size", [1, 5, 256])
def test_decode_takes_every_block_size(block_size):
    case = paged_case([1, 70, 257], num_kv_heads=1, block_size=block_size)

    assert_near(case.decode(ops.paged_decode, 3), case.decode(decode.paged_decode, 3))


def test_decode_of_rows_without_context_gives_zeros():
    case = paged_case([5, 3])
    case.context_lens[1] = 0
    for num_splits in (1, 4):
        attended = case.decode(decode.paged_decode, num_splits)

        assert not attended[1].any()
        assert_near(case.decode(ops.paged_decode, num_splits), attended)


def test_launches_planned_at_length_1_hold_at_every_length():
    """As a captured step does: only what the tensors hold changes."""
    case = paged_case([300, 300], num_heads=2, num_kv_heads=1)
    output = torch.empty_like(case.query)
    launches = decode.plan_paged_decode(*case.cache, case.block_size, case.scale, 5, output)
    for lens in ([1, 1], [64, 300]):
        case.context_lens.copy_(torch.tensor(lens))
        output.fill_(float("nan"))
        for launch in launches:
            launch.run()

        assert_near(case.decode(ops.paged_decode, 5), output)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize(
    ("contexts", "lens_q"),
    [
        ([1], [1]),
        ([17, 1, 16, 100], [1, 1, 1, 1]),  # nothing but decodes
        ([15, 16, 17], [15, 16, 17]),  # whole prompts
        ([150], [70]),  # several tiles, behind a prefix
        ([40, 7, 90, 1], [1, 7, 33, 1]),  # a mixed step
    ],
    ids=str,
)
def test_prefill_takes_any_mix_of_lengths(contexts, lens_q, num_heads, num_kv_heads):
    case = paged_case(contexts, lens_q, num_heads=num_heads, num_kv_heads=num_kv_heads)

    assert_near(case.prefill(ops.paged_prefill), case.prefill(prefill.paged_prefill))


@pytest.mark.parametrize(("head_dim", "dtype"), SIZES, ids=str)
def test_prefill_takes_every_head_size_and_dtype(head_dim, dtype):
    case = paged_case(
        [50, 20], [45, 3], num_heads=3, num_kv_heads=1, head_dim=head_dim, dtype=dtype
    )

    assert_near(case.prefill(ops.paged_prefill), case.prefill(prefill.paged_prefill))


def test_a_position_does_not_see_those_after_it():
    case = paged_case([40], [40])
    before = case.prefill(prefill.paged_prefill)
    last_slot = int(case.block_tables[0, 2]) * 16 + 7  # of position 39
    case.value_cache[last_slot] += 1

    after = case.prefill(prefill.paged_prefill)
    assert torch.equal(before[:-1], after[:-1])
    assert not torch.equal(before[-1], after[-1])


@pytest.mark.parametrize("num_pad_rows", [1, 5])
@pytest.mark.parametrize("num_pads", [1, 64, 200])
def test_prefill_passes_over_padding(num_pads, num_pad_rows):
    """Rows that begin and end where the last one ends, and positions behind it, of a wider tile."""
    case = paged_case([40, 17, 5], [9, 1, 5])
    want = case.prefill(ops.paged_prefill)
    num_live = len(want)
    noise = torch.full((num_pads, *case.query.shape[1:]), float("nan"))
    tables = case.block_tables
    padded = attrs.evolve(
        case,
        query=torch.cat([case.query, noise]),
        block_tables=torch.cat([tables, tables.new_full((num_pad_rows, tables.shape[1]), NOWHERE)]),
        context_lens=torch.cat([case.context_lens, case.context_lens.new_zeros(num_pad_rows)]),
        cu_seqlens_q=torch.cat([case.cu_seqlens_q, case.cu_seqlens_q[-1:].repeat(num_pad_rows)]),
        max_seqlen_q=num_live + num_pads,
    )

    for operator in (ops.paged_prefill, prefill.paged_prefill):
        assert_near(want, padded.prefill(operator)[:num_live])
