"""From a `Batch` of host integers to the tensors that the decoder reads."""

import numpy as np
import torch

from nanovllm.core import Batch
from nanovllm.core.batch import Int32Array
from nanovllm.model.attention import AttentionMetadata, PrefillRow


def to_device(values: Int32Array, device: torch.device) -> torch.Tensor:
    """An int64 tensor of host integers: torch indexes with nothing smaller."""
    return torch.from_numpy(values.astype(np.int64)).to(device)


def attention_metadata(batch: Batch, block_size: int, device: torch.device) -> AttentionMetadata:
    """Look up, once for all layers, the slots that each sequence's keys and values lie in."""
    num_decodes = batch.num_decodes
    lens = batch.context_lens[:num_decodes]
    width = int(lens.max()) if num_decodes else 0
    slots = _slots(batch.block_tables[:num_decodes], width, block_size)
    hidden = np.arange(width) >= lens[:, None]
    slots = np.where(hidden, slots[:, :1], slots)
    prefills = [
        _prefill_row(batch, row, block_size, device) for row in range(num_decodes, batch.num_seqs)
    ]
    return AttentionMetadata(
        slot_mapping=to_device(batch.slot_mapping, device),
        num_decodes=num_decodes,
        decode_slots=to_device(slots, device),
        decode_mask=torch.from_numpy(~hidden)[:, None, None, :].to(device),
        prefills=tuple(prefills),
    )


def _prefill_row(batch: Batch, row: int, block_size: int, device: torch.device) -> PrefillRow:
    first, end = int(batch.cu_seqlens_q[row]), int(batch.cu_seqlens_q[row + 1])
    num_context = int(batch.context_lens[row])
    num_cached = num_context - (end - first)
    if num_cached == 0:
        return PrefillRow(first, end, slots=None, mask=None)
    slots = _slots(batch.block_tables[row : row + 1], num_context, block_size)[0]
    # Computed position i stands at num_cached + i, and attends to itself and all before it.
    reach = np.arange(num_cached, num_context)[:, None] >= np.arange(num_context)
    return PrefillRow(first, end, to_device(slots, device), torch.from_numpy(reach).to(device))


def _slots(block_tables: Int32Array, num_positions: int, block_size: int) -> Int32Array:
    """Slot of each of the first positions of each row: `[rows, num_positions]`.

    Rows shorter than that get slots of blocks that they do not have; the caller hides them.
    """
    positions = np.arange(num_positions, dtype=np.int32)
    return block_tables[:, positions // block_size] * block_size + positions % block_size
