"""Layer kernels against the plain operators, on Triton's interpreter: see test_interpreted."""

import pytest
import torch

from nanovllm.kernels import ops
from nanovllm.kernels.rope_table import rope_table
from nanovllm.kernels.triton import activation, norm, rope_store
from tests.kernels.interpreter import _mended_interpreter  # noqa: F401  a fixture
from tests.kernels.paged_case import assert_near

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def normal(*size, dtype, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 16), (3, 576), (2, 1000), (2, 4096)])
def test_norms_agree(num_rows, size, dtype):
    x = normal(num_rows, size, dtype=dtype)
    weight = normal(size, dtype=dtype, seed=1)
    residual = normal(num_rows, size, dtype=dtype, seed=2)
    ours, theirs = residual.clone(), residual.clone()

    assert_near(ops.rms_norm(x, weight, 1e-5), norm.rms_norm(x, weight, 1e-5))
    assert_near(ops.add_rms_norm(x, theirs, weight, 1e-5), norm.add_rms_norm(x, ours, weight, 1e-5))
    assert_near(theirs, ours)


def test_a_norm_takes_rows_of_a_wider_tensor():
    x = normal(3, 64, dtype=torch.float32)[:, :32]
    weight = normal(32, dtype=torch.float32, seed=1)

    assert_near(ops.rms_norm(x, weight, 1e-5), norm.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 16), (3, 1536), (2, 1000)])
def test_activations_agree(num_rows, size, dtype):
    gate_up = 3 * normal(num_rows, 2 * size, dtype=dtype)

    assert_near(ops.silu_mul(gate_up), activation.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "has_norms"),
    [(9, 3, 64, False), (4, 4, 80, True), (3, 1, 128, True), (1, 1, 256, False)],
)
def test_rope_and_store_agree(num_heads, num_kv_heads, head_dim, has_norms, dtype):
    """Rows of slot -1 write nowhere, least of all to the last slot."""
    num_slots, positions = 40, torch.tensor([0, 3000, 7, 12])
    qkv = normal(4, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    frequencies = 10_000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    table = rope_table(frequencies, 1.1, 3001)
    slots = torch.tensor([17, -1, 0, -1], dtype=torch.int32)
    norms = [normal(head_dim, dtype=dtype, seed=i) if has_norms else None for i in (1, 2)]
    caches = [
        torch.full((2, 2, num_slots, num_kv_heads, head_dim), 0.5, dtype=dtype) for _ in range(2)
    ]
    queries = [
        operator(qkv, positions, slots, table, *norms, 1e-6, *cache[1])
        for operator, cache in zip(
            (ops.qkv_rope_store, rope_store.qkv_rope_store), caches, strict=True
        )
    ]

    assert_near(*queries)
    assert_near(*caches)
    written = (caches[1] != 0.5).any(dim=-1).any(dim=-1).nonzero()
    assert written.tolist() == [[1, 0, 0], [1, 0, 17], [1, 1, 0], [1, 1, 17]]


def test_positions_may_be_int32_at_any_offset_of_a_packed_vector():
    packed = torch.tensor([9, 5, 2, -1, 3, 1], dtype=torch.int32)
    positions, slots = packed[1:3], packed[4:6]
    qkv = normal(2, 4 * 16, dtype=torch.float32)
    table = rope_table(torch.rand(8), 1.0, 10)
    expected, actual = torch.zeros(2, 2, 8, 1, 16)

    assert_near(
        ops.qkv_rope_store(qkv, positions, slots, table, None, None, 1e-6, *expected),
        rope_store.qkv_rope_store(qkv, positions, slots, table, None, None, 1e-6, *actual),
    )
    assert_near(expected, actual)
