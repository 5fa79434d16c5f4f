"""Steps through captured programs give the tokens of the plain decoder, in every schedule."""

import pytest

from nanovllm import SamplingParams
from tests.checkpoints import FAMILIES, greedy_tokens
from tests.engines import SCHEDULES, greedy, is_idle, random_prompts, tiny_llm
from tests.runtime.graph_engines import graph_llm

NUM_TOKENS = 12


def expected(name, prompts):
    return [greedy_tokens(name, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_transformers_for_every_family(name):
    prompts = random_prompts()
    with graph_llm(name, max_num_seqs=8) as llm:
        outputs = llm.generate(prompts, greedy(NUM_TOKENS))

    assert [output.token_ids for output in outputs] == expected(name, prompts)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_no_schedule_changes_a_token(name, schedule):
    prompts = random_prompts(8, seed=1)
    options = {"max_num_seqs": 8, **SCHEDULES[schedule]}
    with graph_llm(name, **options) as llm:
        first = llm.generate(prompts, greedy(NUM_TOKENS))
        again = llm.generate(prompts, greedy(NUM_TOKENS))  # now with prefix hits

        assert is_idle(llm)
    want = expected(name, prompts)
    assert [output.token_ids for output in first] == want
    assert [output.token_ids for output in again] == want


KINDS = {
    "temperature": {"temperature": 0.8},
    "min_p": {"temperature": 1.5, "min_p": 0.1},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "logprobs": {"temperature": 0, "logprobs": 2},
    "min_tokens": {"temperature": 0.7, "min_tokens": 5},
}


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_tokens_are_those_of_the_sampler_wherever_they_are_drawn(kind):
    prompts = random_prompts(6, seed=2)
    params = [
        SamplingParams(seed=50 + i, max_tokens=8, ignore_eos=True, **KINDS[kind]) for i in range(6)
    ]
    params[2] = greedy(8)  # a greedy row among them
    with tiny_llm(attention_backend="torch") as llm:
        want = llm.generate(prompts, params)
    with graph_llm(max_num_seqs=8) as llm:
        outputs = llm.generate(prompts, params)

    assert [output.token_ids for output in outputs] == [output.token_ids for output in want]
    for output, other in zip(outputs, want, strict=True):
        if output.outputs[0].logprobs is not None:
            assert [entry.logprob for entry in output.outputs[0].logprobs] == pytest.approx(
                [entry.logprob for entry in other.outputs[0].logprobs], abs=1e-4
            )


def test_a_step_says_how_it_was_run():
    records = []
    with graph_llm(max_num_seqs=8) as llm:
        llm.subscribe(records.append)
        llm.generate(random_prompts(3), greedy(4))

    prefill, *decodes = records
    assert (prefill.mode, prefill.bucket) == ("eager", None)
    assert prefill.fallback == "the step has prefills"
    assert [(record.num_rows, record.bucket) for record in decodes] == [(3, 4)] * 3
    assert all(record.fallback is None for record in decodes)
    for record in records:
        assert 0 < record.pack_s + record.submit_s + record.wait_s <= record.execute_s


def test_without_batch_sizes_every_step_runs_eagerly():
    records = []
    prompts = random_prompts(3)
    with graph_llm(sizes=None) as llm:
        llm.subscribe(records.append)
        outputs = llm.generate(prompts, greedy(NUM_TOKENS))

    assert [output.token_ids for output in outputs] == expected("llama", prompts)
    assert {(record.mode, record.bucket, record.fallback) for record in records} == {
        ("eager", None, None)
    }


def test_a_row_whose_logits_are_not_finite_fails_alone():
    prompts = random_prompts(3)
    with graph_llm(max_num_seqs=4) as llm:
        statics = llm._engine._loop.executor._statics
        embedding = statics.fused.decoder.embedding
        embedding[prompts[1][-1]] = float("nan")
        outputs = llm.generate(prompts, greedy(5))
        hit = [prompts[1][-1] in prompt for prompt in prompts]

    assert hit[1]
    for output, broken in zip(outputs, hit, strict=True):
        assert output.finish_reason == ("error" if broken else "length")
        assert ("not finite" in (output.error or "")) == broken
