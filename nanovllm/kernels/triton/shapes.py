"""The launches of a model's step as values, on tensors without memory: what there is to compile."""

from collections.abc import Iterator, Sequence

import attrs
import torch

from nanovllm.kernels.geometry import FEW_ROWS
from nanovllm.kernels.triton.activation import plan_silu_mul
from nanovllm.kernels.triton.decode import plan_paged_decode
from nanovllm.kernels.triton.greedy import plan_greedy
from nanovllm.kernels.triton.launch import Launch
from nanovllm.kernels.triton.linear import plan_linear
from nanovllm.kernels.triton.norm import plan_rms_norm
from nanovllm.kernels.triton.philox import plan_uniform
from nanovllm.kernels.triton.prefill import plan_paged_prefill
from nanovllm.kernels.triton.rope_store import plan_qkv_rope_store
from nanovllm.kernels.triton.sample import plan_sample_any
from nanovllm.kernels.triton.steps import plan_decode_inputs, plan_keep_tokens


@attrs.frozen
class Shape:
    """A model's numbers that kernels depend on.

    Attributes:
        name: For people.
        num_heads: `H`.
        num_kv_heads: `K`.
        head_dim: `D`.
        hidden_size: `E`.
        intermediate_size: `I`.
        vocab_size: `V`.
        qk_norm: Queries and keys are normalised per head.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    qk_norm: bool


SHAPES = (
    Shape("SmolLM2-135M", 9, 3, 64, 576, 1536, 49152, qk_norm=False),
    Shape("Qwen3-0.6B", 16, 8, 128, 1024, 3072, 151936, qk_norm=True),
)
"""Two that differ in every number."""


def step_launches(
    shape: Shape,
    *,
    num_rows: int = 8,
    max_blocks: int = 64,
    num_splits: Sequence[int] = (1, 8),
    max_seqlen_q: int = 512,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[Launch]:
    """Every launch of a layer and of sampling, on tensors without memory.

    Args:
        shape: The model.
        num_rows: Decodes, and sequences that prefill.
        max_blocks: Width of the block tables.
        num_splits: One decode for each.
        max_seqlen_q: The longest prefill.
        block_size: Positions of a block.
        dtype: Of all float tensors.
    """

    def floats(*sizes: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    def int32(*sizes: int) -> torch.Tensor:
        return floats(*sizes, dtype=torch.int32)

    rows, heads, dim, size = num_rows, shape.num_heads, shape.head_dim, shape.hidden_size
    key_cache, value_cache = floats(2, 2, 1024 * block_size, shape.num_kv_heads, dim)[0]
    norm = floats(dim) if shape.qk_norm else None
    tables, scale = int32(rows, max_blocks), dim**-0.5
    query = floats(rows, heads, dim)
    yield from plan_rms_norm(floats(rows, size), None, floats(size), 1e-6, floats(rows, size))
    yield from plan_rms_norm(
        floats(rows, size), floats(rows, size), floats(size), 1e-6, floats(rows, size)
    )
    yield from plan_qkv_rope_store(
        floats(rows, (heads + 2 * shape.num_kv_heads) * dim),
        int32(rows),
        int32(rows),
        floats(4096, dim, dtype=torch.float32),
        norm,
        norm,
        1e-6,
        key_cache,
        value_cache,
        query,
    )
    for splits in num_splits:
        yield from plan_paged_decode(
            query, key_cache, value_cache, tables, int32(rows), block_size, scale, splits, query
        )
    yield from plan_paged_prefill(
        query,
        key_cache,
        value_cache,
        tables,
        int32(rows),
        int32(rows + 1),
        max_seqlen_q,
        block_size,
        scale,
        query,
    )
    intermediate = shape.intermediate_size
    yield from plan_silu_mul(floats(rows, 2 * intermediate), floats(rows, intermediate))
    for few in (1, max(2, min(rows, FEW_ROWS))):  # each has a kernel
        wide, norms = floats(few, size), floats(size)
        heads_out = (heads + 2 * shape.num_kv_heads) * dim
        yield from plan_linear(
            wide, norms, 1e-6, floats(heads_out, size), None, floats(few, heads_out)
        )
        gated = floats(few, intermediate)
        yield from plan_linear(
            wide, norms, 1e-6, floats(2 * intermediate, size), None, gated, gates=True
        )
        yield from plan_linear(gated, None, 0.0, floats(size, intermediate), None, wide, adds=True)
    logits, ids = floats(rows, shape.vocab_size), floats(rows, dtype=torch.int64)
    numbers = floats(rows, dtype=torch.float32)
    yield from plan_greedy(logits, ids, numbers)
    uniform = floats(rows, dtype=torch.float64)
    yield from plan_sample_any(logits, numbers, numbers, numbers, uniform, ids, ids)
    columns = (int32(rows), int32(rows), int32(rows))
    yield from plan_decode_inputs(
        int32(2 * rows), *columns, tables, int32(), block_size, (*columns,)
    )
    yield from plan_uniform(*columns, floats(rows, dtype=torch.float64))
    yield from plan_keep_tokens(ids, numbers, int32(), int32(2 * rows))
