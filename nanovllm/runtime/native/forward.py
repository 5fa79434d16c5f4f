"""A whole model step as one compiled job: token ids and positions in, logits out.

Every member of the team calls `forward_job` and walks through the same phases (see `phases`). It
releases the GIL and allocates nothing. Decodes and prefills are the same to it: positions, each of
which knows the block table of what it attends to. Residuals, norms, rope, softmax and sums are
float32 whatever the weights are; what a matrix product reads is rounded to the type that it takes.
"""

from typing import Any

from numba import njit

from nanovllm.runtime.native.attention import (
    PART,
    attend_part,
    finish_row,
    merge,
)
from nanovllm.runtime.native.best import BEST_PART, best_of_part, best_of_row
from nanovllm.runtime.native.buffers import FLOAT_PADDING, int32s, int64s, item_bytes, tile_inputs
from nanovllm.runtime.native.matmul import matmul_phase
from nanovllm.runtime.native.options import INLINE, OPTIONS
from nanovllm.runtime.native.pages import GROUP, find_groups
from nanovllm.runtime.native.phases import claim, finish, wait_fetching, wait_for
from nanovllm.runtime.native.rows import add_and_norm, gate, prepare_heads, start_row, write_inputs

PHASES_PER_LAYER = 10

MAX_CHUNK_ROWS = 16
"""Most positions of a chunk: neighbours, whose keys share cache lines, are then one thread's."""

# Columns of the table of weight addresses, a row a layer.
QKV, OUTPUT, GATE_UP, DOWN = range(4)


def num_phases(num_layers: int) -> int:
    """Phases of a job."""
    # Embedding; layers; final norm, lm head, and the first of the largest logits in two turns.
    return 1 + PHASES_PER_LAYER * num_layers + 4


