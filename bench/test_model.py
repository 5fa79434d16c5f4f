"""Steps of the built-in model: prefill by length, decode by batch and context.

    pytest bench/test_model.py

Each round is a call of `LLM.step`, which ends with its tokens on the host. The share of the
machine's bandwidth that a decode step uses is in `extra_info`.
"""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from nanovllm import LLM
from nanovllm.workloads.bandwidth import decode_step_bytes, measure_read_bandwidth
from nanovllm.workloads.prompts import exactly, random_prompt, vocab_size


def add(llm: LLM, count: int, num_prompt_tokens: int, num_output_tokens: int) -> list[str]:
    """Queue random prompts; returns their ids."""
    size = vocab_size(llm)
    prompts = [random_prompt(num_prompt_tokens, vocab_size=size, seed=str(i)) for i in range(count)]
    return [llm.add_request(prompt, exactly(num_output_tokens)) for prompt in prompts]


def drain(llm: LLM) -> None:
    """Step until nothing is left."""
    while llm.has_unfinished_requests():
        llm.step()


@pytest.mark.parametrize("num_prompt_tokens", [16, 128, 512])
def test_prefill(benchmark: BenchmarkFixture, smollm2: LLM, num_prompt_tokens: int) -> None:
    benchmark.group = "SmolLM2-135M, prefill of one prompt and its first token"

    def setup() -> None:
        add(smollm2, 1, num_prompt_tokens, 1)

    benchmark.pedantic(drain, args=(smollm2,), setup=setup, rounds=10, warmup_rounds=2)


@pytest.mark.parametrize(
    ("batch", "num_context_tokens"), [(1, 32), (1, 1024), (4, 32), (8, 32), (8, 512), (32, 32)]
)
def test_decode(
    benchmark: BenchmarkFixture, smollm2: LLM, batch: int, num_context_tokens: int
) -> None:
    benchmark.group = "SmolLM2-135M, decode step"
    num_rounds, num_warmup_rounds = 40, 5
    # More tokens than the rounds take, as the first prompts decode while the last are computed.
    ids = add(smollm2, batch, num_context_tokens, 900)
    while smollm2.state.waiting:
        smollm2.step()
    context = sum(seq.num_tokens for seq in smollm2.state.running) / batch

    benchmark.pedantic(smollm2.step, rounds=num_rounds, warmup_rounds=num_warmup_rounds)

    assert len(smollm2.state.running) == batch  # all decoded in every round
    for request_id in ids:
        smollm2.abort(request_id)
    drain(smollm2)
    bandwidth = measure_read_bandwidth(smollm2.config.device)
    num_bytes = decode_step_bytes(smollm2, batch=batch, num_context_tokens=context)
    benchmark.extra_info["bandwidth"] = bandwidth.as_data()
    benchmark.extra_info["limit_s"] = bandwidth.limit_s(num_bytes)


@pytest.mark.parametrize("is_cached", [False, True], ids=["cold", "prefix hit"])
def test_first_token_of_a_long_prompt(
    benchmark: BenchmarkFixture, tiny_llm: LLM, is_cached: bool
) -> None:
    benchmark.group = "small model, prompt of 1,024 tokens to its first token"
    prompt = random_prompt(1024, vocab_size=vocab_size(tiny_llm), seed="long")

    def setup() -> None:
        if not is_cached:
            tiny_llm.reset_prefix_cache()

    def generate() -> object:
        return tiny_llm.generate(prompt, exactly(1), use_tqdm=False)

    benchmark.pedantic(generate, setup=setup, rounds=10, warmup_rounds=2)

    hits = tiny_llm.generate(prompt, exactly(1), use_tqdm=False)[0].num_cached_tokens
    assert hits > 1000
