"""`DecodeProgram`: the native decode step of one model, over buffers that never move."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nanovllm.core import Batch
from nanovllm.model.decoder import Decoder
from nanovllm.runtime.native.linear import NativeLinear
from nanovllm.runtime.native.matmul import padded_rows
from nanovllm.runtime.native.team import Team
from nanovllm.runtime.native.tiles import INPUTS_ARE_BF16


class DecodeProgram:
    """Runs batches in which every row decodes. All buffers are allocated once."""

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: torch.Tensor,
        team: Team,
        *,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        """Set up the buffers, compile or load the code from the disk cache, start the team."""
        self._decoder = decoder  # keeps the weights alive that are read by address
        self._team = team
        config = decoder.config
        is_bf16 = decoder.embedding.dtype == torch.bfloat16
        layers = decoder.layers
        linears = [(layer.qkv, layer.output, layer.gate_up, layer.down) for layer in layers]
        addresses = [[_native(linear).weight.data_ptr() for linear in row] for row in linears]
        rows = padded_rows(max_num_seqs)
        heads_shape = (config.num_heads, config.head_dim)
        input_dtype = np.uint16 if is_bf16 and INPUTS_ARE_BF16 else np.float32
        group = padded_rows(config.num_heads // config.num_kv_heads)

        def floats(*shape: int) -> npt.NDArray[np.float32]:
            return np.zeros(shape, np.float32)

        def inputs(*shape: int) -> npt.NDArray[Any]:
            return np.zeros(shape, input_dtype)

        self._input_ids = np.zeros(max_num_seqs, np.int32)
        self._positions = np.zeros(max_num_seqs, np.int32)
        self._slots = np.zeros(max_num_seqs, np.int32)
        self._block_tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), np.int32)
        self._logits = floats(rows, config.vocab_size)
        team.start(
            (
                np.array(addresses, np.int64),
                is_bf16,
                _native(decoder.lm_head).weight.data_ptr(),
                _as_numpy(decoder.embedding),
                _stack([layer.input_norm for layer in layers]),
                _stack([layer.post_norm for layer in layers]),
                _stack([layer.query_norm for layer in layers]),
                _stack([layer.key_norm for layer in layers]),
                decoder.final_norm.float().numpy(),
                *(_stack([_native(row[place]).bias for row in linears]) for place in range(4)),
                decoder.frequencies.float().numpy(),
                np.float32(config.rope.attention_factor),
                np.float32(config.rms_norm_eps),
                np.float32(config.head_dim**-0.5),
                _as_numpy(kv_cache),
                block_size,
                self._input_ids,
                self._positions,
                self._slots,
                self._block_tables,
                floats(rows, config.hidden_size),  # hidden
                inputs(rows, config.hidden_size),  # normed
                inputs(rows + 1, *heads_shape),  # queries; +1: the last group's padding reads on
                floats(rows, *heads_shape),  # attended
                inputs(rows, *heads_shape),  # heads
                inputs(rows, config.intermediate_size),  # inner
                floats(rows, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim),  # qkv
                floats(rows, 2 * config.intermediate_size),  # gate_up
                floats(rows, config.hidden_size),  # change
                floats(rows, config.head_dim // 2),  # cos
                floats(rows, config.head_dim // 2),  # sin
                floats(team.num_threads, group, max_model_len),  # scores
                self._logits,
            )
        )
        team.decode(1)  # compiles; one row that writes its K/V to slot 0

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits of a batch of decodes, `[S, V]` float32; valid until the next call."""
        num_seqs, width = batch.block_tables.shape
        self._input_ids[:num_seqs] = batch.input_ids
        self._positions[:num_seqs] = batch.positions
        self._slots[:num_seqs] = batch.slot_mapping
        self._block_tables[:num_seqs, :width] = batch.block_tables
        self._team.decode(num_seqs)
        return torch.from_numpy(self._logits[:num_seqs])


def _native(linear: Any) -> NativeLinear:
    assert isinstance(linear, NativeLinear), type(linear)
    return linear


def _as_numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The same memory as numpy sees it; bfloat16 as uint16, which numpy has."""
    array: npt.NDArray[Any] = (
        tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    ).numpy()
    return array


def _stack(tensors: list[torch.Tensor | None]) -> npt.NDArray[np.float32]:
    """One float32 row a layer; of width 0 where the family has none."""
    rows = [np.zeros(0, np.float32) if t is None else t.float().numpy() for t in tensors]
    return np.stack(rows)