@njit(**OPTIONS)
def chunk_rows(num_inputs: int) -> int:
    """Positions that a thread claims at a time: one, unless they are many."""
    return max(min(num_inputs // 8, MAX_CHUNK_ROWS), 1)


@njit(**INLINE)
def _start_phase(counters: int, kind: Any, num_inputs: int, model: Any, buffers: Any) -> None:
    rows = chunk_rows(num_inputs)
    num_chunks = -(-num_inputs // rows)
    chunk = claim(counters, 0)
    while chunk < num_chunks:
        for m in range(chunk * rows, min((chunk + 1) * rows, num_inputs)):
            start_row(kind, m, model, buffers)
        finish(counters, 0)
        chunk = claim(counters, 0)
    wait_for(counters, 0, num_chunks)


@njit(**OPTIONS)
def _norm_phase(
    counters: int, phase: int, kind: Any, num_inputs: int, has_change: bool, bias: int,
    bias_layer: int, norm: int, layer: int, upcoming: int, model: Any, buffers: Any,
    member: Any,
) -> None:  # fmt: skip
    """Add what the block before left, and normalise."""
    rows = chunk_rows(num_inputs)
    num_chunks = -(-num_inputs // rows)
    chunk = claim(counters, phase)
    while chunk < num_chunks:
        for m in range(chunk * rows, min((chunk + 1) * rows, num_inputs)):
            add_and_norm(
                kind, m, has_change, bias, bias_layer, norm, layer, m, model, buffers, member
            )
        finish(counters, phase)
        chunk = claim(counters, phase)
    wait_fetching(counters, phase, num_chunks, upcoming)


@njit(**OPTIONS)
def _linear_phase(
    counters: int, phase: int, kind: Any, weight: int, stride: int, num_rows: int, length: int,
    x: int, scales: int, num_inputs: int, y: int, y_stride: int, model: Any, buffers: Any,
) -> None:  # fmt: skip
    x_stride = length * tile_inputs(kind, x, 1).itemsize + buffers.row_padding
    matmul_phase(
        counters, phase, kind, weight, stride, num_rows, length, model.int8_group, x, x_stride,
        scales, num_inputs, y, y_stride,
    )  # fmt: skip


@njit(**INLINE)
def _heads_phase(
    counters: int, phase: int, cache_kind: Any, layer: int, num_inputs: int,
    upcoming: int, model: Any, buffers: Any,
) -> None:  # fmt: skip
    rows = chunk_rows(num_inputs)
    num_chunks = -(-num_inputs // rows)
    chunk = claim(counters, phase)
    while chunk < num_chunks:
        for m in range(chunk * rows, min((chunk + 1) * rows, num_inputs)):
            prepare_heads(cache_kind, layer, m, model, buffers)
        finish(counters, phase)
        chunk = claim(counters, phase)
    wait_fetching(counters, phase, num_chunks, upcoming)


@njit(**OPTIONS)
def _one_part(
    cache_kind: Any, layer: int, tile: int, head: int, first: int, result: int, model: Any,
    buffers: Any, member: Any,
) -> None:  # fmt: skip
    """A query tile and the part of its context that begins at `first`; see `attend_part`."""
    group, size = model.heads_per_group, model.head_dim
    start = int32s(buffers.tile_starts, tile + 1)[tile]
    count = int32s(buffers.tile_sizes, tile + 1)[tile]
    position = int32s(buffers.positions, start + 1)[start]
    # The last position of the tile attends to all that the others do, and to itself.
    num_seen = min(position + count - first, PART)
    row = int32s(buffers.tile_rows, tile + 1)[tile]
    table = int32s(buffers.tables + 4 * row * buffers.table_width, buffers.table_width)
    key_groups = int64s(member.key_groups, PART // GROUP)
    value_groups = int64s(member.value_groups, PART // GROUP)
    half = buffers.cache_width * item_bytes(cache_kind)
    keys = buffers.cache + 2 * layer * half
    panel_stride = find_groups(
        cache_kind, table, first, num_seen, buffers.block_size, head, model.num_kv_heads, size,
        keys, keys + half, member.gathered, PART, key_groups, value_groups,
    )  # fmt: skip
    place = (head * buffers.query_rows + start) * group * size
    queries = buffers.queries + place * tile_inputs(cache_kind, buffers.queries, 1).itemsize
    attend_part(
        cache_kind, queries, group, count * group, size, position, model.scale, first, num_seen,
        key_groups, value_groups, panel_stride, member.scores, member.weights, result,
    )  # fmt: skip


@njit(**OPTIONS)
def _write_heads(kind: Any, tile: int, head: int, result: int, model: Any, buffers: Any) -> None:
    """What a query tile attended to, as the output projection reads it."""
    group, size = model.heads_per_group, model.head_dim
    start = int32s(buffers.tile_starts, tile + 1)[tile]
    num_rows = int32s(buffers.tile_sizes, tile + 1)[tile] * group
    length = model.num_kv_heads * group * size
    for row in range(num_rows):
        attended = finish_row(result, row, num_rows, size)
        first = (head * group + row % group) * size
        write_inputs(
            kind, attended, first, buffers.heads, buffers.heads_scales, start + row // group,
            length, model, buffers,
        )  # fmt: skip


@njit(**INLINE)
def _attention_phase(
    counters: int, phase: int, kind: Any, cache_kind: Any, layer: int, num_tiles: int,
    upcoming: int, model: Any, buffers: Any, member: Any,
) -> None:  # fmt: skip
    """A chunk is a query tile and a K/V head."""
    num_chunks = num_tiles * model.num_kv_heads
    chunk = claim(counters, phase)
    while chunk < num_chunks:
        # From the last on: the longest contexts of a prompt first, so that the end comes at once.
        tile = num_tiles - 1 - chunk // model.num_kv_heads
        head = chunk % model.num_kv_heads
        count = int32s(buffers.tile_sizes, tile + 1)[tile]
        start = int32s(buffers.tile_starts, tile + 1)[tile]
        num_rows = count * model.heads_per_group
        for first in range(0, int32s(buffers.positions, start + 1)[start] + count, PART):
            result = member.result if first == 0 else member.newest
            _one_part(cache_kind, layer, tile, head, first, result, model, buffers, member)
            if first > 0:
                merge(member.result, result, num_rows, model.head_dim, model.scale)
        _write_heads(kind, tile, head, member.result, model, buffers)
        finish(counters, phase)
        chunk = claim(counters, phase)
    wait_fetching(counters, phase, num_chunks, upcoming)


@njit(**INLINE)
def _shared_attention_phases(
    counters: int, phase: int, kind: Any, cache_kind: Any, layer: int, num_tiles: int,
    num_parts: int, model: Any, buffers: Any, member: Any,
) -> None:  # fmt: skip
    """The same for a few decodes with long contexts: a chunk is a part; then they are merged."""
    num_units = num_tiles * model.num_kv_heads
    positions = int32s(buffers.positions, num_tiles)  # a tile is a position
    unit_bytes = buffers.max_parts * buffers.part_bytes
    chunk = claim(counters, phase)
    while chunk < num_units * num_parts:
        unit, part = chunk // num_parts, chunk % num_parts
        tile, head = unit // model.num_kv_heads, unit % model.num_kv_heads
        if part * PART <= positions[tile]:
            result = buffers.parts + unit * unit_bytes + part * buffers.part_bytes
            _one_part(cache_kind, layer, tile, head, part * PART, result, model, buffers, member)
        finish(counters, phase)
        chunk = claim(counters, phase)
    wait_for(counters, phase, num_units * num_parts)
    unit = claim(counters, phase + 1)
    while unit < num_units:
        tile, head = unit // model.num_kv_heads, unit % model.num_kv_heads
        result = buffers.parts + unit * unit_bytes
        for part in range(1, positions[tile] // PART + 1):
            later = result + part * buffers.part_bytes
            merge(result, later, model.heads_per_group, model.head_dim, model.scale)
        _write_heads(kind, tile, head, result, model, buffers)
        finish(counters, phase + 1)
        unit = claim(counters, phase + 1)
    wait_for(counters, phase + 1, num_units)


@njit(**INLINE)
def _gate_phase(
    counters: int, phase: int, kind: Any, layer: int, num_inputs: int, upcoming: int, model: Any,
    buffers: Any, member: Any,
) -> None:  # fmt: skip
    rows = chunk_rows(num_inputs)
    num_chunks = -(-num_inputs // rows)
    chunk = claim(counters, phase)
    while chunk < num_chunks:
        for m in range(chunk * rows, min((chunk + 1) * rows, num_inputs)):
            gate(kind, layer, m, model, buffers, member)
        finish(counters, phase)
        chunk = claim(counters, phase)
    wait_fetching(counters, phase, num_chunks, upcoming)


@njit(**INLINE)
def _layer_phases(
    counters: int, phase: int, kind: Any, cache_kind: Any, layer: int, num_inputs: int,
    num_tiles: int, num_parts: int, model: Any, buffers: Any, member: Any,
) -> None:  # fmt: skip
    """One decoder layer."""
    size, inner_size = model.hidden_size, model.inner_size
    kv_size = model.num_kv_heads * model.head_dim
    heads_size = kv_size * model.heads_per_group
    panels = int64s(model.panels + 32 * layer, 4)
    # Adds what the layer before left; the first layer has none before it.
    _norm_phase(
        counters, phase, kind, num_inputs, layer > 0, model.down_bias, layer - 1,
        model.input_norms, layer, panels[QKV], model, buffers, member,
    )  # fmt: skip
    _linear_phase(
        counters, phase + 1, kind, panels[QKV], model.qkv_stride, heads_size + 2 * kv_size, size,
        buffers.normed, buffers.normed_scales, num_inputs, buffers.qkv,
        4 * (heads_size + 2 * kv_size + FLOAT_PADDING), model, buffers,
    )  # fmt: skip
    _heads_phase(counters, phase + 2, cache_kind, layer, num_inputs, panels[OUTPUT], model, buffers)
    if num_parts > 0:
        _shared_attention_phases(
            counters, phase + 3, kind, cache_kind, layer, num_tiles, num_parts, model, buffers,
            member,
        )  # fmt: skip
    else:
        _attention_phase(
            counters, phase + 3, kind, cache_kind, layer, num_tiles, panels[OUTPUT], model, buffers,
            member,
        )  # fmt: skip
    _linear_phase(
        counters, phase + 5, kind, panels[OUTPUT], model.output_stride, size, heads_size,
        buffers.heads, buffers.heads_scales, num_inputs, buffers.change,
        4 * (size + FLOAT_PADDING), model, buffers,
    )  # fmt: skip
    _norm_phase(
        counters, phase + 6, kind, num_inputs, True, model.output_bias, layer, model.post_norms,
        layer, panels[GATE_UP], model, buffers, member,
    )  # fmt: skip
    _linear_phase(
        counters, phase + 7, kind, panels[GATE_UP], model.gate_up_stride, 2 * inner_size, size,
        buffers.normed, buffers.normed_scales, num_inputs, buffers.gate_up,
        4 * (2 * inner_size + FLOAT_PADDING), model, buffers,
    )  # fmt: skip
    _gate_phase(counters, phase + 8, kind, layer, num_inputs, panels[DOWN], model, buffers, member)
    _linear_phase(
        counters, phase + 9, kind, panels[DOWN], model.down_stride, size, inner_size,
        buffers.inner, buffers.inner_scales, num_inputs, buffers.change,
        4 * (size + FLOAT_PADDING), model, buffers,
    )  # fmt: skip


@njit(**INLINE)
def _logits_phases(
    counters: int, phase: int, kind: Any, num_logits: int, model: Any, buffers: Any, member: Any
) -> None:
    """The final norm and the output projection, of the wanted rows only."""
    wanted = int32s(buffers.logits_of, num_logits)
    r = claim(counters, phase)
    while r < num_logits:
        add_and_norm(
            kind, wanted[r], True, model.down_bias, model.num_layers - 1, model.final_norm, 0, r,
            model, buffers, member,
        )  # fmt: skip
        finish(counters, phase)
        r = claim(counters, phase)
    wait_for(counters, phase, num_logits)
    _linear_phase(
        counters, phase + 1, kind, model.lm_head, model.lm_head_stride, model.logits_width,
        model.hidden_size, buffers.normed, buffers.normed_scales, num_logits, buffers.logits,
        4 * model.logits_width, model, buffers,
    )  # fmt: skip


@njit(**INLINE)
def _best_phases(counters: int, phase: int, num_logits: int, model: Any, buffers: Any) -> None:
    """The first of the largest logits of each row, while they are in the cache."""
    num_parts = -(-model.vocab_size // BEST_PART)
    chunk = claim(counters, phase)
    while chunk < num_logits * num_parts:
        row, part = chunk // num_parts, chunk % num_parts
        first = part * BEST_PART
        best_of_part(
            buffers.logits + 4 * (row * model.logits_width + first),
            min(BEST_PART, model.vocab_size - first), first, chunk, buffers,
        )  # fmt: skip
        finish(counters, phase)
        chunk = claim(counters, phase)
    wait_for(counters, phase, num_logits * num_parts)
    row = claim(counters, phase + 1)
    while row < num_logits:
        best_of_row(row, num_parts, buffers)
        finish(counters, phase + 1)
        row = claim(counters, phase + 1)
    wait_for(counters, phase + 1, num_logits)


@njit(**INLINE)
def forward_job(
    counters: int, kind: Any, cache_kind: Any, num_inputs: int, num_logits: int, num_tiles: int,
    num_parts: int, model: Any, buffers: Any, member: Any,
) -> None:  # fmt: skip
    """Compute `T = num_inputs` positions, and the logits of `R` of them, as one member.

    The positions are `num_tiles` query tiles. With `num_parts` not 0 the tiles are of one position
    each, none has more parts of context, and threads share these. With no positions this gives the
    logits of others of the job before, from what that left. The kinds are numbers of the
    types of the weights and of the cache. See `buffers` for the records.
    """
    _start_phase(counters, kind, num_inputs, model, buffers)
    phase = 1
    for layer in range(model.num_layers):
        _layer_phases(
            counters, phase, kind, cache_kind, layer, num_inputs, num_tiles, num_parts, model,
            buffers, member,
        )  # fmt: skip
        phase += PHASES_PER_LAYER
    if num_logits > 0:  # or else only prompts that were cut short, of which nothing is drawn
        _logits_phases(counters, phase, kind, num_logits, model, buffers, member)
        if num_inputs > 0:  # or else they are asked for to be looked at, not to choose from
            _best_phases(counters, phase + 2, num_logits, model, buffers)
