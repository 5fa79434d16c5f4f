"""The flat form of a plan. `fake_engine` checks every batch it sees; here are the exact figures."""

import numpy as np

from nanovllm.core import (
    EngineState,
    SchedulerLimits,
    Sequence,
    admit,
    build_batch,
    postprocess,
    schedule,
)
from nanovllm.core.batch import NO_BLOCK
from nanovllm.sampling_params import SamplingParams

LIMITS = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=9, max_model_len=100)


def two_steps():
    """Plans of a prefill step of [10, 11, 12] and of the step in which [20 .. 29] joins it."""
    state = admit(
        EngineState.create(8, 4),
        Sequence.create(0, [10, 11, 12], SamplingParams(max_tokens=9)),
        LIMITS,
    )
    state, first = schedule(state, LIMITS)
    state, _ = postprocess(state, first, [13])
    state = admit(state, Sequence.create(1, range(20, 30), SamplingParams(max_tokens=9)), LIMITS)
    state, second = schedule(state, LIMITS)
    return first, second, state


def lists(batch):
    return {
        name: getattr(batch, name).tolist()
        for name in (
            "input_ids",
            "positions",
            "slot_mapping",
            "context_lens",
            "block_tables",
            "cu_seqlens_q",
            "cu_seqlens_k",
            "sampled_rows",
            "logits_indices",
        )
    }


def test_packs_a_prefill():
    first, _, _ = two_steps()
    batch = build_batch(first)

    assert (batch.num_seqs, batch.num_tokens, batch.num_decodes, batch.max_seqlen_q) == (1, 3, 0, 3)
    assert lists(batch) == {
        "input_ids": [10, 11, 12],
        "positions": [0, 1, 2],
        "slot_mapping": [0, 1, 2],
        "context_lens": [3],
        "block_tables": [[0]],
        "cu_seqlens_q": [0, 3],
        "cu_seqlens_k": [0, 3],
        "sampled_rows": [0],
        "logits_indices": [2],
    }


def test_packs_a_decode_before_a_chunk_and_samples_only_the_decode():
    _, second, _ = two_steps()
    batch = build_batch(second)

    assert (batch.num_seqs, batch.num_tokens, batch.num_decodes, batch.max_seqlen_q) == (2, 9, 1, 8)
    assert lists(batch) == {
        "input_ids": [13, *range(20, 28)],
        "positions": [3, *range(8)],
        "slot_mapping": [3, *range(4, 12)],
        "context_lens": [4, 8],
        "block_tables": [[0, NO_BLOCK, NO_BLOCK], [1, 2, 3]],
        "cu_seqlens_q": [0, 1, 9],
        "cu_seqlens_k": [0, 4, 12],
        "sampled_rows": [0],
        "logits_indices": [0],
    }


def test_packs_decodes_in_columns():
    _, second, state = two_steps()
    state, _ = postprocess(state, second, [14, 0])
    state, third = schedule(state, LIMITS)
    state, _ = postprocess(state, third, [15, 30])
    _, fourth = schedule(state, LIMITS)
    batch = build_batch(fourth)

    assert batch.num_decodes == batch.num_seqs == 2 and batch.max_seqlen_q == 1
    assert lists(batch) == {
        "input_ids": [15, 30],
        "positions": [5, 10],
        "slot_mapping": [17, 14],
        "context_lens": [6, 11],
        "block_tables": [[0, 4, NO_BLOCK], [1, 2, 3]],
        "cu_seqlens_q": [0, 1, 2],
        "cu_seqlens_k": [0, 6, 17],
        "sampled_rows": [0, 1],
        "logits_indices": [0, 1],
    }


def test_every_array_is_int32_and_equal_plans_give_equal_batches():
    first, second, _ = two_steps()
    batch = build_batch(second)

    assert batch == build_batch(second) != build_batch(first)
    assert batch != "a batch"
    for name in lists(batch):
        assert getattr(batch, name).dtype == np.int32, name
