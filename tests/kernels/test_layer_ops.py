import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.kernels import ops
from nanovllm.kernels.rope_table import rope_table
from nanovllm.model.decoder import rms_norm
from nanovllm.model.rope import cos_sin, rotate

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def normal(*size, dtype=torch.float32, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_are_the_models(dtype):
    x, residual, weight = normal(3, 48, dtype=dtype), normal(3, 48, dtype=dtype), normal(48)
    weight = weight.to(dtype)
    added = residual + x

    assert torch.equal(rms_norm(x, weight, 1e-5), ops.rms_norm(x, weight, 1e-5))
    assert torch.equal(rms_norm(added, weight, 1e-5), ops.add_rms_norm(x, residual, weight, 1e-5))
    assert torch.equal(added, residual)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_activation_is_the_models(dtype):
    gate_up = normal(3, 96, dtype=dtype)
    gate, up = gate_up.chunk(2, dim=-1)

    assert torch.equal(torch.nn.functional.silu(gate) * up, ops.silu_mul(gate_up))


@settings(max_examples=30, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    heads=st.sampled_from([(4, 4), (6, 2), (8, 1)]),
    has_norms=st.booleans(),
    slots=st.lists(st.integers(-1, 11), min_size=1, max_size=8).filter(
        lambda slots: len({slot for slot in slots if slot >= 0}) == sum(s >= 0 for s in slots)
    ),
    seed=st.integers(0, 99),
)
def test_rope_and_store_do_as_the_model_does(dtype, heads, has_norms, slots, seed):
    """And nothing but the slots that are named changes, the last slot least of all."""
    (num_heads, num_kv_heads), head_dim, num_tokens = heads, 16, len(slots)
    frequencies = 10_000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    positions = torch.randint(0, 5000, (num_tokens,), generator=torch.Generator().manual_seed(seed))
    qkv = normal(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype, seed=seed)
    norms = [normal(head_dim, dtype=dtype, seed=i) if has_norms else None for i in (1, 2)]
    cache = normal(2, 12, num_kv_heads, head_dim, dtype=dtype)
    parts = qkv.view(num_tokens, -1, head_dim).split((num_heads, num_kv_heads, num_kv_heads), 1)
    angles = cos_sin(positions, frequencies, 1.2)
    query, key = (
        rotate(part if norm is None else rms_norm(part, norm, 1e-6), *angles)
        for part, norm in zip(parts, norms, strict=False)
    )
    expected = cache.clone()
    for row, slot in enumerate(slots):
        if slot >= 0:
            expected[0, slot], expected[1, slot] = key[row], parts[2][row]
    actual = ops.qkv_rope_store(
        qkv,
        positions,
        torch.tensor(slots, dtype=torch.int32),
        rope_table(frequencies, 1.2, 5000),
        *norms,
        1e-6,
        *cache,
    )

    assert torch.equal(query, actual)
    assert torch.equal(expected, cache)
