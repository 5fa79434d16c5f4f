"""Small pieces of work of one part each, for the suites here and for `bench.compare`.

A case is made once and then run again and again; each run does the same work as the one before.
`prepare` makes what a run needs and is not timed. Cases use only what is public or has been the
same for long, since `bench.compare` runs them on older commits too.
"""

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from bench.host_step import HostLoop
from bench.tiny_model import VOCAB_SIZE, write_tiny_model

MODEL_VOCAB_SIZE = 49152  # of SmolLM2


@attrs.frozen
class Case:
    """A piece of work.

    Attributes:
        run: Do it, with what `prepare` made.
        prepare: Before each run, not timed.
    """

    run: Callable[[Any], object]
    prepare: Callable[[], Any] = attrs.field(default=lambda: None)


def sampler(num_rows: int = 8, num_draws: int = 1, **params: Any) -> Case:
    """Draw a token for each row of a batch of logits, a few times over."""
    import torch

    from nanovllm.runtime.sampler import SamplingRow, sample
    from nanovllm.sampling_params import SamplingParams

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((num_rows, MODEL_VOCAB_SIZE), generator=generator) * 3
    rows = [
        SamplingRow(params=SamplingParams(**params), seed=row, position=64)
        for row in range(num_rows)
    ]

    def run(_: Any) -> None:
        for _ in range(num_draws):
            sample(logits, rows)

    return Case(run)


def greedy_sampler() -> Case:
    """The largest logit of each row; twenty times, since once is too short to time."""
    return sampler(num_draws=20, temperature=0)


def random_sampler() -> Case:
    """A draw from each row, cut by top-k and top-p."""
    return sampler(temperature=0.8, top_k=50, top_p=0.95)


def detokenizer(num_tokens: int = 64) -> Case:
    """Text of tokens that come one by one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from nanovllm.text.detokenizer import IncrementalDetokenizer

    rng = random.Random(0)
    letters = "abcdefghijklmnoprstuäöü🌶"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(500)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(words)], trainer)
    ids = rng.choices(range(tokenizer.get_vocab_size()), k=num_tokens)

    def run(_: Any) -> None:
        one = IncrementalDetokenizer(tokenizer, prompt_token_ids=ids[:16])
        for token_id in ids:
            one.push([token_id])

    return Case(run)


def host_step(num_seqs: int = 64, num_steps: int = 10) -> Case:
    """Steps of the scheduler with every sequence in decode, without a model."""
    loops: list[HostLoop] = []

    def prepare() -> HostLoop:
        if not loops or loops[0].num_steps_left < num_steps:
            loops[:] = [HostLoop(num_seqs, 16)]
            loops[0].admit()
        return loops[0]

    def run(loop: HostLoop) -> None:
        for _ in range(num_steps):
            loop.step()

    return Case(run, prepare)


def admission(num_seqs: int = 16, num_prompt_tokens: int = 256, *, is_cached: bool = False) -> Case:
    """Queue prompts and plan their first step; or, of the same prompts when they are cached."""
    from nanovllm.core import (
        EngineState,
        SchedulerLimits,
        Sequence,
        admit,
        build_batch,
        postprocess,
        schedule,
    )
    from nanovllm.sampling_params import SamplingParams

    rng = random.Random(0)
    limits = SchedulerLimits(num_seqs, 10**6, 10**6)
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    prompts = [[rng.randrange(50000) for _ in range(num_prompt_tokens)] for _ in range(num_seqs)]
    empty = EngineState.create(4 * num_seqs * num_prompt_tokens // 16, 16)

    def first_step(state: Any) -> Any:
        for seq_id, prompt in enumerate(prompts):
            state = admit(state, Sequence.create(seq_id, prompt, params), limits)
        state, plan = schedule(state, limits)
        build_batch(plan)
        return state, plan

    if not is_cached:
        return Case(lambda _: first_step(empty))
    state, plan = first_step(empty)
    filled, _ = postprocess(state, plan, [1] * num_seqs)  # all end by length; their blocks stay
    return Case(lambda _: first_step(filled))


def prefix_hit() -> Case:
    """Queue prompts that are cached, and plan their first step."""
    return admission(is_cached=True)


def decode_step(backend: str, num_seqs: int = 4, num_steps: int = 4) -> Case:
    """Steps of the engine on a small model, every sequence in decode."""
    from nanovllm import LLM, SamplingParams

    folder = write_tiny_model(Path(tempfile.mkdtemp(prefix="nanovllm-bench-")))
    llm = LLM(
        folder,
        device="cpu",
        dtype="float32",
        attention_backend=backend,
        skip_tokenizer_init=True,
        num_kvcache_blocks=256,
        max_model_len=512,
        enable_prefix_caching=False,
    )
    # 1: the first token comes with the prompt's step.
    params = SamplingParams(temperature=0, max_tokens=1 + 100 * num_steps, ignore_eos=True)

    def prepare() -> None:
        if not llm.has_unfinished_requests():
            for row in range(num_seqs):
                llm.add_request([(17 * row + i) % VOCAB_SIZE for i in range(16)], params)
            while llm.state.waiting:
                llm.step()

    def run(_: Any) -> None:
        for _ in range(num_steps):
            llm.step()

    return Case(run, prepare)


def torch_decode_step() -> Case:
    """With torch, on any machine."""
    return decode_step("torch")


def native_decode_step() -> Case:
    """With the compiled step; needs Numba."""
    return decode_step("native")


CASES: dict[str, Callable[[], Case]] = {
    "sampler, greedy": greedy_sampler,
    "sampler, top-k and top-p": random_sampler,
    "detokenizer": detokenizer,
    "host step, 64 sequences": host_step,
    "admission, 16 prompts": admission,
    "prefix hit, 16 prompts": prefix_hit,
    "decode step, torch": torch_decode_step,
    "decode step, native": native_decode_step,
}
"""What `bench.compare` compares, in this order."""
