"""Log-probabilities of a prompt's own tokens: right, complete, and the same on every way there."""

import functools
import math

import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.sampling_params import MAX_LOGPROBS
from tests.checkpoints import VOCAB_SIZE, reference_model
from tests.engines import BACKENDS, ON_GPU, SCHEDULES, greedy, is_idle, random_prompts, tiny_llm
from tests.runtime.sampling_rows import leave_the_cores_to_others

one_thread = pytest.fixture(autouse=True, scope="module")(leave_the_cores_to_others)

PROMPTS = random_prompts(4)
ASKING = greedy(6, prompt_logprobs=3)


@functools.cache
def log_softmax(name, prompt):
    """What transformers says: `[len(prompt), V]`, the row of a token being the one before it."""
    with torch.inference_mode():
        logits = reference_model(name)(torch.tensor([prompt])).logits[0]
    return logits.float().log_softmax(-1).roll(1, 0)


def check(name, prompt, scores):
    """Whether the scores are those of transformers, one for each token."""
    expected = log_softmax(name, tuple(prompt))
    assert len(scores) == len(prompt)
    assert scores[0] is None
    for row, token_id, score in zip(expected[1:], prompt[1:], scores[1:], strict=True):
        assert score.token_id == token_id
        assert score.logprob == pytest.approx(float(row[token_id]), abs=2e-5)
        assert score.rank == 1 + int((row > row[token_id]).sum())
        top = row.topk(len(score.top))
        assert [i for i, _ in score.top] == top.indices.tolist()
        assert [value for _, value in score.top] == pytest.approx(top.values.tolist(), abs=2e-5)
    return True


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["llama", "llama_biased", "qwen3"])
def test_are_those_of_transformers(name, backend):
    with tiny_llm(name, attention_backend=backend) as llm:
        outputs = llm.generate(PROMPTS, ASKING)

    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert check(name, prompt, output.prompt_logprobs)
        assert all(len(score.top) == 3 for score in output.prompt_logprobs[1:])


WAYS = {
    **SCHEDULES,
    "few blocks, in chunks": {**SCHEDULES["preempted"], "max_num_batched_tokens": 5},
    "token by token": {"max_num_batched_tokens": 1},
}


@pytest.mark.parametrize(
    ("backend", "way"),
    [
        *(("native", way) for way in WAYS),
        ("torch", "few blocks, in chunks"),
        ("torch", "preempted"),
        pytest.param("triton", "few blocks, in chunks", marks=ON_GPU.marks),
        pytest.param("triton", "preempted", marks=ON_GPU.marks),
    ],
)
def test_no_schedule_loses_one_and_a_warm_cache_changes_none(backend, way):
    with tiny_llm(attention_backend=backend, **WAYS[way]) as llm:
        llm.generate(PROMPTS, greedy(3))  # which leaves the prompts in the cache
        first, second = llm.generate(PROMPTS, ASKING), llm.generate(PROMPTS, ASKING)
        stats = llm.stats()
        assert is_idle(llm)

    for prompt, one, other in zip(PROMPTS, first, second, strict=True):
        assert check("llama", prompt, one.prompt_logprobs)
        assert check("llama", prompt, other.prompt_logprobs)
        assert one.token_ids == other.token_ids
        assert one.num_cached_tokens == other.num_cached_tokens == 0
    if way == "preempted":
        assert stats.num_preemptions


def test_the_same_call_twice_gives_the_same_numbers_to_the_last_bit():
    prompt = list(range(1, 10))
    with tiny_llm(kvcache_block_size=4) as llm:
        first, second = (llm.generate(prompt, ASKING)[0].prompt_logprobs for _ in range(2))
        after = llm.generate(prompt, greedy(1))[0]

    assert first == second
    assert after.num_cached_tokens == 8  # the blocks that it computed serve others


