"""Random prompts of token ids: seeded, and sharing no prefix, so that nothing is found cached."""

import random

from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams


def random_prompt(num_tokens: int, *, vocab_size: int, seed: str) -> list[int]:
    """A prompt of token ids that a text determines, the same on every machine."""
    rng = random.Random(seed)
    return [rng.randrange(vocab_size) for _ in range(num_tokens)]


def vocab_size(llm: LLM) -> int:
    """How many ids a model knows."""
    return int(llm.describe()["model"]["vocab_size"])


def exactly(num_tokens: int) -> SamplingParams:
    """Generate that many tokens greedily, past the end of the text."""
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
