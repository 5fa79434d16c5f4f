"""Whatever cuts an engine off, and whoever calls it back, state and requests agree afterwards."""

import asyncio
import gc
import threading

import attrs
import pytest

from nanovllm import NanoVLLMError
from nanovllm.core import (
    EngineState,
    SchedulerLimits,
    Sequence,
    admit,
    check,
    postprocess,
    schedule,
)
from nanovllm.engine_lock import EngineLock
from nanovllm.live_requests import LiveRequests
from nanovllm.outputs import TokenLogprobs
from nanovllm.request import Completion, Request
from nanovllm.sampling_params import SamplingParams
from tests.checkpoints import greedy_tokens
from tests.engines import greedy, is_idle, random_prompts, tiny_llm
from tests.runtime.graph_engines import graph_llm
from tests.runtime.simulated_queue import SimulatedQueue
from tests.test_async_llm import make, until_idle

LIMITS = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)


class Case:
    """Live requests by hand, one of each kind that a test asks for."""

    def __init__(self, *params):
        self.ended = []
        self.live = LiveRequests(EngineState.create(16, 4), on_end=self.ended.append)
        self.requests = []
        state = self.live.state
        for seq_id, one in enumerate(params):
            state = admit(state, Sequence.create(seq_id, [1, 2, 3 + seq_id], one), LIMITS)
            completion = Completion(0, seq_id, 0, one, None)
            self.requests.append(Request(f"{seq_id}", None, (1, 2, 3), [completion], 0.0))
        self.live.enter(state, self.requests)

    def step(self, token_ids, *, delivered):
        """One step of which the requests get only some of the tokens."""
        state, plan = schedule(self.live.state, LIMITS)
        self.live.state, outputs = postprocess(state, plan, token_ids)
        for output in outputs[:delivered]:
            scores = TokenLogprobs(output.new_token_id, -1.0, 1, ())
            self.requests[output.seq_id].completions[0].append(
                output.new_token_id, scores, output.finish_reason
            )

    def recover(self):
        self.live.recover()
        check(self.live.state, at_rest=True)
        live = {seq.seq_id: seq for seq in (*self.live.state.running, *self.live.state.waiting)}
        assert set(self.live.by_seq_id) == set(live)
        assert {id(r) for r in self.live.by_id.values()} == {
            id(r) for r, _ in self.live.by_seq_id.values()
        }
        for seq_id, (request, completion) in self.live.by_seq_id.items():
            assert not request.finished
            assert completion.token_ids == list(live[seq_id].completion_token_ids)
        assert sum(not r.finished for r in self.requests) == len(live)
        assert sorted(r.request_id for r in self.ended) == sorted(
            r.request_id for r in self.requests if r.finished
        )
        return [request.completions[0].finish_reason for request in self.requests]


def test_a_request_that_did_not_get_its_token_is_ended_and_its_blocks_are_free():
    case = Case(greedy(9), greedy(9, logprobs=1), greedy(9))
    case.step([7, 7, 7], delivered=1)

    assert case.recover() == [None, "abort", "abort"]
    assert case.live.state.pool.num_used == 1


def test_a_request_whose_text_ended_it_leaves_no_blocks_behind():
    """As a stop string does: the completion knows, the state does not yet."""
    case = Case(greedy(9), greedy(9))
    case.step([7, 7], delivered=2)
    case.requests[0].completions[0].end("stop")

    assert case.recover() == ["stop", None]
    assert case.live.state.pool.num_used == 1


def test_a_request_that_ended_in_the_state_only_is_ended():
    case = Case(greedy(1), greedy(9))
    case.step([7, 7], delivered=0)

    assert case.recover() == ["abort", "abort"]
    assert case.live.state.pool.num_used == 0


@pytest.mark.parametrize("missing", ["by_id", "state"])
def test_a_request_that_was_cut_off_while_it_was_added_is_forgotten(missing):
    case = Case(greedy(9))
    late = Completion(0, 5, 0, greedy(9), None)
    request = Request("late", None, (1,), [late], 0.0)
    case.requests.append(request)
    case.live.by_seq_id[5] = (request, late)
    if missing == "state":
        case.live.by_id["late"] = request
    case.live.recover()

    assert late.finish_reason == "abort"
    assert set(case.live.by_id) == {"0"} and set(case.live.by_seq_id) == {0}


def test_recovering_twice_changes_nothing_more():
    case = Case(greedy(9), greedy(9, logprobs=1))
    case.step([7, 7], delivered=1)
    first = case.recover()
    state = case.live.state

    assert case.recover() == first
    assert case.live.state == state
    assert len(case.ended) == 1


