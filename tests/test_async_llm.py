"""The engine for asyncio: nothing blocks the loop, nothing is left behind, answers never cross."""

import asyncio
import statistics
import threading
import time

import pytest

from nanovllm import LLM, AsyncLLM, NanoVLLMError, RequestError
from tests.checkpoints import VOCAB_SIZE, checkpoint_folder, greedy_tokens
from tests.engines import greedy, is_idle, random_prompts


def make(**options):
    return AsyncLLM(
        checkpoint_folder("llama"),
        device="cpu",
        dtype="float32",
        attention_backend="torch",
        skip_tokenizer_init=True,
        **{"num_kvcache_blocks": 256, **options},
    )


@pytest.fixture
def llm():
    llm = make()
    yield llm
    llm.close()


async def until_idle(llm):
    for _ in range(500):
        if not llm.state.num_unfinished:
            break
        await asyncio.sleep(0.01)
    assert is_idle(llm)
    assert not llm._thread._subscribers


def test_many_tasks_get_their_own_answers(llm):
    prompts = random_prompts(40)

    async def main():
        answers = await asyncio.gather(*(llm.generate(prompt, greedy(5)) for prompt in prompts))
        await until_idle(llm)
        return [answer[0].token_ids for answer in answers]

    assert asyncio.run(main()) == [greedy_tokens("llama", prompt, 5) for prompt in prompts]


def test_a_stream_adds_up_and_a_slow_reader_gets_it_merged(llm):
    async def read(pause_s):
        deltas = []
        async for delta in llm.stream([1, 2, 3], greedy(30)):
            deltas.append(delta)
            await asyncio.sleep(pause_s)
        return deltas

    fast, slow = asyncio.run(read(0)), asyncio.run(read(0.1))

    for deltas in (fast, slow):
        assert sum((delta.token_ids for delta in deltas), ()) == greedy_tokens(
            "llama", [1, 2, 3], 30
        )
        assert deltas[-1].finish_reason == "length"
    assert len(slow) < len(fast)


def test_leaving_a_stream_aborts_it(llm):
    async def main():
        stream = llm.stream([1, 2, 3], greedy(200))
        async for _ in stream:
            break
        await stream.aclose()
        await until_idle(llm)

    asyncio.run(main())


@pytest.mark.parametrize("after_s", [0, 0.001, 0.02])
def test_cancelling_a_task_aborts_its_requests(llm, after_s):
    async def main():
        task = asyncio.create_task(llm.generate(random_prompts(5), greedy(200)))
        await asyncio.sleep(after_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_idle(llm)

    asyncio.run(main())


def test_abort_by_id_ends_the_stream_with_that_reason(llm):
    async def main():
        reasons = []
        async for delta in llm.stream([1, 2], greedy(200), request_id="mine"):
            if not reasons:
                assert await llm.abort("mine")
            reasons.append(delta.finish_reason)
        assert not await llm.abort("mine")
        return reasons

    assert asyncio.run(main())[-1] == "abort"


@pytest.mark.parametrize("prompt", [[], [VOCAB_SIZE], "text", [1.5]])
def test_mistakes_are_raised_in_the_caller(llm, prompt):
    async def main():
        with pytest.raises(RequestError):
            await llm.generate([prompt], greedy(1))
        with pytest.raises(RequestError):
            await anext(llm.stream(prompt))
        assert len(await llm.generate([1, 2], greedy(2))) == 1

    asyncio.run(main())


def test_a_request_refused_at_admission_is_raised_in_the_caller():
    llm = make(kvcache_block_size=4, num_kvcache_blocks=8, max_model_len=250)

    async def main():
        with pytest.raises(RequestError, match="blocks"):
            await llm.generate([1] * 20, greedy(100))
        await until_idle(llm)

    asyncio.run(main())
    llm.close()


def test_a_hook_that_raises_is_logged_and_the_engine_goes_on(caplog):
    def hook(record):
        raise ZeroDivisionError

    llm = make(on_step=hook)
    (output,) = asyncio.run(llm.generate([1, 2, 3], greedy(4)))
    llm.close()

    assert output.token_ids == greedy_tokens("llama", [1, 2, 3], 4)
    assert "on_step" in caplog.text


def test_the_loop_is_never_held_up_by_a_step(llm):
    """A step that takes long, and a coroutine that wants to run every few milliseconds."""
    executor = llm._engine._loop.executor

    class Slow:
        close = executor.close
        recover = executor.recover

        def submit(self, batch, rows):
            time.sleep(0.05)
            return executor.submit(batch, rows)

    llm._engine._loop.executor = Slow()

    async def main():
        tasks = [asyncio.create_task(llm.generate(p, greedy(5))) for p in random_prompts(4)]
        waits_s = []
        while not all(task.done() for task in tasks):
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            waits_s.append(time.perf_counter() - before)
        return waits_s

    # The median, as a busy machine may hold up any one of them: a step would hold up each.
    assert statistics.median(asyncio.run(main())) < 0.04


def test_a_conversation_is_answered_as_by_the_engine_without_asyncio():
    from tests.model_folder import tiny_model_folder

    messages = [{"role": "user", "content": "walk"}]
    options = {"device": "cpu", "dtype": "float32", "attention_backend": "torch"}
    with LLM(tiny_model_folder(), num_kvcache_blocks=64, **options) as llm:
        (expected,) = llm.chat(messages, greedy(4))

    async def main():
        async with AsyncLLM(tiny_model_folder(), num_kvcache_blocks=64, **options) as llm:
            return await llm.chat([messages, messages], greedy(4), priority=1, deadline_s=60)

    assert [output.text for output in asyncio.run(main())] == [expected.text] * 2


def test_a_list_is_queued_as_a_whole_or_not_at_all():
    llm = make(kvcache_block_size=4, num_kvcache_blocks=8, max_model_len=250)

    async def main():
        with pytest.raises(RequestError, match="blocks"):
            await llm.generate([[1, 2], [3] * 20], [greedy(2), greedy(100)])

    asyncio.run(main())
    assert llm.stats().num_requests == 0
    llm.close()


def test_one_engine_serves_loops_in_several_threads(llm):
    prompts = random_prompts(6)
    answers = {}

    def work(index):
        (output,) = asyncio.run(llm.generate(prompts[index], greedy(4)))
        answers[index] = output.token_ids

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert answers == {i: greedy_tokens("llama", prompt, 4) for i, prompt in enumerate(prompts)}


def test_several_engines_run_side_by_side(llm):
    async def main():
        async with make(kvcache_block_size=2) as other:
            one, two = await asyncio.gather(
                llm.generate([1, 2, 3], greedy(6)), other.generate([1, 2, 3], greedy(6))
            )
        return one[0].token_ids, two[0].token_ids

    expected = greedy_tokens("llama", [1, 2, 3], 6)
    assert asyncio.run(main()) == (expected, expected)


def test_closing_ends_streams_and_the_thread_and_may_be_repeated():
    before = threading.active_count()
    llm = make()

    async def main():
        reasons = []
        async for delta in llm.stream([1, 2], greedy(200)):
            reasons.append(delta.finish_reason)
            if len(reasons) == 1:
                await asyncio.to_thread(llm.close)
        with pytest.raises(NanoVLLMError, match="closed"):
            await llm.generate([1], greedy(1))
        return reasons

    reasons = asyncio.run(main())
    llm.close()

    assert reasons[-1] == "abort"
    assert threading.active_count() <= before + 1  # asyncio's own pool may keep one


def test_an_idle_engine_uses_no_cpu(llm):
    asyncio.run(llm.generate([1, 2], greedy(3)))
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)

    assert time.process_time() - before < 0.1
