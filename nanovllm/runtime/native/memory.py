"""The memory of a step: every array that a record of `buffers` gives the address of."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import typeof

from nanovllm.model.decoder import Decoder
from nanovllm.model.linear import Linear
from nanovllm.runtime.kv_cache import lazy_zeros
from nanovllm.runtime.native.attention import PART, TILE_POSITIONS, result_bytes
from nanovllm.runtime.native.best import BEST_PART
from nanovllm.runtime.native.buffers import BUFFERS, FLOAT_PADDING, MEMBER, MODEL, make_record
from nanovllm.runtime.native.kinds import kind_of
from nanovllm.runtime.native.matmul import padded_rows
from nanovllm.runtime.native.pages import GROUP
from nanovllm.runtime.native.panels import PANEL_ROWS, PanelLinear, as_numpy, kind_number
from nanovllm.runtime.native.tiles import GROUPS_AHEAD

ROW_PADDING = 32
"""Values behind each row of inputs: rows of a power of two would share the same few cache lines."""

MAX_SHARED_UNITS = 16
"""Query tiles times K/V heads up to which threads share the parts of long contexts."""

Array = npt.NDArray[Any]


def model_record(decoder: Decoder) -> tuple[Any, list[Array]]:
    """The record `MODEL` of a decoder in panels, and the arrays that have to outlive it."""
    config, layers = decoder.config, decoder.layers
    lm_head = panel_linear(decoder.lm_head)
    matrices: dict[str, list[Linear]] = {
        "qkv": [layer.qkv for layer in layers],
        "output": [layer.output for layer in layers],
        "gate_up": [layer.gate_up for layer in layers],
        "down": [layer.down for layer in layers],
    }
    addresses = [[one.weight.data_ptr() for one in column] for column in matrices.values()]
    arrays = {
        "panels": np.ascontiguousarray(np.array(addresses, np.int64).T),
        "input_norms": _stack([layer.input_norm for layer in layers]),
        "post_norms": _stack([layer.post_norm for layer in layers]),
        "query_norms": _stack([layer.query_norm for layer in layers]),
        "key_norms": _stack([layer.key_norm for layer in layers]),
        "final_norm": _stack([decoder.final_norm]),
        "frequencies": decoder.frequencies.float().numpy(),
    }
    for name, column in matrices.items():
        arrays[f"{name}_bias"] = _stack([one.bias for one in column])
    present = {name: array for name, array in arrays.items() if array is not None}
    record = make_record(
        MODEL,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        inner_size=config.intermediate_size,
        num_kv_heads=config.num_kv_heads,
        heads_per_group=config.num_heads // config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        logits_width=len(lm_head.weight) * PANEL_ROWS,
        int8_group=lm_head.group,
        embedding=decoder.embedding.data_ptr(),
        lm_head=lm_head.weight.data_ptr(),
        lm_head_stride=lm_head.weight.shape[1],
        **{f"{name}_stride": column[0].weight.shape[1] for name, column in matrices.items()},
        attention_factor=config.rope.attention_factor,
        eps=config.rms_norm_eps,
        scale=config.head_dim**-0.5,
        **present,
    )
    return record, list(present.values())


class StepMemory:
    """Allocated once and zeroed, which takes no memory before it is written.

    Attributes:
        kind: A number of the type of the weights.
        buffers: The record `BUFFERS`.
        members: A record `MEMBER` for each thread.
        num_shared_tiles: Most query tiles whose contexts threads can share.
        ids: `[T]` int32; for this and what follows see `BUFFERS`.
        positions: `[T]`.
        blocks: `[T]`.
        offsets: `[T]`.
        tables: `[S, W]`.
        logits_of: `[R]`.
        tile_starts: `[tiles]`.
        tile_sizes: `[tiles]`.
        tile_rows: `[tiles]`.
        logits: `[R, V and padding]` float32.
        best_peaks: `[R]` float32.
        best_ids: `[R]` int32.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: torch.Tensor,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_tokens: int,
        max_model_len: int,
        num_threads: int,
    ) -> None:
        config, lm_head = decoder.config, panel_linear(decoder.lm_head)
        self.kind = kind_number(lm_head.dtype)
        self._input_dtype = kind_of(typeof(self.kind)).input_dtype
        cache_kind = kind_number(kv_cache.dtype)
        cache_input_dtype = kind_of(typeof(cache_kind)).input_dtype
        heads_per_group = config.num_heads // config.num_kv_heads
        heads_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self._num_rows = padded_rows(max_num_tokens)
        self._group = lm_head.group
        self._arrays: list[Array] = [as_numpy(kv_cache)]

        self.ids = self._int32(max_num_tokens)
        self.positions = self._int32(max_num_tokens)
        self.blocks = self._int32(max_num_tokens)
        self.offsets = self._int32(max_num_tokens)
        self.tables = self._int32(max_num_seqs, -(-max_model_len // block_size))
        self.logits_of = self._int32(max_num_seqs)
        self.tile_starts = self._int32(max_num_tokens)
        self.tile_sizes = self._int32(max_num_tokens)
        self.tile_rows = self._int32(max_num_tokens)
        self.logits = self._floats(padded_rows(max_num_seqs), len(lm_head.weight) * PANEL_ROWS)
        self.best_peaks, self.best_ids = self._floats(max_num_seqs), self._int32(max_num_seqs)
        best_parts = (max_num_seqs, -(-config.vocab_size // BEST_PART))
        self.num_shared_tiles = min(MAX_SHARED_UNITS // config.num_kv_heads, max_num_seqs)
        max_parts = -(-max_model_len // PART)
        part_bytes = result_bytes(padded_rows(heads_per_group), config.head_dim)
        # A tile is read up to the padding of its rows, which at the end is past the last position.
        query_rows = self._num_rows + TILE_POSITIONS
        self.buffers = make_record(
            BUFFERS,
            cache=self._arrays[0],
            cache_width=kv_cache[0, 0].numel(),
            block_size=block_size,
            ids=self.ids,
            positions=self.positions,
            blocks=self.blocks,
            offsets=self.offsets,
            tables=self.tables,
            table_width=self.tables.shape[1],
            logits_of=self.logits_of,
            tile_starts=self.tile_starts,
            tile_sizes=self.tile_sizes,
            tile_rows=self.tile_rows,
            hidden=self._floats(self._num_rows, config.hidden_size + FLOAT_PADDING),
            change=self._floats(self._num_rows, config.hidden_size + FLOAT_PADDING),
            qkv=self._floats(self._num_rows, heads_size + 2 * kv_size + FLOAT_PADDING),
            gate_up=self._floats(self._num_rows, 2 * config.intermediate_size + FLOAT_PADDING),
            cos=self._floats(self._num_rows, config.head_dim // 2),
            sin=self._floats(self._num_rows, config.head_dim // 2),
            logits=self.logits,
            normed=self._rows(config.hidden_size),
            heads=self._rows(heads_size),
            inner=self._rows(config.intermediate_size),
            row_padding=ROW_PADDING * self._input_dtype.itemsize,
            normed_scales=self._scales(config.hidden_size),
            heads_scales=self._scales(heads_size),
            inner_scales=self._scales(config.intermediate_size),
            queries=self._zeros(cache_input_dtype, query_rows, heads_size),
            query_rows=query_rows,
            parts=self._zeros(
                np.uint8, self.num_shared_tiles * config.num_kv_heads, max_parts, part_bytes
            ),
            max_parts=max_parts,
            part_bytes=part_bytes,
            best_peaks=self.best_peaks,
            best_ids=self.best_ids,
            part_peaks=self._floats(*best_parts),
            part_ids=self._int32(*best_parts),
        )
        tile_rows = padded_rows(TILE_POSITIONS * heads_per_group)
        result = result_bytes(tile_rows, config.head_dim)
        self.members = [
            make_record(
                MEMBER,
                scores=self._floats(tile_rows, PART),
                weights=self._zeros(cache_input_dtype, tile_rows, PART),
                gathered=self._zeros(cache_kind.dtype, 2, PART * config.head_dim),
                key_groups=self._zeros(np.int64, PART // GROUP),
                value_groups=self._zeros(np.int64, PART // GROUP + GROUPS_AHEAD),
                row=self._floats(max(config.hidden_size, config.intermediate_size)),
                result=self._zeros(np.uint8, result),
                newest=self._zeros(np.uint8, result),
            )
            for _ in range(num_threads)
        ]

    def _zeros(self, dtype: Any, *shape: int) -> Array:
        array: Array = lazy_zeros(shape, dtype)
        self._arrays.append(array)
        return array

    def _floats(self, *shape: int) -> npt.NDArray[np.float32]:
        return self._zeros(np.float32, *shape)

    def _int32(self, *shape: int) -> npt.NDArray[np.int32]:
        return self._zeros(np.int32, *shape)

    def _rows(self, length: int) -> Array:
        """Rows of what a linear layer reads."""
        return self._zeros(self._input_dtype, self._num_rows, length + ROW_PADDING)

    def _scales(self, length: int) -> Array:
        """Their scales, with int8."""
        return self._floats(self._num_rows, length // self._group if self._group else 0)


def panel_linear(linear: Linear) -> PanelLinear:
    """The same, checked: a native step reads panels."""
    assert isinstance(linear, PanelLinear), type(linear)
    return linear


def _stack(tensors: list[torch.Tensor | None]) -> npt.NDArray[np.float32] | None:
    """One float32 row a layer; None where the family has none."""
    rows = [tensor.float().numpy() for tensor in tensors if tensor is not None]
    assert len(rows) in (0, len(tensors))
    return np.stack(rows) if rows else None