@pytest.mark.parametrize("at", ["before", "after"])
def test_logprobs_stay_aligned_when_a_token_was_being_taken_in(monkeypatch, at):
    append, calls = Completion.append, []

    def cut_off(self, token_id, logprobs, finish_reason):
        calls.append(self.seq_id)
        if len(calls) != 5:
            return append(self, token_id, logprobs, finish_reason)
        if at == "after":
            self.token_ids.append(token_id)  # and no further
        raise KeyboardInterrupt

    with tiny_llm() as llm:
        streams = [llm.stream(prompt, greedy(6, logprobs=1)) for prompt in random_prompts(3)]
        monkeypatch.setattr(Completion, "append", cut_off)
        with pytest.raises(KeyboardInterrupt):
            [next(stream) for stream in streams * 9]
        monkeypatch.undo()
        outputs = [stream.output for stream in streams]

        assert is_idle(llm)
        assert {output.finish_reason for output in outputs} == {"abort"}
        for output in outputs[:1] if at == "after" else outputs:
            assert len(output.outputs[0].logprobs) == len(output.token_ids)
        (after,) = llm.generate([1, 2], greedy(3, logprobs=1))
        assert len(after.outputs[0].logprobs) == 3


class TestFinalizers:
    """`abort_soon`, which the garbage collector calls wherever it likes."""

    def make(self):
        case = Case(greedy(9), greedy(9))
        return case, EngineLock(case.live, case.live.recover)

    def test_an_interrupt_in_it_loses_nothing(self, monkeypatch):
        case, lock = self.make()
        end = Completion.end

        def interrupted(self, *args, **kwargs):
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(Completion, "end", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lock.abort_soon(case.requests[0])
        assert Completion.end is end
        with lock.hold():
            assert case.requests[0].finished

        assert set(case.live.by_id) == {"1"}
        assert lock.at_rest is case.live.state

    def test_while_somebody_holds_the_engine_it_waits_for_the_end_and_returns_at_once(self):
        case, lock = self.make()
        with lock.hold():
            before = lock.at_rest
            lock.abort_soon(case.requests[1])
            assert not case.requests[1].finished
            assert lock.at_rest is before
        assert case.requests[1].finished
        assert lock.at_rest is case.live.state


class TestStepsOnTheirWay:
    """On a device that is always a step ahead, whoever calls finds one in the air."""

    def make(self):
        return graph_llm(queue=SimulatedQueue(), max_num_seqs=2)

    def begin(self, llm):
        streams = [llm.stream([index, 2, 3], greedy(6)) for index in range(2)]
        for stream in streams * 2:
            next(stream)
        assert llm._engine._loop.is_ahead
        return streams

    def test_an_abort_ends_its_own_request_and_no_other(self):
        with self.make() as llm:
            first, other = self.begin(llm)
            first.close()
            rest = sum((delta.token_ids for delta in other), ())

            assert first.output.finish_reason == "abort"
            assert is_idle(llm)
            assert rest and other.output.token_ids == greedy_tokens("llama", [1, 2, 3], 6)

    def test_aborting_the_last_one_leaves_nothing_to_do_but_to_land(self):
        with self.make() as llm:
            for stream in self.begin(llm):
                stream.close()
            while llm.has_unfinished_requests():
                llm.step()

            assert is_idle(llm)
            assert llm.generate([1, 2], greedy(2))[0].token_ids == greedy_tokens("llama", [1, 2], 2)

    def test_closing_leaves_none_in_the_air(self):
        with self.make() as llm:
            streams = self.begin(llm)
            llm.close()

            assert not llm.has_unfinished_requests()
            assert is_idle(llm)
            assert {stream.output.finish_reason for stream in streams} == {"abort"}


class TestHooksThatCallBack:
    def test_a_hook_may_look_abort_queue_and_subscribe(self):
        seen, others = [], []

        def hook(record):
            seen.append(
                (llm.stats().num_steps, llm.state.num_unfinished, llm.has_unfinished_requests())
            )
            if record.index == 2:
                assert llm.abort("first")
                others.append(llm.add_request([4, 5], greedy(2), request_id="of the hook"))
                others.append(llm.subscribe(lambda record: None))
            if record.index == 4:
                others[1]()

        with tiny_llm(on_step=hook) as llm:
            llm.add_request([1, 2, 3], greedy(50), request_id="first")
            finished = {}
            while llm.has_unfinished_requests():
                finished |= {o.request_id: o for o in llm.step() if o.finished}

            assert finished["first"].finish_reason == "abort"
            assert finished["of the hook"].token_ids == greedy_tokens("llama", [4, 5], 2)
            assert [num_steps for num_steps, _, _ in seen] == list(range(1, len(seen) + 1))
            assert is_idle(llm)

    def test_a_hook_may_generate_and_close(self):
        answers = []

        def hook(record):
            if record.index == 1:
                answers.extend(llm.generate([7, 8], greedy(2)))
            if record.index == 6:
                llm.close()

        with tiny_llm(on_step=hook) as llm:
            (output,) = llm.generate([1, 2, 3], greedy(50))

            assert answers[0].token_ids == greedy_tokens("llama", [7, 8], 2)
            assert output.finish_reason == "abort"
            assert is_idle(llm)

    def test_a_hook_that_closes_an_async_engine_ends_its_streams(self):
        def hook(record):
            if record.index == 3:
                llm.close()

        llm = make(on_step=hook)

        async def main():
            return [delta.finish_reason async for delta in llm.stream([1, 2], greedy(50))]

        assert asyncio.run(main())[-1] == "abort"
        llm.close()
        assert not llm._thread._subscribers

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_a_hook_that_ends_the_thread_leaves_nobody_waiting(self):
        class Ended(BaseException):
            pass

        def hook(record):
            if record.index == 3:
                raise Ended

        llm = make(on_step=hook)

        async def main():
            reasons = [d.finish_reason async for d in llm.stream([1, 2], greedy(50))]
            with pytest.raises(NanoVLLMError, match="closed"):
                await llm.generate([1], greedy(1))
            return reasons

        assert asyncio.run(asyncio.wait_for(main(), 60))[-1] == "abort"
        llm.close()
        assert is_idle(llm)


class TestConsumers:
    """What a consumer does is its own trouble."""

    @pytest.fixture
    def llm(self):
        llm = make()
        yield llm
        llm.close()

    def test_an_exception_in_one_ends_its_request_only(self, llm):
        async def faulty():
            async for _ in llm.stream([1, 2], greedy(200)):
                raise ZeroDivisionError

        async def main():
            results = await asyncio.gather(
                *(faulty() for _ in range(5)),
                llm.generate([1, 2, 3], greedy(6)),
                return_exceptions=True,
            )
            gc.collect()
            await until_idle(llm)
            return results

        *errors, (answer,) = asyncio.run(main())
        assert [type(error) for error in errors] == [ZeroDivisionError] * 5
        assert answer.token_ids == greedy_tokens("llama", [1, 2, 3], 6)

    @pytest.mark.parametrize("num_read", [0, 1])
    def test_a_loop_that_is_closed_under_its_streams_frees_them(self, llm, num_read):
        """Without cancelling: as an embedding that stops its loop and closes it."""
        loop = asyncio.new_event_loop()
        streams = [llm.stream([1, 2, n], greedy(250)) for n in range(1, 4)]

        async def read(stream):
            async for _ in stream:
                if num_read:
                    loop.stop()

        tasks = [loop.create_task(read(stream)) for stream in streams]
        if num_read:
            loop.run_forever()
        else:
            loop.run_until_complete(asyncio.sleep(0.05))
        loop.close()

        async def wait():
            await until_idle(llm)
            return await llm.generate([1, 2, 3], greedy(4))

        assert asyncio.run(wait())[0].token_ids == greedy_tokens("llama", [1, 2, 3], 4)
        # Never to be run to their end: told so, lest they complain of it.
        for task in tasks:
            task._log_destroy_pending = False
            task.get_coro().close()

    def test_a_thousand_short_streams_leave_nothing(self, llm):
        prompts = random_prompts(50, longest=16)

        async def one(index):
            return [
                token_id
                async for delta in llm.stream(prompts[index % 50], greedy(1 + index % 2))
                for token_id in delta.token_ids
            ]

        async def main():
            for start in range(0, 1000, 250):
                answers = await asyncio.gather(*(one(start + n) for n in range(250)))
                assert [len(answer) for answer in answers] == [1 + n % 2 for n in range(250)]
            await until_idle(llm)

        asyncio.run(main())
        assert llm.stats().num_requests == 1000
        assert not llm._thread._inbox


def test_threads_that_use_one_engine_and_abort_each_other_get_what_is_theirs():
    with tiny_llm(max_num_seqs=3, num_kvcache_blocks=64, kvcache_block_size=4) as llm:
        prompts, answers = random_prompts(8), {}
        want = [greedy_tokens("llama", prompt, 8) for prompt in prompts]

        def work(index):
            stream = llm.stream(prompts[index], greedy(8))
            if index % 2:
                next(stream)
                answers[index] = llm.abort(stream.request_id), stream.output.token_ids
            else:
                answers[index] = None, sum((delta.token_ids for delta in stream), ())

        threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        for index, (_, token_ids) in answers.items():
            assert token_ids == want[index][: len(token_ids)]
            assert index % 2 or len(token_ids) == 8
        assert is_idle(llm)


def test_params_of_a_request_are_values_that_no_engine_changes():
    params = SamplingParams(temperature=0, max_tokens=3, n=2, prompt_logprobs=1, ignore_eos=True)
    before = attrs.asdict(params)
    with tiny_llm() as llm:
        llm.generate([1, 2, 3], params)

    assert attrs.asdict(params) == before
