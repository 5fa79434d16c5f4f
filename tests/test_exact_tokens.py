"""The same tokens as transformers' own `generate`, however the engine schedules the work."""

import pytest

from nanovllm import SamplingParams
from tests.checkpoints import FAMILIES, greedy_tokens
from tests.engines import BACKENDS, SCHEDULES, greedy, is_idle, random_prompts, tiny_llm

NUM_TOKENS = 12


def expected(name, prompts):
    return [greedy_tokens(name, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_those_of_transformers_for_every_family(name, backend):
    prompts = random_prompts()
    with tiny_llm(name, attention_backend=backend) as llm:
        outputs = llm.generate(prompts, greedy(NUM_TOKENS))

    assert [output.token_ids for output in outputs] == expected(name, prompts)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_no_schedule_changes_a_greedy_token(name, schedule, backend):
    prompts = random_prompts(8, seed=1)
    with tiny_llm(name, attention_backend=backend, **SCHEDULES[schedule]) as llm:
        first = llm.generate(prompts, greedy(NUM_TOKENS))
        again = llm.generate(prompts, greedy(NUM_TOKENS))  # now with prefix hits
        stats = llm.stats()

        assert is_idle(llm)
    want = expected(name, prompts)
    assert [output.token_ids for output in first] == want
    assert [output.token_ids for output in again] == want
    if schedule == "preempted":
        assert stats.num_preemptions
    if schedule != "no prefix cache":
        assert stats.num_prefix_hit_tokens
        assert any(output.num_cached_tokens for output in again)
    else:
        assert stats.num_prefix_hit_tokens == 0


SAMPLING = {
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "top_k and min_p": {"temperature": 1.2, "top_k": 40, "min_p": 0.02},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_seeded_request_gets_the_same_tokens_wherever_it_runs(sampling, backend):
    prompts = random_prompts(9, seed=2)
    params = [
        SamplingParams(seed=100 + i, max_tokens=10, ignore_eos=True, **SAMPLING[sampling])
        for i in range(9)
    ]

    def run(order, **options):
        with tiny_llm("llama", attention_backend=backend, **options) as llm:
            outputs = llm.generate([prompts[i] for i in order], [params[i] for i in order])
        return {i: output.token_ids for i, output in zip(order, outputs, strict=True)}

    with tiny_llm("llama", attention_backend=backend) as llm:
        alone = {i: llm.generate(prompts[i], params[i])[0].token_ids for i in range(9)}

    assert len(set(alone.values())) == 9
    assert run(range(9)) == alone
    assert run(range(8, -1, -1)) == alone
    for options in SCHEDULES.values():
        assert run(range(9), **options) == alone


def test_an_unseeded_neighbour_changes_nothing_and_draws_differ():
    prompt = random_prompts(1)[0]
    seeded = SamplingParams(temperature=0.9, seed=5, max_tokens=8, ignore_eos=True)
    unseeded = SamplingParams(temperature=0.9, max_tokens=8, ignore_eos=True)
    with tiny_llm() as llm:
        alone = llm.generate(prompt, seeded)[0].token_ids
        mixed = llm.generate([prompt] * 4, [unseeded, seeded, unseeded, greedy(8)])

    assert mixed[1].token_ids == alone
    assert mixed[0].token_ids != mixed[2].token_ids
    assert mixed[3].token_ids == greedy_tokens("llama", prompt, 8)


def test_two_engines_of_one_seed_draw_alike():
    prompts = random_prompts(4)
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    runs = []
    for seed in (1, 1, 2):
        with tiny_llm(seed=seed) as llm:
            runs.append([output.token_ids for output in llm.generate(prompts, params)])

    assert runs[0] == runs[1] != runs[2]


def test_n_completions_differ_and_the_first_is_that_of_the_seed_alone():
    prompt = random_prompts(1)[0]
    params = {"temperature": 1.0, "seed": 3, "max_tokens": 6, "ignore_eos": True}
    with tiny_llm() as llm:
        (three,) = llm.generate(prompt, SamplingParams(n=3, **params))
        (one,) = llm.generate(prompt, SamplingParams(**params))

        assert is_idle(llm)
    assert [completion.index for completion in three.outputs] == [0, 1, 2]
    assert len({completion.token_ids for completion in three.outputs}) == 3
    assert three.token_ids == one.token_ids
