"""Per-head norms, rotary embedding and K/V store in one kernel: each program a few heads."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.geometry import next_power_of_2
from nanovllm.kernels.triton.launch import Kernel, Launch, run
from nanovllm.kernels.triton.overlap import begin

_HEADS_PER_PROGRAM = 4


@triton.jit(do_not_specialize=["positions", "slot_mapping"])
def _qkv_rope_store(
    qkv,
    positions,
    slot_mapping,
    cos_sin,
    q_norm,
    k_norm,
    query,
    key_cache,
    value_cache,
    qkv_stride,
    slot_stride,
    head_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    NORMS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    inside = pair < HALF
    is_query = head < NUM_HEADS
    is_turned = head < NUM_HEADS + NUM_KV_HEADS  # queries and keys
    exists = inside & (head < NUM_HEADS + 2 * NUM_KV_HEADS)

    # The two channels of a pair stand half a head apart.
    source = qkv + token * qkv_stride + head * (2 * HALF) + pair
    first = tl.load(source, mask=exists, other=0.0)
    second = tl.load(source + HALF, mask=exists, other=0.0)
    dtype = first.dtype
    turned_first = first.to(tl.float32)
    turned_second = second.to(tl.float32)
    if NORMS:
        squares = turned_first * turned_first + turned_second * turned_second
        scale = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / (2 * HALF) + eps)
        # Rounded after the norm and after the weight, as two operations would.
        turned_first = (turned_first * scale).to(dtype).to(tl.float32)
        turned_second = (turned_second * scale).to(dtype).to(tl.float32)
        q_weight = tl.load(q_norm + pair, mask=inside, other=0.0)
        k_weight = tl.load(k_norm + pair, mask=inside, other=0.0)
        weight = tl.where(is_query, q_weight, k_weight).to(tl.float32)
        turned_first = (turned_first * weight).to(dtype).to(tl.float32)
        q_weight = tl.load(q_norm + HALF + pair, mask=inside, other=0.0)
        k_weight = tl.load(k_norm + HALF + pair, mask=inside, other=0.0)
        weight = tl.where(is_query, q_weight, k_weight).to(tl.float32)
        turned_second = (turned_second * weight).to(dtype).to(tl.float32)

    angle = cos_sin + tl.load(positions + token).to(tl.int64) * (2 * HALF) + pair
    cos = tl.load(angle, mask=inside, other=0.0)
    sin = tl.load(angle + HALF, mask=inside, other=0.0)
    first = tl.where(is_turned, (turned_first * cos - turned_second * sin).to(dtype), first)
    second = tl.where(is_turned, (turned_second * cos + turned_first * sin).to(dtype), second)

    target = query + (token * NUM_HEADS + head) * (2 * HALF) + pair
    tl.store(target, first, mask=inside & is_query)
    tl.store(target + HALF, second, mask=inside & is_query)

    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot >= 0:  # -1: write nowhere
        page = slot * slot_stride
        target = key_cache + page + (head - NUM_HEADS) * head_stride + pair
        is_key = exists & is_turned & (head >= NUM_HEADS)
        tl.store(target, first, mask=is_key)
        tl.store(target + HALF, second, mask=is_key)
        target = value_cache + page + (head - NUM_HEADS - NUM_KV_HEADS) * head_stride + pair
        is_value = exists & (head >= NUM_HEADS + NUM_KV_HEADS)
        tl.store(target, first, mask=is_value)
        tl.store(target + HALF, second, mask=is_value)


QKV_ROPE_STORE = Kernel(_qkv_rope_store)


def qkv_rope_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> torch.Tensor:
    """See `nanovllm.kernels.ops.qkv_rope_store`."""
    _, num_kv_heads, head_dim = key_cache.shape
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    query = qkv.new_empty(len(qkv), num_heads, head_dim)
    run(
        plan_qkv_rope_store(
            qkv,
            positions,
            slot_mapping,
            cos_sin,
            q_norm,
            k_norm,
            eps,
            key_cache,
            value_cache,
            query,
        )
    )
    return query


def plan_qkv_rope_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query: torch.Tensor,
) -> tuple[Launch, ...]:
    """The launch: a grid of tokens and groups of heads."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[1]
    assert qkv.stride(1) == 1
    assert cos_sin.is_contiguous()
    assert key_cache.stride() == value_cache.stride()
    assert key_cache.stride(2) == 1
    assert (q_norm is None) == (k_norm is None)
    arguments = {
        "qkv": qkv,
        "positions": positions,
        "slot_mapping": slot_mapping,
        "cos_sin": cos_sin,
        "q_norm": q_norm,
        "k_norm": k_norm,
        "query": query,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "qkv_stride": qkv.stride(0),
        "slot_stride": key_cache.stride(0),
        "head_stride": key_cache.stride(1),
        "eps": eps,
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HALF": head_dim // 2,
        "BLOCK_HEADS": _HEADS_PER_PROGRAM,
        "BLOCK_HALF": next_power_of_2(head_dim // 2),
        "NORMS": q_norm is not None,
        "num_warps": 2,
    }
    num_groups = -(-(num_heads + 2 * num_kv_heads) // _HEADS_PER_PROGRAM)
    return (Launch(QKV_ROPE_STORE, (num_tokens, num_groups), arguments),)
