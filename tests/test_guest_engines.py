"""Engines of different kinds share a process without knowing of each other."""

import asyncio
import random
import threading
import time

import pytest

from nanovllm import LLM, AsyncLLM
from tests.checkpoints import checkpoint_folder, greedy_tokens
from tests.engines import greedy, is_idle, random_prompts, tiny_llm

NUM_TOKENS = 8

KINDS = {
    "float32 in blocks of 4": ("llama", {"kvcache_block_size": 4, "attention_backend": "torch"}),
    "natively": ("llama", {"attention_backend": "native"}),
    "bfloat16": ("llama", {"dtype": "bfloat16", "attention_backend": "torch"}),
    "bfloat16 natively": ("qwen3", {"dtype": "bfloat16", "attention_backend": "native"}),
    "another model": ("qwen2", {"kvcache_block_size": 32, "attention_backend": "torch"}),
    "without a cache": ("mistral", {"enable_prefix_caching": False, "max_num_seqs": 2}),
    "in chunks": ("llama", {"max_num_batched_tokens": 5, "attention_backend": "torch"}),
}


def make(kind):
    name, options = KINDS[kind]
    if options.get("attention_backend") == "native":
        pytest.importorskip("numba")
    return tiny_llm(name, **options)


@pytest.fixture(scope="module")
def alone():
    """What each engine answers when there is no other."""
    answers = {}
    for kind, (name, options) in KINDS.items():
        with make(kind) as llm:
            outputs = llm.generate(random_prompts(4), greedy(NUM_TOKENS))
        answers[kind] = [output.token_ids for output in outputs]
        if options.get("dtype") != "bfloat16":
            assert answers[kind] == [
                greedy_tokens(name, prompt, NUM_TOKENS) for prompt in random_prompts(4)
            ]
    return answers


def test_engines_that_take_turns_at_every_token_answer_as_if_alone(alone):
    rng = random.Random(0)
    engines = {kind: make(kind) for kind in KINDS}
    streams = {
        (kind, index): llm.stream(prompt, greedy(NUM_TOKENS))
        for kind, llm in engines.items()
        for index, prompt in enumerate(random_prompts(4))
    }
    answers = dict.fromkeys(streams, ())
    left = list(streams)
    while left:
        key = rng.choice(left)
        delta = next(streams[key])
        answers[key] += delta.token_ids
        if delta.finish_reason:
            left.remove(key)

    assert answers == {key: alone[key[0]][key[1]] for key in streams}
    for llm in engines.values():
        assert is_idle(llm)
        llm.close()


def test_engines_in_threads_of_their_own_are_made_used_and_closed_at_the_same_time(alone):
    answers = {}

    def work(kind):
        with make(kind) as llm:
            outputs = llm.generate(random_prompts(4), greedy(NUM_TOKENS))
        answers[kind] = [output.token_ids for output in outputs]

    threads = [threading.Thread(target=work, args=(kind,)) for kind in KINDS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert answers == alone


def test_closing_one_engine_leaves_the_others_alone(alone):
    kinds = list(KINDS)[:3]
    first, second, third = map(make, kinds)
    streams = [llm.stream(random_prompts(4)[0], greedy(NUM_TOKENS)) for llm in (second, third)]
    token_ids = [next(stream).token_ids for stream in streams]
    first.close()
    for place, stream in enumerate(streams):
        token_ids[place] += sum((delta.token_ids for delta in stream), ())
    second.close(), third.close()

    assert token_ids == [alone[kind][0] for kind in kinds[1:]]


def test_an_llm_and_an_async_engine_of_one_model_share_nothing():
    options = {
        "device": "cpu",
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "num_kvcache_blocks": 64,
    }
    folder = checkpoint_folder("llama")

    async def main():
        async with AsyncLLM(folder, **options) as other:
            task = asyncio.create_task(other.generate(random_prompts(4), greedy(NUM_TOKENS)))
            with LLM(folder, **options) as llm:
                for prompt in random_prompts(4):
                    llm.generate(prompt, greedy(2))
                    await asyncio.sleep(0)
                num_requests = llm.stats().num_requests
            return [output.token_ids for output in await task], num_requests, other.stats()

    answers, num_requests, stats = asyncio.run(main())
    expected = [greedy_tokens("llama", prompt, NUM_TOKENS) for prompt in random_prompts(4)]
    assert answers == expected
    assert (num_requests, stats.num_requests) == (4, 4)


def test_engines_that_wait_use_no_cpu(alone):
    """Neither the thread of an `AsyncLLM` nor the helpers of the native kernels look around."""
    options = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True}
    engines = [
        AsyncLLM(checkpoint_folder("llama"), num_kvcache_blocks=64, **options) for _ in range(3)
    ]
    for llm in engines:
        asyncio.run(llm.generate([1, 2, 3], greedy(3)))
    time.sleep(0.05)  # helpers wait a moment for the next step before they sleep
    before_s = time.process_time()
    time.sleep(2)
    spent_s = time.process_time() - before_s
    for llm in engines:
        llm.close()

    assert spent_s < 0.02
