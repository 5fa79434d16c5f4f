"""Priorities, deadlines and the limit on the queue, as callers meet them."""

import asyncio
import threading

import pytest

from nanovllm import AsyncLLM, QueueFullError, RequestError
from tests.checkpoints import checkpoint_folder, greedy_tokens
from tests.engines import greedy, is_idle, tiny_llm


class Clock:
    def __init__(self):
        self.now_s = 10.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    return clock


def run_out(llm):
    finished = {}
    while llm.has_unfinished_requests():
        for output in llm.step():
            if output.finished:
                finished[output.request_id] = output
    return finished


def test_an_urgent_request_takes_the_seat_of_one_that_then_ends_as_if_alone():
    with tiny_llm(max_num_seqs=1) as llm:
        llm.add_request([1, 2, 3], greedy(9), request_id="batch", priority=5)
        llm.step()
        llm.add_request([4, 5], greedy(3), request_id="also batch", priority=5)
        llm.add_request([6, 7], greedy(2), request_id="voice")
        finished = run_out(llm)

        assert list(finished) == ["voice", "batch", "also batch"]
        assert finished["batch"].token_ids == greedy_tokens("llama", [1, 2, 3], 9)
        assert finished["batch"].metrics.num_preemptions == 1
        assert is_idle(llm)


def test_a_deadline_ends_a_request_with_what_it_has_and_says_so(clock):
    with tiny_llm() as llm:
        llm.add_request([1, 2], greedy(50), request_id="late", deadline_s=2.5)
        llm.add_request([3, 4], greedy(4), request_id="other")
        for _ in range(3):
            llm.step()
        clock.now_s += 2.5
        outputs = {output.request_id: output for output in llm.step()}
        late = outputs["late"]

        assert (late.finish_reason, late.outputs[0].stop_reason) == ("abort", "deadline")
        assert late.error == "its deadline, 2.5 s after its arrival, came after 3 tokens"
        assert late.token_ids == greedy_tokens("llama", [1, 2], 3)
        assert late.metrics.finished_s == 12.5
        assert outputs["other"].finish_reason == "length"
        assert is_idle(llm)


def test_a_request_that_expires_in_the_queue_is_told_of_even_if_nothing_else_is_left(clock):
    with tiny_llm() as llm:
        stream = llm.stream([1, 2], greedy(5, n=2), deadline_s=1)
        clock.now_s += 1
        deltas = list(stream)

        assert [delta.finish_reason for delta in deltas] == ["abort", "abort"]
        assert [delta.index for delta in deltas] == [0, 1]
        assert stream.output.metrics.first_scheduled_s is None
        assert is_idle(llm)


@pytest.mark.parametrize("priority", [1.0, True, None, "high", [1]])
def test_a_priority_that_is_no_integer_is_refused(priority):
    with tiny_llm() as llm:
        for call in (llm.generate, llm.stream, llm.add_request):
            with pytest.raises(RequestError, match=r"`priority` is .* the more urgent"):
                call([1, 2], priority=priority)
        assert is_idle(llm)


@pytest.mark.parametrize("deadline_s", [0, -1, float("nan"), float("inf"), True, "soon"])
def test_a_deadline_that_is_no_time_ahead_is_refused(deadline_s):
    with tiny_llm() as llm:
        for call in (llm.generate, llm.stream, llm.add_request):
            with pytest.raises(RequestError, match=r"`deadline_s` is .* seconds over 0"):
                call([1, 2], deadline_s=deadline_s)
        assert is_idle(llm)


def test_a_full_queue_refuses_with_both_numbers_and_queues_nothing():
    with tiny_llm(max_queued_requests=2, max_num_seqs=1) as llm:
        llm.add_request([1], greedy(9))
        llm.add_request([2], greedy(9, n=3))  # one request, whatever its completions
        with pytest.raises(QueueFullError, match=r"2 requests wait and 1 more .* is 2"):
            llm.add_request([3], greedy(9))
        llm.step()  # the first one has begun
        llm.add_request([3], greedy(9))
        with pytest.raises(QueueFullError):
            llm.stream([4])

        assert llm.stats().num_requests == 3
        assert len(run_out(llm)) == 3
        assert is_idle(llm)


