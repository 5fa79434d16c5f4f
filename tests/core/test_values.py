"""States are values: reproducible, unaffected by what comes after, and cheap to replace."""

import itertools
import pickle
import random
import statistics
import time

import pytest

from nanovllm.core import (
    EngineState,
    SchedulerLimits,
    Sequence,
    admit,
    build_batch,
    check,
    postprocess,
    schedule,
)
from nanovllm.sampling_params import SamplingParams
from tests.core.fake_engine import drawn_token

LIMITS = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=7, max_model_len=100)


def run(num_steps, state=None):
    """States of a run that preempts and hits, the states in flight included."""
    if state is None:
        rng = random.Random(3)
        state = EngineState.create(14, 3)
        head = [rng.randrange(3) for _ in range(6)]
        for seq_id in range(6):
            prompt = head + [rng.randrange(3) for _ in range(seq_id)]
            state = admit(
                state, Sequence.create(seq_id, prompt, SamplingParams(max_tokens=20)), LIMITS
            )
    states = [state]
    for _ in range(num_steps):
        state, plan = schedule(state, LIMITS)
        states.append(state)
        state, _ = postprocess(state, plan, [drawn_token(seq) for seq in plan.scheduled])
        states.append(state)
    return states


def test_equal_inputs_give_equal_states():
    first, second = run(40), run(40)

    assert first == second
    assert all(a != b for a, b in itertools.pairwise(first))


def test_old_states_are_as_they_were_after_50_further_steps():
    states = run(60)
    pickled = [pickle.dumps(state) for state in run(10)]
    assert [pickle.loads(data) for data in pickled] == states[: len(pickled)]

    for state in states[: len(pickled)]:
        check(state, LIMITS)


def test_a_state_that_was_pickled_goes_on_like_the_original():
    states = run(20)
    restored = pickle.loads(pickle.dumps(states[10]))

    assert restored == states[10]
    assert run(5, restored) == run(5, states[10])


def test_going_on_from_an_old_state_does_not_disturb_the_newer_ones():
    states = run(20)
    before = pickle.dumps(states)
    run(10, states[4])

    assert pickle.loads(before) == states


def step_cost_s(num_tokens, block_size, *, num_steps=150):
    """Median seconds of a decode step of one sequence of so many tokens."""
    limits = SchedulerLimits(1, 10**6, 10**6)
    state = EngineState.create(num_tokens // block_size + num_steps + 2, block_size)
    seq = Sequence.create(0, [1] * num_tokens, SamplingParams(max_tokens=num_steps + 1))
    state = admit(state, seq, limits)
    state, plan = schedule(state, limits)
    state, _ = postprocess(state, plan, [2])
    durations = []
    for _ in range(num_steps):
        start = time.perf_counter()
        state, plan = schedule(state, limits)
        build_batch(plan)
        state, _ = postprocess(state, plan, [2])
        durations.append(time.perf_counter() - start)
    return statistics.median(durations)


@pytest.mark.parametrize("block_size", [16, 256])
def test_a_step_at_4000_tokens_costs_about_what_it_costs_at_10(block_size):
    """A copy of all tokens would cost 20 times as much; noise on a busy machine, at most thrice."""
    costs = [(step_cost_s(10, block_size), step_cost_s(4000, block_size)) for _ in range(5)]

    assert min(long / short for short, long in costs) < 2
