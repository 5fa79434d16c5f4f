"""Rows for the sampler, of every kind."""

import math

import torch

from nanovllm.runtime.sampler import SamplingRow, sample
from nanovllm.sampling_params import SamplingParams

INF = math.inf
GREEDY = SamplingParams(temperature=0)
RANDOM = SamplingParams(temperature=0.8)

# Every way in which rows are handled, to mix freely.
KINDS = (
    GREEDY,
    SamplingParams(temperature=0, logprobs=3, logit_bias={1: 2.0}),
    SamplingParams(temperature=1e-30),
    RANDOM,
    SamplingParams(temperature=3.0),
    SamplingParams(min_p=0.1, logprobs=0),
    SamplingParams(top_k=1),
    SamplingParams(temperature=1.3, top_k=3, logprobs=2),
    SamplingParams(temperature=1.3, top_k=40),
    SamplingParams(top_p=0.0),
    SamplingParams(top_p=0.6),
    SamplingParams(temperature=2.0, top_p=1 - 1e-9),
    SamplingParams(temperature=1.1, top_k=7, top_p=0.8, min_p=0.05),
    SamplingParams(temperature=0.9, repetition_penalty=1.3, presence_penalty=0.5),
    SamplingParams(temperature=0.9, frequency_penalty=-0.5, min_tokens=3),
)


def leave_the_cores_to_others():
    """One thread: several that wait for a core that other tests use take a hundred times."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def row(params, seed=0, position=0, prompt=(), completion=(), stop=()):
    return SamplingRow(
        params=params,
        seed=seed,
        position=position,
        num_completion_tokens=len(completion),
        stop_token_ids=frozenset(stop),
        prompt_token_ids=lambda: prompt,
        completion_token_ids=lambda: completion,
    )


def mixed_rows(num_rows, num_tokens):
    return [
        row(
            KINDS[i % len(KINDS)],
            seed=i * 7919,
            position=i,
            prompt=(0, num_tokens - 1, 0),
            completion=(1, 1),
            stop=(0, 3),
        )
        for i in range(num_rows)
    ]


def token_of(logits, params, seed=0, position=0, **kwargs):
    return sample(torch.tensor([logits]), [row(params, seed, position, **kwargs)]).token_ids[0]