def test_a_list_longer_than_the_queue_may_be_is_refused_as_a_whole():
    with tiny_llm(max_queued_requests=3) as llm:
        with pytest.raises(QueueFullError, match="0 requests wait and 4 more"):
            llm.generate([[1], [2], [3], [4]], greedy(2))
        assert llm.stats().num_requests == 0
        assert len(llm.generate([[1], [2], [3]], greedy(2))) == 3


def test_completions_of_one_prompt_compute_it_once():
    records = []
    prompt = list(range(1, 51))
    with tiny_llm(kvcache_block_size=16, on_step=records.append) as llm:
        (output,) = llm.generate(prompt, greedy(3, n=8))

    assert sum(record.num_prefill_tokens for record in records) == 50 + 7 * 2
    assert {each.token_ids for each in output.outputs} == {greedy_tokens("llama", prompt, 3)}


@pytest.fixture
def async_llm():
    llm = AsyncLLM(
        checkpoint_folder("llama"),
        device="cpu",
        dtype="float32",
        attention_backend="torch",
        skip_tokenizer_init=True,
        num_kvcache_blocks=256,
        max_num_seqs=1,
        max_queued_requests=4,
    )
    yield llm
    llm.close()


def test_asyncio_programs_have_the_same(async_llm):
    async def main():
        llm = async_llm
        with pytest.raises(QueueFullError):
            await llm.generate([[n] for n in range(5)], greedy(1))
        many = (llm.generate([n], greedy(40)) for n in range(20))
        answers = await asyncio.gather(*many, return_exceptions=True)
        assert any(isinstance(answer, QueueFullError) for answer in answers)
        with pytest.raises(RequestError, match="priority"):
            await llm.generate([1], priority="x")
        late = [d async for d in llm.stream([1, 2], greedy(40), deadline_s=1e-6, priority=-1)]
        (quick,) = await llm.generate([1, 2, 3], greedy(4), deadline_s=100, priority=3)
        await llm.reset_prefix_cache()
        return late, quick

    late, quick = asyncio.run(main())

    assert late[-1].finish_reason == "abort" and late[-1].stop_reason == "deadline"
    assert quick.token_ids == greedy_tokens("llama", [1, 2, 3], 4)
    assert async_llm.state.pool.num_cached == 0


def test_many_threads_with_priorities_and_deadlines_get_their_own_answers():
    answers = {}
    with tiny_llm(max_num_seqs=3, num_kvcache_blocks=24, kvcache_block_size=4) as llm:

        def work(index):
            prompt = [index + 1, 2 * index + 1, 3]
            deadline_s = None if index % 3 else 60.0
            (output,) = llm.generate(prompt, greedy(6), priority=index % 4, deadline_s=deadline_s)
            answers[index] = (prompt, output.token_ids)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert len(answers) == 9
        for prompt, token_ids in answers.values():
            assert token_ids == greedy_tokens("llama", prompt, 6)
        assert is_idle(llm)


@pytest.mark.parametrize("deadline_s", [10**400, -(10**400)])
def test_a_deadline_that_no_float_holds_is_refused(deadline_s):
    with tiny_llm() as llm, pytest.raises(RequestError, match="deadline_s"):
        llm.generate([1, 2], greedy(2), deadline_s=deadline_s)


@pytest.mark.parametrize("request_id", [[], 5, b"x", "", float("nan")])
def test_a_request_id_is_a_text_that_is_not_empty(request_id):
    with tiny_llm() as llm:
        with pytest.raises(RequestError, match="request_id"):
            llm.add_request([1, 2], greedy(2), request_id=request_id)
        assert not llm.has_unfinished_requests()


def test_a_preview_of_a_closed_engine_says_so():
    with tiny_llm() as llm:
        llm.close()
        assert "closed" in llm.preview([1, 2], greedy(2)).obstacle
