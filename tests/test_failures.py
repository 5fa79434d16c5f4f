"""One request's trouble stays its own, and the engine goes on."""

import importlib
from pathlib import Path

import pytest
import torch

import nanovllm
from nanovllm import SamplingParams
from tests.checkpoints import greedy_tokens
from tests.engines import greedy, is_idle, random_prompts, tiny_llm
from tests.interrupts import interrupted_at

HOLDING_THE_LOCK = ("hold", "_abort_dropped")


class BrokenOnce:
    """An executor that raises at one call, and works before and after."""

    def __init__(self, executor, at, error):
        self.executor, self.at, self.error = executor, at, error
        self.num_calls = 0

    def submit(self, batch, rows):
        self.num_calls += 1
        if self.num_calls == self.at:
            raise self.error
        return self.executor.submit(batch, rows)

    def recover(self):
        self.executor.recover()

    def close(self):
        self.executor.close()


@pytest.mark.parametrize("at", [1, 3])
def test_an_exception_in_a_step_fails_what_was_in_it_and_nothing_else(at):
    prompts = random_prompts(3)
    with tiny_llm() as llm:
        broken = BrokenOnce(llm._engine._loop.executor, at, RuntimeError("out of cheese"))
        llm._engine._loop.executor = broken
        outputs = llm.generate(prompts, greedy(6))

        assert [output.finish_reason for output in outputs] == ["error"] * 3
        assert all("RuntimeError: out of cheese" in output.error for output in outputs)
        assert [len(output.token_ids) for output in outputs] == [at - 1] * 3
        assert is_idle(llm)
        after = llm.generate(prompts, greedy(6))
        assert [o.token_ids for o in after] == [greedy_tokens("llama", p, 6) for p in prompts]


def test_a_second_failure_is_reported_like_the_first():
    with tiny_llm() as llm:
        for _ in range(2):
            broken = BrokenOnce(llm._engine._loop.executor, 1, ValueError("again"))
            llm._engine._loop.executor, executor = broken, llm._engine._loop.executor
            (output,) = llm.generate([1, 2], greedy(3))
            llm._engine._loop.executor = executor

            assert "ValueError: again" in output.error


@pytest.mark.parametrize("name", ["build_batch", "schedule"])
def test_an_exception_while_a_step_is_prepared_fails_what_was_planned(monkeypatch, name):
    """Before anything was submitted: a step that has no executor to fail in."""
    from nanovllm import step_loop

    with tiny_llm() as llm, monkeypatch.context() as patch:
        function, calls = getattr(step_loop, name), []

        def raises_once(*args):
            calls.append(args)
            if len(calls) == 2:
                raise RuntimeError("out of cheese")
            return function(*args)

        patch.setattr(step_loop, name, raises_once)
        outputs = llm.generate(random_prompts(3), greedy(6))
        if name == "build_batch":
            assert [output.finish_reason for output in outputs] == ["error"] * 3
            assert all("out of cheese" in output.error for output in outputs)
        else:  # nothing was planned yet: nothing is lost
            assert [output.finish_reason for output in outputs] == ["length"] * 3
        assert is_idle(llm)
        assert llm.generate([1, 2], greedy(2))[0].finish_reason == "length"


