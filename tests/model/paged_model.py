"""Runs a decoder on one sequence over scattered blocks, in any division into steps."""

import numpy as np
import torch

from nanovllm.core import Batch
from nanovllm.model.config import read_model_config
from nanovllm.model.safetensors_checkpoint import open_folder
from nanovllm.model.weights import load_decoder
from nanovllm.runtime.inputs import attention_metadata, to_device
from nanovllm.runtime.kv_cache import allocate_kv_cache
from tests.checkpoints import checkpoint_folder

CPU = torch.device("cpu")
BLOCK_SIZE = 4
NUM_BLOCKS = 64


def load(name, dtype=torch.float32, **options):
    checkpoint = open_folder(checkpoint_folder(name))
    config = read_model_config(checkpoint.config, source=checkpoint.source)
    return load_decoder(checkpoint, config, dtype=dtype, device=CPU, **options)


def kv_cache(decoder, dtype=torch.float32):
    """A cache of NaN: whatever is read before it is written shows."""
    cache = allocate_kv_cache(
        decoder.config, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=dtype, device=CPU
    )
    return cache.fill_(float("nan"))


def make_batch(rows):
    """A batch of (tokens, positions computed before, block ids), decodes first."""
    tokens = [token for row, start, _ in rows for token in row[start:]]
    positions = [position for row, start, _ in rows for position in range(start, len(row))]
    slots = [
        blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for row, start, blocks in rows
        for position in range(start, len(row))
    ]
    width = max(len(blocks) for _, _, blocks in rows)
    cu_seqlens_q = np.cumsum([0, *(len(row) - start for row, start, _ in rows)], dtype=np.int32)

    def int32(values):
        return np.array(values, dtype=np.int32)

    num_decodes = 0
    for row, start, _ in rows:
        if start == 0 or len(row) - start != 1:
            break
        num_decodes += 1
    return Batch(
        num_decodes=num_decodes,
        input_ids=int32(tokens),
        positions=int32(positions),
        slot_mapping=int32(slots),
        context_lens=int32([len(row) for row, _, _ in rows]),
        block_tables=int32([[*blocks, *[-1] * (width - len(blocks))] for _, _, blocks in rows]),
        cu_seqlens_q=cu_seqlens_q,
        sampled_rows=int32(range(len(rows))),
        logits_indices=cu_seqlens_q[1:] - 1,
        max_seqlen_q=int(np.diff(cu_seqlens_q).max()),
    )


def run(decoder, cache, batch):
    """Logits of every computed position, `[T, V]`."""
    with torch.inference_mode():
        hidden = decoder.forward(
            to_device(batch.input_ids, CPU),
            to_device(batch.positions, CPU),
            cache,
            attention_metadata(batch, BLOCK_SIZE, CPU),
        )
        return decoder.logits(hidden)


def logits_in_steps(decoder, tokens, ends, blocks, dtype=torch.float32):
    """Logits of all positions, computed in steps that end at the given positions."""
    cache = kv_cache(decoder, dtype)
    starts = [0, *ends[:-1]]
    parts = [
        run(decoder, cache, make_batch([(tokens[:end], start, blocks)]))
        for start, end in zip(starts, ends, strict=True)
    ]
    return torch.cat(parts)
