"""An engine that is always a step ahead of a late device gives the tokens of one that waits."""

import random
import threading

import pytest

from graphs import ring
from nanovllm import SamplingParams
from nanovllm.core import check
from nanovllm.engine_thread import EngineThread
from nanovllm.runtime import graph_executor, staging
from tests.checkpoints import greedy_tokens
from tests.engines import SCHEDULES, greedy, is_idle, random_prompts
from tests.interrupts import interrupted_at
from tests.runtime.graph_engines import graph_llm
from tests.runtime.simulated_queue import SimulatedQueue

NUM_TOKENS = 10


def expected(prompts):
    return [greedy_tokens("llama", prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_steps_are_submitted_before_the_last_one_is_done(seed):
    prompts = random_prompts(4)
    queue = SimulatedQueue(seed)
    with graph_llm(queue=queue, max_num_seqs=8) as llm:
        outputs = llm.generate(prompts, greedy(NUM_TOKENS))

        assert is_idle(llm)
    assert [output.token_ids for output in outputs] == expected(prompts)
    if seed is None:
        assert queue.most_waiting == 6  # two steps: an upload, the step, a download each


@pytest.mark.parametrize("schedule", ["chunked", "preempted", "tiny blocks", "one at a time"])
def test_no_schedule_changes_a_token(schedule):
    prompts = random_prompts(8, seed=1)
    with graph_llm(queue=SimulatedQueue(7), **SCHEDULES[schedule]) as llm:
        first = llm.generate(prompts, greedy(NUM_TOKENS))
        again = llm.generate(prompts, greedy(NUM_TOKENS))
        stats = llm.stats()

        assert is_idle(llm)
    assert [output.token_ids for output in first] == expected(prompts)
    assert [output.token_ids for output in again] == expected(prompts)
    if schedule == "preempted":
        assert stats.num_preemptions


def test_rows_that_look_back_wait_for_their_tokens_and_then_go_on_ahead():
    """A request with penalties among others: while it runs, no step is planned ahead."""
    prompts = random_prompts(3)
    looks_back = SamplingParams(
        temperature=0, max_tokens=4, repetition_penalty=1.3, ignore_eos=True
    )
    params = [greedy(NUM_TOKENS), looks_back, greedy(NUM_TOKENS)]
    with graph_llm(max_num_seqs=8) as llm:
        want = llm.generate(prompts, params)
    with graph_llm(queue=SimulatedQueue(3), max_num_seqs=8) as llm:
        outputs = llm.generate(prompts, params)

    assert [output.token_ids for output in outputs] == [output.token_ids for output in want]


def test_a_stop_token_ends_a_request_a_step_late_and_nothing_of_it_is_seen():
    prompts = random_prompts(3)
    plain = expected(prompts)
    stops = plain[0][3]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, stop_token_ids=(stops,))
    with graph_llm(queue=SimulatedQueue(), max_num_seqs=8) as llm:
        outputs = llm.generate(prompts, params)

        assert is_idle(llm)
    for output, tokens in zip(outputs, plain, strict=True):
        end = tokens.index(stops) + 1 if stops in tokens else NUM_TOKENS
        assert output.token_ids == tokens[:end]
        assert output.finish_reason == ("stop" if stops in tokens else "length")


@pytest.mark.parametrize("seed", range(25))
def test_random_arrivals_and_aborts_leave_the_others_alone(seed):
    rng = random.Random(seed)
    prompts = random_prompts(8, seed=seed)
    schedule = SCHEDULES[rng.choice(list(SCHEDULES))]
    left, done = list(range(8)), {}
    aborted = set()
    with graph_llm(queue=SimulatedQueue(seed), **schedule) as llm:
        while left or llm.has_unfinished_requests():
            if left and rng.random() < 0.4:
                index = left.pop()
                llm.add_request(prompts[index], greedy(NUM_TOKENS), request_id=str(index))
            if rng.random() < 0.05:
                victim = str(rng.randrange(8))
                if llm.abort(victim):
                    aborted.add(victim)
            if rng.random() < 0.05:
                check(llm.state, at_rest=True)
            for output in llm.step():
                if output.finished:
                    done[output.request_id] = output
        assert is_idle(llm)
    assert set(done) == {str(index) for index in range(8)}
    for request_id, output in done.items():
        tokens = greedy_tokens("llama", prompts[int(request_id)], NUM_TOKENS)
        if request_id in aborted:
            assert output.token_ids == tokens[: len(output.token_ids)]
        else:
            assert output.token_ids == tokens


def test_the_state_that_is_handed_out_is_at_rest_and_the_tokens_are_not_lost():
    prompts = random_prompts(3)
    with graph_llm(queue=SimulatedQueue(), max_num_seqs=8) as llm:
        for index, prompt in enumerate(prompts):
            llm.add_request(prompt, greedy(NUM_TOKENS), request_id=str(index))
        done = {}
        while llm.has_unfinished_requests():
            check(llm.state, at_rest=True)
            done.update({o.request_id: o for o in llm.step() if o.finished})

    assert [done[str(index)].token_ids for index in range(3)] == expected(prompts)


@pytest.mark.parametrize("error", [RuntimeError("lost"), KeyboardInterrupt()])
def test_an_error_of_the_device_ends_what_was_on_its_way_and_nothing_else(error):
    prompts = random_prompts(3)
    queue = SimulatedQueue()
    with graph_llm(queue=queue, max_num_seqs=8) as llm:
        for prompt in prompts:
            llm.add_request(prompt, greedy(NUM_TOKENS))
        llm.step()
        llm.step()

        def broken():
            raise error

        queue.work[1] = broken
        if isinstance(error, KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                llm.step()
        else:
            outputs = llm.step()
            assert [output.finish_reason for output in outputs] == ["error"] * 3
            assert all("RuntimeError: lost" in output.error for output in outputs)
        assert is_idle(llm)
        outputs = llm.generate(prompts, greedy(NUM_TOKENS))

    assert [output.token_ids for output in outputs] == expected(prompts)


def test_closing_forgets_a_step_that_is_on_its_way():
    with graph_llm(queue=SimulatedQueue(), max_num_seqs=8) as llm:
        llm.add_request([1, 2, 3], greedy(NUM_TOKENS))
        llm.step()
        assert llm.has_unfinished_requests()
        llm.close()

        assert not llm._engine.has_unfinished_requests()
        assert is_idle(llm)


def test_every_step_is_told_of_also_if_asking_for_the_state_took_it_in():
    records = []
    with graph_llm(queue=SimulatedQueue(), max_num_seqs=8) as llm:
        llm.subscribe(records.append)
        llm.add_request([1, 2, 3], greedy(6))
        while llm.has_unfinished_requests():
            check(llm.state, at_rest=True)
            llm.step()
        stats = llm.stats()

    assert [record.index for record in records] == list(range(stats.num_steps))
    assert sum(len(record.sampled) for record in records) == 6
    assert sum(len(record.finished) for record in records) == 1


def test_nothing_is_left_on_its_way_when_all_have_ended():
    """A stop token is found out a step late, when another step was submitted already."""
    prompt = random_prompts(1)[0]
    (stops,) = greedy_tokens("llama", prompt, 3)[2:]
    params = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=(stops,))
    records = []
    with graph_llm(queue=SimulatedQueue(), max_num_seqs=8) as llm:
        llm.subscribe(records.append)
        (output,) = llm.generate(prompt, params)

        assert output.finish_reason == "stop"
        assert not llm.has_unfinished_requests()
        llm.generate(prompt, greedy(2))
    assert all(record.sampled for record in records), "no step that nobody wanted"


def test_asking_for_the_state_from_another_thread_never_holds_up_an_answer():
    """It takes in the step on its way, which the engine's own thread then has to deliver."""
    with graph_llm(queue=SimulatedQueue(), max_num_seqs=8) as llm:
        thread = EngineThread(llm._engine)
        deliver = thread._deliver

        def deliver_and_look():
            deliver()
            looking = threading.Thread(target=lambda: llm.state)
            looking.start()
            looking.join()

        thread._deliver = deliver_and_look
        ended = threading.Event()
        tokens = []

        def subscriber(deltas, has_ended):
            tokens.extend(token for delta in deltas for token in delta.token_ids)
            if has_ended:
                ended.set()

        def enter(engine):
            prompt = llm._prompts.read_one([1, 2, 3], greedy(4))
            (request,) = engine.add([prompt])
            thread.subscribe(request, subscriber)

        thread.call(enter).result()
        assert ended.wait(20)
        thread.close()

    assert tuple(tokens) == greedy_tokens("llama", [1, 2, 3], 4)


@pytest.mark.parametrize("part", range(3))
def test_an_interrupt_at_any_line_of_the_executor_leaves_it_fit_for_the_next_step(part):
    files = {module.__file__ for module in (graph_executor, staging, ring)}
    prompts = random_prompts(3)
    want = [greedy_tokens("llama", prompt, 3) for prompt in prompts]

    def is_counted(code):
        return code.co_filename in files

    with graph_llm(max_num_seqs=4, sizes=(4,)) as llm:
        number = 1 + part
        while interrupted_at(number, lambda: llm.generate(prompts, greedy(3)), is_counted):
            assert is_idle(llm)
            outputs = llm.generate(prompts, greedy(3))
            assert [output.token_ids for output in outputs] == want, number
            number += 9
    assert number > 100