def test_an_interrupt_comes_out_and_leaves_nothing_behind():
    with tiny_llm() as llm:
        executor = llm._engine._loop.executor
        llm._engine._loop.executor = BrokenOnce(executor, 2, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            llm.generate(random_prompts(3), greedy(6))

        assert is_idle(llm)
        assert llm.generate([1, 2], greedy(2))[0].finish_reason == "length"


def test_an_interrupt_anywhere_in_a_step_leaves_nothing_behind(monkeypatch):
    """At each of the calls that a step makes, one after the other."""
    from nanovllm import step_loop

    for name in ("build_batch", "postprocess"):
        for before in (True, False):
            with tiny_llm() as llm, monkeypatch.context() as patch:
                function = getattr(step_loop, name)

                def interrupted(*args, function=function, before=before):
                    if before:
                        raise KeyboardInterrupt
                    function(*args)
                    raise KeyboardInterrupt

                llm.add_request([4, 5], greedy(3), request_id="waiting")
                llm.step()
                patch.setattr(step_loop, name, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    llm.generate(random_prompts(3), greedy(6))
                patch.undo()

                assert is_idle(llm)
                assert llm.generate([1, 2], greedy(2))[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("step_loop", "schedule"),
        ("step_loop", "build_batch"),
        ("step_loop", "postprocess"),
        ("intake", "admit"),
        ("live_requests", "abort"),
    ],
)
def test_a_stream_that_is_collected_in_the_middle_of_anything_is_aborted_after_it(
    monkeypatch, module, name
):
    module = importlib.import_module(f"nanovllm.{module}")

    with tiny_llm() as llm:
        streams = [llm.stream([1, 2, 3], greedy(9))]
        next(streams[0])
        function = getattr(module, name)

        def collecting(*args):
            streams.clear()  # as the garbage collector does with a cycle, at any allocation
            return function(*args)

        monkeypatch.setattr(module, name, collecting)
        other = llm.stream([9], greedy(9))
        next(other)
        other.close()
        (output,) = llm.generate([7, 8], greedy(4))

        assert output.token_ids == greedy_tokens("llama", [7, 8], 4)
        assert is_idle(llm)


def test_an_interrupt_at_any_line_leaves_state_and_requests_in_agreement():
    """Raised by a trace function, at every 7th line that the engine runs."""
    folder = str(Path(nanovllm.__file__).parent)

    def is_counted(code):
        # Not where a lock is taken and let go: a trace function can cut in between the two halves
        # of a `with`, which a signal can not.
        return code.co_filename.startswith(folder) and code.co_name not in HOLDING_THE_LOCK

    with tiny_llm(attention_backend="torch") as llm:
        line = 1
        while interrupted_at(line, lambda: llm.generate([[1, 2, 3], [4]], greedy(2)), is_counted):
            assert llm.generate([5, 6], greedy(2))[0].finish_reason == "length"
            assert is_idle(llm)
            line += 7

        assert line > 700, "there were that many lines to interrupt"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_logits_that_are_not_finite_fail_their_own_request_only(value, temperature):
    prompts = random_prompts(3)
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=4, ignore_eos=True)
    with tiny_llm(attention_backend="torch") as llm:
        expected = llm.generate(prompts, params)
        decoder = llm._engine._loop.executor._decoder
        logits = type(decoder).logits

        def poisoned(hidden):
            result = logits(decoder, hidden)
            if len(result) == 3:
                result[1] = value
            return result

        llm._engine._loop.executor._decoder = _Wrapped(decoder, poisoned)
        outputs = llm.generate(prompts, params)

        assert outputs[1].finish_reason == "error"
        assert "not finite" in outputs[1].error
        assert [outputs[i].token_ids for i in (0, 2)] == [expected[i].token_ids for i in (0, 2)]
        assert is_idle(llm)


class _Wrapped:
    """A decoder with other logits."""

    def __init__(self, decoder, logits):
        self.forward, self.logits = decoder.forward, logits


def test_a_hook_that_raises_comes_out_of_the_step_and_leaves_the_engine_whole():
    calls = []

    def hook(record):
        calls.append(record)
        if len(calls) == 3:
            raise ZeroDivisionError

    with tiny_llm(on_step=hook) as llm:
        with pytest.raises(ZeroDivisionError):
            llm.generate([1, 2, 3], greedy(6))

        assert is_idle(llm)
        assert llm.generate([1, 2, 3], greedy(6))[0].token_ids == greedy_tokens(
            "llama", [1, 2, 3], 6
        )
        assert [record.index for record in calls] == list(range(len(calls)))


def test_a_fault_of_the_text_side_fails_its_own_request_only(monkeypatch):
    from nanovllm.request import Completion

    prompts = random_prompts(3)
    append = Completion.append

    def faulty(self, token_id, logprobs, finish_reason):
        if self.seq_id == 1 and len(self.token_ids) == 2:
            raise LookupError("no such token")
        append(self, token_id, logprobs, finish_reason)

    with tiny_llm() as llm:
        monkeypatch.setattr(Completion, "append", faulty)
        outputs = llm.generate(prompts, greedy(5))

        assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
        assert "LookupError" in outputs[1].error
        assert is_idle(llm)


def test_torch_is_left_as_it_was():
    def settings():
        return (
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.random.get_rng_state().tolist(),
        )

    before = settings()
    with tiny_llm() as llm:
        llm.generate([1, 2, 3], SamplingParams(max_tokens=4))

    assert settings() == before
