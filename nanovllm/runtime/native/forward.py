"""A whole model step as one compiled job: token ids and positions in, logits out.

Every member of the team calls `forward_job` and walks through the same phases (see `phases`). It
releases the GIL and allocates nothing. Decodes and prefills are the same to it: positions, each of
which knows the block table of what it attends to. Residuals, norms, rope, softmax and sums are
float32 whatever the weights are; what a matrix product reads is rounded to the weights' type.
"""

from typing import Any

import numpy as np
from numba import njit

from nanovllm.runtime.native.attention import OPTIONS, attend, exp, inverse_rms
from nanovllm.runtime.native.matmul import matmul_phase
from nanovllm.runtime.native.phases import claim, finish, wait_for
from nanovllm.runtime.native.values import narrow, widen

# Columns of the table of weight addresses, a row a layer.
QKV, OUTPUT, GATE_UP, DOWN = range(4)

PHASES_PER_LAYER = 9


def num_phases(num_layers: int) -> int:
    """Phases of a job."""
    return 1 + PHASES_PER_LAYER * num_layers + 2  # embedding; layers; final norm and lm head


@njit(**OPTIONS)
def _start_row(
    token_id: int, position: int, embedding: Any, frequencies: Any, attention_factor: Any,
    hidden: Any, cos: Any, sin: Any,
) -> None:  # fmt: skip
    """Embedding, cosines and sines of one row."""
    for i in range(hidden.shape[0]):
        hidden[i] = widen(embedding[token_id, i])
    for i in range(frequencies.shape[0]):
        angle = np.float32(position) * frequencies[i]
        cos[i] = np.cos(angle) * attention_factor
        sin[i] = np.sin(angle) * attention_factor


@njit(**OPTIONS)
def _add_and_norm(hidden: Any, change: Any, bias: Any, weight: Any, eps: Any, normed: Any) -> None:
    """`hidden += change + bias`, then `normed = hidden / rms * weight`: one row of each, `[E]`.

    `change` and `bias` are empty where there is nothing to add.
    """
    size = weight.shape[0]
    for i in range(change.shape[0]):
        hidden[i] += change[i]
    for i in range(bias.shape[0]):
        hidden[i] += bias[i]
    scale = inverse_rms(hidden, eps)
    for i in range(size):
        normed[i] = narrow(hidden[i] * scale * weight[i], normed)


@njit(**OPTIONS)
def _prepare_head(head: Any, bias: Any, norm: Any, eps: Any, cos: Any, sin: Any) -> None:
    """Bias, norm and rope of one query or key head, in place; `bias`, `norm` may be empty."""
    size, half = head.shape[0], cos.shape[0]
    for i in range(bias.shape[0]):
        head[i] += bias[i]
    if norm.shape[0]:
        scale = inverse_rms(head, eps)
        for i in range(size):
            head[i] *= scale * norm[i]
    for i in range(half):
        first, second = head[i], head[half + i]
        head[i] = first * cos[i] - second * sin[i]
        head[half + i] = second * cos[i] + first * sin[i]


@njit(**OPTIONS)
def _store(source: Any, bias: Any, target: Any) -> None:
    """`target = source + bias` in the type of `target`; `bias` may be empty."""
    for i in range(bias.shape[0]):
        source[i] += bias[i]
    for i in range(source.shape[0]):
        target[i] = narrow(source[i], target)


@njit(**OPTIONS)
def _prepare_heads(
    qkv: Any, num_heads: int, bias: Any, query_norm: Any, key_norm: Any, eps: Any, cos: Any,
    sin: Any, cache: Any, slot: int, queries: Any,
) -> None:  # fmt: skip
    """One position's heads: bias, norm and rope; queries to `queries`, K/V to their slot.

    `qkv [(H + 2 K) D]` float32, `cache [2, num_slots, K, D]`, `queries [H, D]` in the type that
    tiles take.
    """
    num_kv_heads, size = cache.shape[2], cache.shape[3]
    num_both = num_heads + num_kv_heads
    has_bias = bias.shape[0] > 0
    for head in range(num_both + num_kv_heads):
        first, end = head * size, (head + 1) * size
        one = qkv[first:end]
        one_bias = bias[first:end] if has_bias else bias[0:0]
        if head < num_heads:
            _prepare_head(one, one_bias, query_norm, eps, cos, sin)
            _store(one, bias[0:0], queries[head])
        elif head < num_both:
            _prepare_head(one, one_bias, key_norm, eps, cos, sin)
            _store(one, bias[0:0], cache[0, slot, head - num_heads])
        else:
            _store(one, one_bias, cache[1, slot, head - num_both])


