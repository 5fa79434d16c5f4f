"""Sequences of one request share their prompt: it is computed once, and nothing waits for ever."""

import pytest

from nanovllm.core import SchedulerLimits, reset_prefix_cache
from tests.core.fake_engine import FakeEngine, drawn_token, expected_completion

LIMITS = SchedulerLimits(max_num_seqs=16, max_num_batched_tokens=256, max_model_len=1000)
PROMPT = [(i * i) % 3 for i in range(50)]


def admit_siblings(engine, count, prompt=PROMPT, first_id=0, **others):
    for seq_id in range(first_id, first_id + count):
        engine.admit(seq_id, prompt, group_id=first_id, **{"max_tokens": 3, **others})


@pytest.mark.parametrize(
    ("block_size", "remainder"), [(16, 2), (4, 2), (10, 10), (25, 25), (49, 1), (1, 1)]
)
def test_a_prompt_is_computed_once_and_what_is_left_of_its_last_block_by_each_sibling(
    block_size, remainder
):
    engine = FakeEngine(512, block_size, LIMITS)
    admit_siblings(engine, 8)
    engine.step(drawn_token)
    assert engine.num_prefill_tokens == len(PROMPT)
    engine.step(drawn_token)

    assert engine.num_prefill_tokens == len(PROMPT) + 7 * remainder
    assert len(engine.state.running) == 8
    num_full = (len(PROMPT) - 1) // block_size  # -1: the last token is always computed
    num_own = engine.state.running[0].num_held_blocks - num_full
    assert engine.state.pool.num_used <= num_full + 8 * (num_own + 1)


@pytest.mark.parametrize(("block_size", "caching"), [(16, False), (50, True), (64, True)])
def test_where_no_block_can_be_shared_nobody_waits(block_size, caching):
    limits = SchedulerLimits(16, 1000, 1000)
    engine = FakeEngine(512, block_size, limits, caching=caching)
    admit_siblings(engine, 8)
    engine.step(drawn_token)

    assert len(engine.state.running) == 8


def test_a_prompt_in_chunks_is_waited_for_and_others_pass():
    engine = FakeEngine(512, 4, SchedulerLimits(16, 10, 1000))
    admit_siblings(engine, 3)
    engine.admit(9, [1, 2], max_tokens=1)
    first = engine.step(drawn_token)

    assert [output.seq_id for output in first] == [0, 9]
    assert [seq.seq_id for seq in engine.state.waiting] == [0, 1, 2]
    engine.run(drawn_token)
    assert engine.num_prefill_tokens == 50 + 2 + 2 * 2


def test_with_one_seat_each_finds_what_the_one_before_left():
    engine = FakeEngine(64, 4, SchedulerLimits(1, 256, 1000))
    admit_siblings(engine, 4)
    engine.run(drawn_token)

    assert engine.num_prefill_tokens == 50 + 3 * 2


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_when_the_first_is_aborted_the_next_computes_the_prompt_for_the_rest(num_steps):
    engine = FakeEngine(512, 4, SchedulerLimits(16, 10, 1000))
    admit_siblings(engine, 5)
    for _ in range(num_steps):
        engine.step(drawn_token)
    engine.abort(0)
    finished = engine.run(drawn_token)

    assert set(finished) == {1, 2, 3, 4}
    num_done = 10 * num_steps
    num_left = 50 - num_done // 4 * 4  # full blocks of the aborted one are found
    assert engine.num_prefill_tokens == num_done + num_left + 3 * 2


def test_when_the_first_fails_in_its_step_the_next_one_takes_over():
    engine = FakeEngine(512, 4, LIMITS)
    admit_siblings(engine, 3)
    engine.step(drawn_token, abort_in_flight=0)  # its K/V were never counted as computed
    finished = engine.run(drawn_token)

    assert set(finished) == {1, 2}
    assert engine.num_prefill_tokens == 50 + 50 + 2


def test_siblings_that_are_preempted_come_back_and_end_as_if_alone():
    engine = FakeEngine(17, 4, SchedulerLimits(8, 16, 1000))
    admit_siblings(engine, 4, prompt=PROMPT[:30], max_tokens=20)
    finished = engine.run(drawn_token)

    assert engine.preempted
    for output in finished.values():
        assert output.sequence.completion_token_ids == expected_completion(PROMPT[:30], 20)


def test_a_cache_that_is_reset_meanwhile_costs_one_more_prompt_and_not_one_for_each():
    engine = FakeEngine(512, 4, LIMITS)
    admit_siblings(engine, 4)
    engine.step(drawn_token)
    engine.state = reset_prefix_cache(engine.state)
    engine.run(drawn_token)

    assert engine.num_prefill_tokens == 2 * 50 + 2 * 2


def test_an_urgent_sibling_takes_no_seat_while_it_waits_for_its_prompt():
    engine = FakeEngine(512, 4, SchedulerLimits(2, 10, 1000))
    engine.admit(9, [1, 2], priority=5, max_tokens=30)
    engine.step(drawn_token)
    admit_siblings(engine, 2)
    while len(engine.state.running) < 2:
        engine.step(drawn_token)
        assert 9 in {seq.seq_id for seq in engine.state.running}
    engine.step(drawn_token)

    assert engine.preempted == [9], "only once its sibling has computed the prompt"
    engine.run(drawn_token)
