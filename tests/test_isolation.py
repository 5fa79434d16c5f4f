"""What is wrong with one request, or with a hook, is nobody else's trouble."""

import asyncio
import logging

import pytest

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.runtime import logits_processors
from nanovllm.text.detokenizer import IncrementalDetokenizer
from tests.engines import greedy, is_idle, random_prompts, tiny_llm
from tests.model_folder import tiny_model_folder
from tests.runtime.sampling_rows import leave_the_cores_to_others

one_thread = pytest.fixture(autouse=True, scope="module")(leave_the_cores_to_others)

PROMPTS = ["The quick", "def main(", "Grüße aus"]


@pytest.fixture(scope="module")
def llm():
    with LLM(tiny_model_folder(), device="cpu", dtype="float32", num_kvcache_blocks=64) as made:
        yield made


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_an_exception_in_its_penalties_fails_that_request_and_changes_no_other(
    llm, monkeypatch, temperature
):
    base = {"temperature": temperature, "max_tokens": 6, "ignore_eos": True}
    params = [SamplingParams(**base, seed=i, repetition_penalty=1.0 + 0.1 * i) for i in range(3)]
    expected = llm.generate(PROMPTS, params)
    penalise = logits_processors._penalise

    def faulty(logits, row):
        if row.params.repetition_penalty == 1.1 and row.num_completion_tokens == 2:
            raise FloatingPointError("underflow")
        penalise(logits, row)

    monkeypatch.setattr(logits_processors, "_penalise", faulty)
    outputs = llm.generate(PROMPTS, params)

    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].error == "FloatingPointError: underflow"
    assert outputs[1].token_ids == expected[1].token_ids[:2]
    assert [outputs[i].outputs for i in (0, 2)] == [expected[i].outputs for i in (0, 2)]
    assert is_idle(llm)


@pytest.mark.parametrize("broken", [("push",), ("push", "flush")])
def test_a_detokenizer_that_raises_fails_its_own_request_also_if_it_never_stops(
    llm, monkeypatch, broken
):
    params = [
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, seed=i) for i in range(3)
    ]
    expected = llm.generate(PROMPTS, params)
    marked = []

    for name in broken:
        function = getattr(IncrementalDetokenizer, name)

        def faulty(self, *args, function=function):
            if self in marked:
                raise LookupError("no such piece")
            return function(self, *args)

        monkeypatch.setattr(IncrementalDetokenizer, name, faulty)
    ids = [llm.add_request(p, one) for p, one in zip(PROMPTS, params, strict=True)]
    requests = [llm._manual[request_id] for request_id in ids]
    llm.step()
    marked.append(requests[1].completions[0]._detokenizer)
    while llm.has_unfinished_requests():
        llm.step()
    outputs = [request.output() for request in requests]

    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].error == "LookupError: no such piece"
    assert [outputs[i].outputs for i in (0, 2)] == [expected[i].outputs for i in (0, 2)]
    assert is_idle(llm)


def test_a_request_whose_text_is_broken_can_still_be_aborted(llm, monkeypatch):
    def broken(self):
        raise LookupError("no such piece")

    request_id = llm.add_request(PROMPTS[0], greedy(6))
    llm.step()
    monkeypatch.setattr(IncrementalDetokenizer, "flush", broken)
    assert llm.abort(request_id)
    (output,) = llm.step()

    assert (output.finish_reason, output.error) == ("abort", "LookupError: no such piece")
    assert is_idle(llm)


class RaisesAt:
    """A hook that raises in some of its calls, and counts all of them."""

    def __init__(self, *calls):
        self.calls, self.num_calls = calls, 0

    def __call__(self, record):
        self.num_calls += 1
        if self.num_calls in self.calls:
            raise ZeroDivisionError(f"call {self.num_calls}")


class TestHooks:
    """What a hook raises comes out of the call that ran the step, and takes no token with it."""

    def test_a_manual_loop_goes_on_and_finds_every_token(self):
        prompts = random_prompts(2)
        with tiny_llm(on_step=RaisesAt(1, 3, 4)) as llm:
            for prompt in prompts:
                llm.add_request(prompt, greedy(6), request_id=str(len(prompt)))
            finished, num_raised = {}, 0
            while llm.has_unfinished_requests():
                try:
                    outputs = llm.step()
                except ZeroDivisionError:
                    num_raised += 1
                    continue
                finished |= {o.request_id: o.token_ids for o in outputs if o.finished}
            expected = {str(len(p)): llm.generate([p], greedy(6))[0].token_ids for p in prompts}

        assert num_raised == 3
        assert finished == expected

    def test_a_stream_goes_on_and_finds_every_token(self):
        with tiny_llm(on_step=RaisesAt(2, 5)) as llm:
            stream, token_ids, num_raised = llm.stream([1, 2, 3], greedy(6)), [], 0
            while True:
                try:
                    token_ids += next(stream).token_ids
                except ZeroDivisionError:
                    num_raised += 1
                except StopIteration:
                    break
            assert tuple(token_ids) == llm.generate([[1, 2, 3]], greedy(6))[0].token_ids

        assert num_raised == 2

    def test_the_others_are_called_all_the_same(self):
        first, second = RaisesAt(1, 2), RaisesAt(2)
        with tiny_llm(on_step=first) as llm:
            llm._engine.subscribe(second)
            llm.add_request([1, 2, 3], greedy(3))
            for _ in range(2):
                with pytest.raises(ZeroDivisionError):
                    llm.step()
            while llm.has_unfinished_requests():
                llm.step()

        assert first.num_calls == second.num_calls == 3

    def test_an_async_engine_logs_it_and_delivers_every_token(self, caplog):
        async def answer():
            async with AsyncLLM(
                tiny_model_folder(),
                device="cpu",
                dtype="float32",
                num_kvcache_blocks=64,
                on_step=RaisesAt(1, 3),
            ) as llm:
                return [delta async for delta in llm.stream(PROMPTS[0], greedy(6))]

        with caplog.at_level(logging.ERROR, logger="nanovllm"):
            deltas = asyncio.run(answer())

        assert sum(len(delta.token_ids) for delta in deltas) == 6
        assert deltas[-1].finish_reason == "length"
        assert len(caplog.records) == 2