@njit(**OPTIONS)
def _attend_group(
    queries: Any, kv_head: int, cache: Any, bf16: int | None, table: Any, block_size: int,
    num_context: int, scale: Any, scores: Any, attended: Any, out: Any,
) -> None:  # fmt: skip
    """One position's query heads that share a key/value head: `queries`, `out` `[H, D]`."""
    num_kv_heads, size = cache.shape[2], cache.shape[3]
    group = queries.shape[0] // num_kv_heads
    first = kv_head * group
    attend(
        queries[first:].ctypes.data, group, size, cache[0, 0, kv_head].ctypes.data,
        cache[1, 0, kv_head].ctypes.data, bf16, num_kv_heads * size * cache.itemsize, table,
        block_size, num_context, scale, scores, attended,
    )  # fmt: skip
    for head in range(group):
        _store(attended[head], attended[head, 0:0], out[first + head])


@njit(**OPTIONS)
def _gate(gate_up: Any, bias: Any, inner: Any) -> None:
    """`inner [I] = silu(gate) * up` of one row, `gate_up [2 I]`; `bias [2 I]` may be empty."""
    size = inner.shape[0]
    for i in range(bias.shape[0]):
        gate_up[i] += bias[i]
    for i in range(size):
        # Past -87 a sigmoid is 0 to float32 anyway.
        weight = np.float32(1) / (np.float32(1) + exp(min(-gate_up[i], np.float32(87))))
        inner[i] = narrow(gate_up[i] * weight * gate_up[size + i], inner)


@njit(**OPTIONS)
def _norm_phase(
    counters: int, phase: int, num_inputs: int, hidden: Any, has_change: bool, change: Any,
    bias: Any, weight: Any, eps: Any, normed: Any,
) -> None:  # fmt: skip
    """A phase of `_add_and_norm`, a chunk a row."""
    added = hidden.shape[1] if has_change else 0
    m = claim(counters, phase)
    while m < num_inputs:
        _add_and_norm(hidden[m], change[m, :added], bias[:added], weight, eps, normed[m])
        finish(counters, phase)
        m = claim(counters, phase)
    wait_for(counters, phase, num_inputs)


