"""`NativeProgram`: a model's step as one native job, over buffers that never move."""

import numpy as np
import numpy.typing as npt
import torch

from nanovllm.core import Batch
from nanovllm.model.config import ModelConfig
from nanovllm.model.decoder import Decoder
from nanovllm.runtime.native.attention import HEAD_DIM_MULTIPLE, PART, TILE_POSITIONS
from nanovllm.runtime.native.memory import StepMemory, model_record
from nanovllm.runtime.native.panels import LENGTH_MULTIPLE, kind_number
from nanovllm.runtime.native.team import Team


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

        `decoder` is in panels (see `loading.load_in_panels`), which are read where they are.
        """
        self._decoder = decoder  # keeps alive what is read by address, as do the next two
        self._model, self._arrays = model_record(decoder)
        self._memory = StepMemory(
            decoder,
            kv_cache,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            num_threads=num_threads,
        )
        self._rows = np.arange(max_num_seqs, dtype=np.int32)
        self._block_size = block_size
        self._vocab_size = decoder.config.vocab_size
        self._team = Team(
            (self._memory.kind, kind_number(kv_cache.dtype)),
            self._model,
            self._memory.buffers,
            self._memory.members,
            num_layers=decoder.config.num_layers,
        )
        self._memory.tile_sizes[0] = 1
        self._team.forward(1, 1, 1, 0)  # one position that writes its K/V to block 0

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits of `batch.logits_indices`, `[R, V]` float32; valid until the next call."""
        memory = self._memory
        num_tokens, num_logits = batch.num_tokens, len(batch.logits_indices)
        num_seqs, width = batch.block_tables.shape
        memory.ids[:num_tokens] = batch.input_ids
        memory.positions[:num_tokens] = batch.positions
        np.divmod(
            batch.slot_mapping,
            self._block_size,
            out=(memory.blocks[:num_tokens], memory.offsets[:num_tokens]),
        )
        memory.tables[:num_seqs, :width] = batch.block_tables
        memory.logits_of[:num_logits] = batch.logits_indices
        num_tiles, num_parts = self._find_tiles(batch), 0
        if num_tiles == num_tokens and num_tiles <= memory.num_shared_tiles:
            num_parts = -(-int(batch.context_lens.max()) // PART)
        # With one part there is nothing to share.
        self._team.forward(num_tokens, num_logits, num_tiles, num_parts if num_parts > 1 else 0)
        return torch.from_numpy(memory.logits[:num_logits, : self._vocab_size])

    def best(self, num_rows: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """The first of the largest logits of the first rows of the last `run`: see `ranking.best`.

        Returns:
            `[R]` int32 ids and `[R]` float32 logits; valid until the next call.
        """
        return self._memory.best_ids[:num_rows], self._memory.best_peaks[:num_rows]

    @property
    def max_num_logits(self) -> int:
        """Positions that one call gives the logits of."""
        return min(len(self._memory.logits_of), len(self._memory.ids))

    def more_logits(self, indices: npt.NDArray[np.int32]) -> torch.Tensor:
        """Logits of other positions of the batch that ran last.

        Args:
            indices: `[N]` int32, at most `max_num_logits` packed positions. None of them was among
                `batch.logits_indices` or given here before: the job changes a position's hidden
                state in place.

        Returns:
            `[N, V]` float32; valid until the next call.
        """
        assert len(indices) <= self.max_num_logits, (len(indices), self.max_num_logits)
        self._memory.logits_of[: len(indices)] = indices
        # A job of no positions: their layers were computed, and what they left is still there.
        self._team.forward(0, len(indices), 0, 0)
        return torch.from_numpy(self._memory.logits[: len(indices), : self._vocab_size])

    def close(self) -> None:
        """End the helper threads; may be called twice."""
        self._team.close()

    def _find_tiles(self, batch: Batch) -> int:
        """Cut each sequence's positions into query tiles; returns how many there are."""
        memory, num_seqs = self._memory, batch.num_seqs
        if batch.num_decodes == num_seqs:  # a position each
            memory.tile_rows[:num_seqs] = memory.tile_starts[:num_seqs] = self._rows[:num_seqs]
            memory.tile_sizes[:num_seqs] = 1
            return num_seqs
        lengths = np.diff(batch.cu_seqlens_q)
        num_tiles_of = -(-lengths // TILE_POSITIONS)
        num_tiles = int(num_tiles_of.sum())
        rows = np.repeat(np.arange(num_seqs), num_tiles_of)
        first_tiles = num_tiles_of.cumsum() - num_tiles_of
        offsets = (np.arange(num_tiles) - first_tiles[rows]) * TILE_POSITIONS
        memory.tile_rows[:num_tiles] = rows
        memory.tile_starts[:num_tiles] = batch.cu_seqlens_q[rows] + offsets
        memory.tile_sizes[:num_tiles] = np.minimum(lengths[rows] - offsets, TILE_POSITIONS)
        return num_tiles


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
