"""Steps through captured programs give the tokens of the plain decoder, in every schedule."""

import weakref

import pytest

from nanovllm import SamplingParams
from nanovllm.runtime.device_queue import ImmediateQueue
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
    assert prefill.fallback == "the step has too many positions"
    assert [(record.num_rows, record.bucket) for record in decodes] == [(3, 4)] * 3
    assert all(record.fallback is None for record in decodes)
    for record in records:
        assert 0 < record.pack_s + record.submit_s + record.wait_s <= record.execute_s


def test_steps_with_prompts_run_in_the_smallest_size_that_holds_them():
    records = []
    with graph_llm(max_num_seqs=4, prompt_sizes=(4, 16), enable_prefix_caching=False) as llm:
        llm.subscribe(records.append)
        for length in (1, 3, 4, 5, 16, 17):
            llm.generate([list(range(1, length + 1))], greedy(1))
        llm.generate([[1, 2, 3], [4] * 5, [6, 7]], greedy(1))
        scored = llm.generate([[1, 2, 3]], greedy(1, prompt_logprobs=1))[0]

    assert [record.bucket for record in records] == [4, 4, 4, 16, 16, None, 16, None]
    assert records[5].fallback == "the step has too many positions"
    assert records[7].fallback == "prompts are scored"
    assert len(scored.prompt_logprobs) == 3


def test_a_closed_engine_holds_nothing_when_it_gives_its_memory_back():
    """Or else the device would not get it, and the next engine in the process neither."""
    held = []

    class GivingQueue(ImmediateQueue):
        def give_back(self):
            held.append([name for name, tensor in tensors.items() if tensor() is not None])

    with graph_llm(max_num_seqs=2, queue=GivingQueue()) as llm:
        llm.generate(random_prompts(3), greedy(3, prompt_logprobs=1))
        statics = llm._engine._loop.executor._statics
        buffers = statics.named_tensors().items()
        # The weights are the caller's in these tests.
        tensors = {name: weakref.ref(x) for name, x in buffers if not name.startswith("weight")}
        del statics, buffers

    assert len(tensors) == 6
    assert held == [[]]


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
    # An embedding that is not the output projection too: that would break every row.
    with graph_llm("mistral", max_num_seqs=4) as llm:
        statics = llm._engine._loop.executor._statics
        embedding = statics.fused.decoder.embedding
        embedding[prompts[1][-1]] = float("nan")
        outputs = llm.generate(prompts, greedy(5))
        hit = [prompts[1][-1] in prompt for prompt in prompts]

    assert hit[1]
    for output, broken in zip(outputs, hit, strict=True):
        assert output.finish_reason == ("error" if broken else "length")
        assert ("not finite" in (output.error or "")) == broken