@pytest.mark.parametrize("num_top", [0, 1, MAX_LOGPROBS])
def test_as_many_alternatives_come_as_were_asked_for(num_top):
    with tiny_llm() as llm:
        params = [greedy(2, prompt_logprobs=num_top), greedy(2, prompt_logprobs=5), greedy(2)]
        outputs = llm.generate(PROMPTS[:3], params)

    assert check("llama", PROMPTS[0], outputs[0].prompt_logprobs)
    assert {len(score.top) for score in outputs[0].prompt_logprobs[1:]} == {num_top}
    assert {len(score.top) for score in outputs[1].prompt_logprobs[1:]} == {5}
    assert outputs[2].prompt_logprobs is None


def test_a_prompt_of_one_token_has_nothing_to_say():
    with tiny_llm() as llm:
        assert llm.generate([7], ASKING)[0].prompt_logprobs == (None,)


def test_neither_parameters_nor_completions_change_the_prompts_numbers():
    params = SamplingParams(
        prompt_logprobs=3, n=3, temperature=2.0, top_k=5, logit_bias={1: 50.0}, max_tokens=4, seed=1
    )
    with tiny_llm(kvcache_block_size=4) as llm:
        (output,) = llm.generate([PROMPTS[1]], params)

    assert check("llama", PROMPTS[1], output.prompt_logprobs)
    assert len(output.outputs) == 3
    assert all(completion.finish_reason for completion in output.outputs)


def test_few_positions_are_looked_at_at_a_time(monkeypatch):
    """More prompt than the logits of a step have room for."""
    from nanovllm.runtime import executor

    monkeypatch.setattr(executor, "SCORED_BYTES", 3 * 4 * VOCAB_SIZE)
    for options in ({"attention_backend": "torch"}, {"max_num_seqs": 2}):
        with tiny_llm(**options) as llm:
            (output,) = llm.generate([PROMPTS[0]], ASKING)

        assert check("llama", PROMPTS[0], output.prompt_logprobs)


def test_a_prompt_that_loses_its_blocks_between_two_chunks_has_each_number_once():
    options = {"kvcache_block_size": 1, "num_kvcache_blocks": 9, "max_num_batched_tokens": 3}
    prompts = [[1, 2], [4, 5, 6, 7, 8, 9]]
    with tiny_llm(max_num_seqs=3, **options) as llm:
        outputs = llm.generate(prompts, greedy(4, prompt_logprobs=3))
        assert llm.stats().num_preemptions

    for prompt, output in zip(prompts, outputs, strict=True):
        assert check("llama", prompt, output.prompt_logprobs)


def test_an_aborted_request_has_what_was_known():
    with tiny_llm(max_num_batched_tokens=4) as llm:
        request_id = llm.add_request(PROMPTS[0][:12], ASKING)
        llm.step()
        llm.abort(request_id)
        (output,) = llm.step()

    assert output.finish_reason == "abort"
    assert len(output.prompt_logprobs) == 5  # None, and those after the four positions computed
    assert output.prompt_logprobs[1:] == tuple(
        score for score in output.prompt_logprobs if score is not None
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_they_come_in_bfloat16_too(backend):
    with tiny_llm(attention_backend=backend, dtype="bfloat16") as llm:
        (output,) = llm.generate([PROMPTS[0]], ASKING)
    expected = log_softmax("llama", tuple(PROMPTS[0]))
    pairs = zip(output.prompt_logprobs[1:], expected[1:], strict=True)
    gaps = [abs(score.logprob - float(row[score.token_id])) for score, row in pairs]

    assert max(gaps) < 0.3


def test_broken_logits_fail_the_request_that_asks():
    with tiny_llm(attention_backend="torch", max_num_batched_tokens=8) as llm:
        decoder = llm._engine._loop.executor._decoder
        llm._engine._loop.executor._decoder = Poisoned(decoder)
        outputs = llm.generate([PROMPTS[0], [1, 2]], [ASKING, greedy(2)])

        assert outputs[0].finish_reason == "error"
        assert "not finite" in outputs[0].error
        assert outputs[1].finish_reason == "length"
        assert is_idle(llm)


class Poisoned:
    """A decoder whose logits are NaN wherever more than two rows are asked for at once."""

    def __init__(self, decoder):
        self.forward, self.config, self._decoder = decoder.forward, decoder.config, decoder

    def logits(self, hidden):
        logits = self._decoder.logits(hidden)
        return torch.full_like(logits, math.nan) if len(logits) > 2 else logits
