"""Engines on tiny checkpoints, and what the tests ask of them."""

import random

import pytest
import torch

from nanovllm import LLM, SamplingParams
from tests.checkpoints import VOCAB_SIZE, checkpoint_folder

SCHEDULES = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 5, "max_num_seqs": 4},
    "tiny blocks": {"kvcache_block_size": 2},
    "no prefix cache": {"enable_prefix_caching": False},
    "preempted": {"kvcache_block_size": 4, "num_kvcache_blocks": 14, "max_num_seqs": 4},
    "one at a time": {"max_num_seqs": 1},
}
"""Ways to run the same requests that must not change a token."""

ON_GPU = pytest.param(
    "triton",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    ],
)
BACKENDS = ("torch", "native", ON_GPU)
"""Of which each has its own executor."""


def tiny_llm(name="llama", **options):
    device = "cuda" if options.get("attention_backend") == "triton" else "cpu"
    given = {"device": device, "dtype": "float32", "skip_tokenizer_init": True, **options}
    given.setdefault("num_kvcache_blocks", 256)
    given.setdefault("kvcache_block_size", 16)  # of a CPU; a GPU's is longer than these prompts
    return LLM(checkpoint_folder(name), **given)


def random_prompts(count=6, *, seed=0, longest=24):
    """Prompts of random tokens of which some start alike."""
    rng = random.Random(seed)
    head = rng.choices(range(VOCAB_SIZE), k=12)
    prompts = []
    for index in range(count):
        tail = rng.choices(range(VOCAB_SIZE), k=rng.randint(1, longest - 12))
        prompts.append((head if index % 2 else []) + tail)
    return prompts


def greedy(max_tokens=12, **params):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **params)


def is_idle(llm):
    """Whether nothing is left of any request."""
    state = llm.state
    assert state.num_unfinished == 0
    assert state.pool.num_free == state.pool.num_blocks
    assert not llm._engine._live.by_id
    assert not llm._engine._live.by_seq_id
    return True