@njit(**OPTIONS)
def forward_job(
    counters: int, member: int, num_inputs: int, num_logits: int, bf16: int | None, weights: Any,
    lm_head: int, embedding: Any, input_norms: Any, post_norms: Any, query_norms: Any,
    key_norms: Any, final_norm: Any, qkv_bias: Any, output_bias: Any, gate_up_bias: Any,
    down_bias: Any, frequencies: Any, attention_factor: Any, eps: Any, scale: Any, kv_cache: Any,
    block_size: int, input_ids: Any, positions: Any, slots: Any, rows: Any, block_tables: Any,
    logits_indices: Any, hidden: Any, normed: Any, queries: Any, attended: Any, heads: Any,
    inner: Any, qkv: Any, gate_up: Any, change: Any, cos: Any, sin: Any, scores: Any, logits: Any,
) -> None:  # fmt: skip
    """Compute `T = num_inputs` positions, and the logits of `R` of them, as one member.

    Weights by address in `weights [L, 4]` int64 and `lm_head`; norms `[L, E]` or `[L, D]` and
    biases `[L, n]` float32, of width 0 where the family has none. `embedding [V, E]` and
    `kv_cache [L, 2, num_slots, K, D]` are float32, or bfloat16 as uint16. The batch is int32:
    `input_ids`, `positions`, `slots`, `rows [T]` (whose row of `block_tables [S, W]` a position
    reads), `logits_indices [R]`. The rest is scratch, with rows up to `padded_rows(T)`:
    `normed [., E]`, `queries`, `heads` `[., H, D]` and `inner [., I]` in the type that tiles take;
    `hidden`, `change` `[., E]`, `qkv [., (H + 2 K) D]`, `gate_up [., 2 I]` float32; `cos`, `sin`
    `[., D / 2]`; a member's own `attended [members, group, D]` and
    `scores [members, padded group, longest context]`; `logits [padded R, V]` float32.

    With `T = 0` no layer runs: `R` positions of the job before get their logits, for the first
    time, from the `hidden` and `change` that it left.
    """
    num_heads, num_kv_heads, head_dim = heads.shape[1], kv_cache.shape[3], kv_cache.shape[4]
    size, inner_size = hidden.shape[1], inner.shape[1]
    m = claim(counters, 0)
    while m < num_inputs:
        _start_row(
            input_ids[m], positions[m], embedding, frequencies, attention_factor, hidden[m],
            cos[m], sin[m],
        )  # fmt: skip
        finish(counters, 0)
        m = claim(counters, 0)
    wait_for(counters, 0, num_inputs)
    phase = 1
    num_layers = weights.shape[0] if num_inputs > 0 else 0
    for layer in range(num_layers):
        # Adds what the layer before left; the first layer has none before it.
        _norm_phase(
            counters, phase, num_inputs, hidden, layer > 0, change, down_bias[layer - 1],
            input_norms[layer], eps, normed,
        )  # fmt: skip
        matmul_phase(
            counters, phase + 1, weights[layer, QKV], bf16, qkv.shape[1], size,
            normed.ctypes.data, num_inputs, qkv.ctypes.data,
        )  # fmt: skip
        m = claim(counters, phase + 2)
        while m < num_inputs:
            _prepare_heads(
                qkv[m], num_heads, qkv_bias[layer], query_norms[layer], key_norms[layer], eps,
                cos[m], sin[m], kv_cache[layer], slots[m], queries[m],
            )  # fmt: skip
            finish(counters, phase + 2)
            m = claim(counters, phase + 2)
        wait_for(counters, phase + 2, num_inputs)
        num_units = num_inputs * num_kv_heads
        unit = claim(counters, phase + 3)
        while unit < num_units:
            m = unit // num_kv_heads
            _attend_group(
                queries[m], unit % num_kv_heads, kv_cache[layer], bf16, block_tables[rows[m]],
                block_size, positions[m] + 1, scale, scores[member], attended[member], heads[m],
            )  # fmt: skip
            finish(counters, phase + 3)
            unit = claim(counters, phase + 3)
        wait_for(counters, phase + 3, num_units)
        matmul_phase(
            counters, phase + 4, weights[layer, OUTPUT], bf16, size, num_heads * head_dim,
            heads.ctypes.data, num_inputs, change.ctypes.data,
        )  # fmt: skip
        _norm_phase(
            counters, phase + 5, num_inputs, hidden, True, change, output_bias[layer],
            post_norms[layer], eps, normed,
        )  # fmt: skip
        matmul_phase(
            counters, phase + 6, weights[layer, GATE_UP], bf16, 2 * inner_size, size,
            normed.ctypes.data, num_inputs, gate_up.ctypes.data,
        )  # fmt: skip
        m = claim(counters, phase + 7)
        while m < num_inputs:
            _gate(gate_up[m], gate_up_bias[layer], inner[m])
            finish(counters, phase + 7)
            m = claim(counters, phase + 7)
        wait_for(counters, phase + 7, num_inputs)
        matmul_phase(
            counters, phase + 8, weights[layer, DOWN], bf16, size, inner_size,
            inner.ctypes.data, num_inputs, change.ctypes.data,
        )  # fmt: skip
        phase += PHASES_PER_LAYER
    if num_logits == 0:
        return  # only prompts that were cut short: nothing is drawn, and no row is padded from none
    r = claim(counters, phase)
    while r < num_logits:
        m = logits_indices[r]
        _add_and_norm(
            hidden[m], change[m], down_bias[weights.shape[0] - 1], final_norm, eps, normed[r]
        )
        finish(counters, phase)
        r = claim(counters, phase)
    wait_for(counters, phase, num_logits)
    matmul_phase(
        counters, phase + 1, lm_head, bf16, logits.shape[1], size, normed.ctypes.data,
        num_logits, logits.ctypes.data,
    )  # fmt: skip
