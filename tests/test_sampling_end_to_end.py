"""What `SamplingParams` asks of the logits, through an engine, against transformers' logits."""

import functools
import math

import pytest
import torch

from nanovllm import LLM, SamplingParams
from tests.checkpoints import VOCAB_SIZE, reference_model
from tests.engines import SCHEDULES, random_prompts, tiny_llm
from tests.model_folder import EOS_ID, tiny_model_folder
from tests.runtime.sampling_rows import leave_the_cores_to_others

one_thread = pytest.fixture(autouse=True, scope="module")(leave_the_cores_to_others)

PROMPTS = random_prompts(6)
NUM_TOKENS = 12

ADJUSTMENTS = {
    "repetition": {"repetition_penalty": 1.4},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "reward": {"frequency_penalty": -0.7},
    "bias": {"logit_bias": {5: 2.5, 17: -3.0, 101: 1.5}},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {5: 1.0},
    },
}


@functools.cache
def next_logits(tokens):
    with torch.inference_mode():
        return reference_model("llama")(torch.tensor([tokens])).logits[0, -1].tolist()


def adjusted(prompt, completion, params):
    """The formulas of the documentation, one token at a time."""
    logits = list(next_logits((*prompt, *completion)))
    for token_id, bias in params.logit_bias or ():
        logits[token_id] += bias
    for token_id in {*prompt, *completion}:
        factor = params.repetition_penalty
        logits[token_id] = (
            logits[token_id] / factor if logits[token_id] > 0 else logits[token_id] * factor
        )
    for token_id in set(completion):
        count = completion.count(token_id)
        logits[token_id] -= params.presence_penalty + params.frequency_penalty * count
    return logits


def greedy_by_formula(prompt, params):
    completion = []
    for _ in range(params.max_tokens):
        logits = adjusted(prompt, completion, params)
        completion.append(max(range(VOCAB_SIZE), key=logits.__getitem__))
    return tuple(completion)


@pytest.mark.parametrize("schedule", ["plain", "preempted", "chunked"])
@pytest.mark.parametrize("name", ADJUSTMENTS)
def test_greedy_tokens_are_those_of_the_formulas_under_every_schedule(name, schedule):
    params = SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, **ADJUSTMENTS[name]
    )
    with tiny_llm(**SCHEDULES[schedule]) as llm:
        outputs = llm.generate(PROMPTS, params)
        stats = llm.stats()

    assert [o.token_ids for o in outputs] == [greedy_by_formula(tuple(p), params) for p in PROMPTS]
    if schedule == "preempted":
        assert stats.num_preemptions


def test_log_probabilities_are_those_of_the_raw_logits_after_preemption_too():
    params = [
        SamplingParams(
            seed=i, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3, top_k=4, **adjustment
        )
        for i, adjustment in enumerate(ADJUSTMENTS.values())
    ]
    with tiny_llm(**SCHEDULES["preempted"]) as llm:
        outputs = llm.generate(PROMPTS, params)
        assert llm.stats().num_preemptions

    for prompt, output in zip(PROMPTS, outputs, strict=True):
        (completion,) = output.outputs
        assert [one.token_id for one in completion.logprobs] == list(completion.token_ids)
        for place, one in enumerate(completion.logprobs):
            raw = torch.tensor(next_logits((*prompt, *completion.token_ids[:place])))
            expected = raw.log_softmax(-1)
            assert one.logprob == pytest.approx(float(expected[one.token_id]), abs=2e-5)
            assert one.rank == 1 + int((raw > raw[one.token_id]).sum())
            assert [i for i, _ in one.top] == raw.topk(3).indices.tolist()
        assert completion.cumulative_logprob == pytest.approx(
            math.fsum(one.logprob for one in completion.logprobs)
        )


@pytest.fixture(scope="module")
def llm():
    with LLM(tiny_model_folder(), device="cpu", dtype="float32", num_kvcache_blocks=64) as made:
        yield made


class TestEnds:
    @pytest.mark.parametrize("temperature", [0, 1.0])
    @pytest.mark.parametrize("min_tokens", [0, 1, 4])
    def test_min_tokens_hold_off_end_of_text_and_no_longer(self, llm, temperature, min_tokens):
        params = SamplingParams(
            temperature=temperature,
            min_tokens=min_tokens,
            max_tokens=9,
            logit_bias={EOS_ID: 100},
        )
        (output,) = llm.generate("The quick", params)

        assert output.token_ids.index(EOS_ID) == min_tokens == len(output.token_ids) - 1
        assert output.finish_reason == "stop"

    def test_a_log_probability_comes_with_each_token_streamed_or_not_and_cut_or_not(self, llm):
        params = SamplingParams(temperature=0.9, seed=3, max_tokens=12, logprobs=1, ignore_eos=True)
        (whole,) = llm.generate("The quick", params)
        stop = whole.text[4:6]
        cut = SamplingParams(
            temperature=0.9, seed=3, max_tokens=12, logprobs=1, ignore_eos=True, stop=stop
        )
        (ended,) = llm.generate("The quick", cut)
        deltas = list(llm.stream("The quick", cut))

        assert ended.outputs[0].stop_reason == stop
        assert whole.outputs[0].logprobs[: len(ended.token_ids)] == ended.outputs[0].logprobs
        assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)
        assert tuple(x for delta in deltas for x in delta.logprobs) == ended.outputs[0].logprobs

    def test_no_log_probabilities_were_asked_for_and_none_come(self, llm):
        (completion,) = llm.generate("The quick", SamplingParams(max_tokens=2))[0].outputs

        assert (completion.logprobs, completion.cumulative_logprob) == (None, None)
