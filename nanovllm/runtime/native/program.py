"""`NativeProgram`: a model's step as one native job, over buffers that never move."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nanovllm.core import Batch
from nanovllm.core.batch import Int32Array
from nanovllm.model.config import ModelConfig
from nanovllm.model.decoder import Decoder
from nanovllm.model.linear import Linear, PlainLinear
from nanovllm.runtime.native.attention import HEAD_DIM_MULTIPLE
from nanovllm.runtime.native.matmul import LENGTH_MULTIPLE, padded_rows
from nanovllm.runtime.native.team import Team
from nanovllm.runtime.native.tiles import INPUTS_ARE_BF16


class NativeProgram:
    """Runs batches of any kind. All buffers are allocated once, and take memory when first used."""

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: torch.Tensor,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_threads: int,
    ) -> None:
        """Set up the buffers, and compile the code or load it from the disk cache.

        `decoder` has plain linear layers; their weights are read where they are.
        """
        self._decoder = decoder  # keeps the weights alive that are read by address
        config, layers = decoder.config, decoder.layers
        is_bf16 = decoder.embedding.dtype == torch.bfloat16
        linears = [
            [_plain(linear) for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
            for layer in layers
        ]
        rows = padded_rows(max_num_batched_tokens)
        heads_shape = (config.num_heads, config.head_dim)
        group = config.num_heads // config.num_kv_heads
        input_dtype = np.uint16 if is_bf16 and INPUTS_ARE_BF16 else np.float32

        def floats(*shape: int) -> npt.NDArray[np.float32]:
            return np.zeros(shape, np.float32)

        def inputs(*shape: int) -> npt.NDArray[Any]:
            return np.zeros(shape, input_dtype)

        self._input_ids = np.zeros(max_num_batched_tokens, np.int32)
        self._positions = np.zeros(max_num_batched_tokens, np.int32)
        self._slots = np.zeros(max_num_batched_tokens, np.int32)
        self._rows = np.zeros(max_num_batched_tokens, np.int32)
        self._logits_indices = np.zeros(max_num_seqs, np.int32)
        self._block_tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), np.int32)
        self._logits = floats(padded_rows(max_num_seqs), config.vocab_size)
        arguments = (
            np.array([[one.weight.data_ptr() for one in row] for row in linears], np.int64),
            _plain(decoder.lm_head).weight.data_ptr(),
            _as_numpy(decoder.embedding),
            _stack([layer.input_norm for layer in layers]),
            _stack([layer.post_norm for layer in layers]),
            _stack([layer.query_norm for layer in layers]),
            _stack([layer.key_norm for layer in layers]),
            decoder.final_norm.float().numpy(),
            *(_stack([row[place].bias for row in linears]) for place in range(4)),
            decoder.frequencies.float().numpy(),
            np.float32(config.rope.attention_factor),
            np.float32(config.rms_norm_eps),
            np.float32(config.head_dim**-0.5),
            _as_numpy(kv_cache),
            block_size,
            self._input_ids,
            self._positions,
            self._slots,
            self._rows,
            self._block_tables,
            self._logits_indices,
            floats(rows, config.hidden_size),  # hidden
            inputs(rows, config.hidden_size),  # normed
            # Rows of a group are read up to their padding: past the last group there is one more.
            inputs(rows + 1, *heads_shape),  # queries
            floats(num_threads, group, config.head_dim),  # attended
            inputs(rows, *heads_shape),  # heads
            inputs(rows, config.intermediate_size),  # inner
            floats(rows, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim),  # qkv
            floats(rows, 2 * config.intermediate_size),  # gate_up
            floats(rows, config.hidden_size),  # change
            floats(rows, config.head_dim // 2),  # cos
            floats(rows, config.head_dim // 2),  # sin
            floats(num_threads, padded_rows(group), max_model_len),  # scores
            self._logits,
        )
        self._team = Team(
            arguments, num_threads=num_threads, num_layers=config.num_layers, is_bf16=is_bf16
        )
        self._team.forward(1, 1)  # one position that writes its K/V to slot 0

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits of `batch.logits_indices`, `[R, V]` float32; valid until the next call."""
        num_tokens, num_logits = batch.num_tokens, len(batch.logits_indices)
        num_seqs, width = batch.block_tables.shape
        self._input_ids[:num_tokens] = batch.input_ids
        self._positions[:num_tokens] = batch.positions
        self._slots[:num_tokens] = batch.slot_mapping
        self._rows[:num_tokens] = np.repeat(np.arange(num_seqs), np.diff(batch.cu_seqlens_q))
        self._block_tables[:num_seqs, :width] = batch.block_tables
        self._logits_indices[:num_logits] = batch.logits_indices
        self._team.forward(num_tokens, num_logits)
        return torch.from_numpy(self._logits[:num_logits])

    @property
    def max_num_logits(self) -> int:
        """Positions that one call gives the logits of."""
        return min(len(self._logits_indices), len(self._input_ids))

    def more_logits(self, indices: Int32Array) -> torch.Tensor:
        """Logits of other positions of the batch that ran last.

        Args:
            indices: `[N]` int32, at most `max_num_logits` packed positions. None of them was among
                `batch.logits_indices` or given here before: the job changes a position's hidden
                state in place.

        Returns:
            `[N, V]` float32; valid until the next call.
        """
        assert len(indices) <= self.max_num_logits, (len(indices), self.max_num_logits)
        self._logits_indices[: len(indices)] = indices
        self._team.forward(0, len(indices))
        return torch.from_numpy(self._logits[: len(indices)])

    def close(self) -> None:
        """End the helper threads; may be called twice."""
        self._team.close()


def native_obstacle(config: ModelConfig) -> str | None:
    """Why a model can't run natively; None if it can."""
    lengths = {
        "hidden_size": (config.hidden_size, LENGTH_MULTIPLE),
        "intermediate_size": (config.intermediate_size, LENGTH_MULTIPLE),
        "head_dim": (config.head_dim, HEAD_DIM_MULTIPLE),
    }
    for name, (length, multiple) in lengths.items():
        if length % multiple:
            return f"the model's `{name}` is {length}, no multiple of {multiple}"
    return None


def _plain(linear: Linear) -> PlainLinear:
    assert isinstance(linear, PlainLinear), type(linear)
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
