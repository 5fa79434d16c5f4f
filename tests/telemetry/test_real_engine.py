"""The recorder on real engines with a tiny model."""

import asyncio

import pytest

from nanovllm import AsyncLLM
from telemetry import Recorder, read_run
from tests.checkpoints import checkpoint_folder
from tests.engines import greedy, is_idle, random_prompts, tiny_llm


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def test_an_engines_steps_tell_its_tokens(path):
    prompts = random_prompts(6)
    with tiny_llm() as llm, Recorder(llm, path, period_s=0.01) as recorder:
        with recorder.window("work"):
            outputs = llm.generate(prompts, greedy(12))
        assert is_idle(llm)
    run = read_run(path)

    requests = {request.request_id: request for request in run.requests}
    assert set(requests) == {output.request_id for output in outputs}
    for output, prompt in zip(outputs, prompts, strict=True):
        request = requests[output.request_id]
        assert request.num_generated_tokens == len(output.token_ids) == 12
        assert request.num_prompt_tokens == len(prompt)
        # A token comes with each step that sampled the sequence.
        (seq_id,) = request.seq_ids
        ends = [step.t1_ns for step in run.steps if seq_id in step.sampled]
        assert len(ends) == 12
        assert request.arrival_ns <= request.first_scheduled_ns <= request.first_token_ns
        assert ends[0] >= request.first_token_ns > ends[0] - 10**9
    assert sum(run.steps.num_prefill_tokens) == (
        sum(map(len, prompts)) - sum(request.num_prefix_hit_tokens for request in run.requests)
    )
    assert run.info.model["architecture"] == "LlamaForCausalLM"
    assert run.info.config["num_kvcache_blocks"] == 256
    assert run.notes == ()


def test_the_parts_of_a_step_fit_into_it(path):
    with tiny_llm() as llm, Recorder(llm, path, mode="edges"):
        llm.generate(random_prompts(3), greedy(5))

    for step in read_run(path).steps:
        parts = step.schedule_ns + step.execute_ns + step.postprocess_ns
        assert 0 < parts <= step.t1_ns - step.t0_ns + 10  # rounded to nanoseconds each
        assert step.pack_ns + step.submit_ns + step.wait_ns <= step.execute_ns + 10


def test_an_async_engine_is_recorded_likewise(path):
    prompts = random_prompts(4)

    async def work():
        async with AsyncLLM(
            checkpoint_folder("llama"),
            device="cpu",
            dtype="float32",
            skip_tokenizer_init=True,
            num_kvcache_blocks=256,
        ) as llm:
            with Recorder(llm, path, period_s=0.01) as recorder, recorder.window("work"):
                await asyncio.gather(*(llm.generate(prompt, greedy(9)) for prompt in prompts))

    asyncio.run(work())
    run = read_run(path)

    assert sum(len(step.sampled) for step in run.steps) == 9 * len(prompts)
    assert run.windows[1].t1_ns is not None


def test_the_engine_may_be_closed_first(path):
    llm = tiny_llm()
    with Recorder(llm, path):
        llm.generate(random_prompts(1), greedy(3))
        llm.close()

    assert len(read_run(path).steps) == 3


def test_a_report_comes_out_of_a_real_run(path):
    pytest.importorskip("telemetry.report.model", reason="the report is not part of this build")
    with tiny_llm() as llm, Recorder(llm, path) as recorder:
        llm.generate(random_prompts(4), greedy(20))
    recorder.report().to_html(path.with_suffix(".html"))

    assert "<html" in path.with_suffix(".html").read_text()
