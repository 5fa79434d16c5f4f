"""Priorities: the urgent goes first and takes what it needs from the less urgent, and only that."""

import pytest

from nanovllm.core import SchedulerLimits
from tests.core.fake_engine import FakeEngine, drawn_token, expected_completion


def limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=1000, **others):
    return SchedulerLimits(max_num_seqs, max_num_batched_tokens, max_model_len, **others)


def running(engine):
    return [seq.seq_id for seq in engine.state.running]


def waiting(engine):
    return [seq.seq_id for seq in engine.state.waiting]


def test_a_full_engine_gives_the_least_urgent_seat_to_a_more_urgent_newcomer_at_once():
    engine = FakeEngine(64, 4, limits(max_num_seqs=3))
    for seq_id, priority in enumerate((5, 7, 7)):
        engine.admit(seq_id, [seq_id], priority=priority, max_tokens=9)
    engine.step(drawn_token)
    engine.admit(3, [1], priority=0, max_tokens=9)
    outputs = engine.step(drawn_token)

    assert engine.preempted == [2], "the youngest of the lowest priority"
    assert [output.seq_id for output in outputs] == [0, 1, 3]
    assert all(output.new_token_id is not None for output in outputs)
    finished = engine.run(drawn_token)
    assert finished[2].sequence.completion_token_ids == expected_completion([2], 9)


@pytest.mark.parametrize("newcomer", [{"priority": 5}, {"priority": 5, "deadline_s": 1.0}])
def test_among_equals_nobody_loses_a_seat_and_a_deadline_only_goes_to_the_front(newcomer):
    engine = FakeEngine(64, 4, limits(max_num_seqs=2))
    for seq_id in range(3):
        engine.admit(seq_id, [seq_id], priority=5, max_tokens=3)
    engine.step(drawn_token)
    engine.admit(3, [1], max_tokens=3, **newcomer)
    engine.step(drawn_token)

    assert engine.preempted == [] and running(engine) == [0, 1]
    assert waiting(engine) == ([3, 2] if "deadline_s" in newcomer else [2, 3])


def test_blocks_are_taken_from_as_few_as_it_needs_and_from_the_least_urgent_first():
    engine = FakeEngine(12, 2, limits(), caching=False)
    for seq_id, priority in enumerate((1, 3, 2)):
        engine.admit(seq_id, [seq_id] * 7, priority=priority, max_tokens=2)  # 4 blocks each
    engine.step(drawn_token)
    engine.admit(3, [3] * 7, priority=0, max_tokens=2)
    engine.step(drawn_token)

    assert engine.preempted == [1]
    assert 3 in running(engine)
    assert set(engine.run(drawn_token)) == {0, 1, 2, 3}


def test_the_blocks_that_a_victim_would_have_grown_into_count_as_free():
    engine = FakeEngine(12, 2, limits(), caching=False)
    for seq_id, priority in enumerate((1, 3)):
        engine.admit(seq_id, [seq_id] * 7, priority=priority, max_tokens=9)  # 4 blocks each
    engine.step(drawn_token)
    engine.admit(2, [2] * 13, priority=0, max_tokens=1)  # 7 blocks
    engine.step(drawn_token)

    assert engine.preempted == [1]
    assert 2 in engine.finished
    engine.run(drawn_token)


def test_nothing_is_preempted_if_that_would_not_make_enough_room():
    engine = FakeEngine(12, 2, limits())
    engine.admit(0, [1] * 12, priority=0, max_tokens=5)  # 6 blocks, 8 in the end
    engine.admit(1, [2] * 4, priority=9, max_tokens=5)  # 2 blocks, 4 in the end
    engine.step(drawn_token)
    engine.admit(2, [0] * 15, priority=1, max_tokens=2)  # 8 blocks; no room beside the first
    for _ in range(3):
        engine.step(drawn_token)

    assert len(engine.state.running) == 2
    assert engine.preempted == []
    assert set(engine.run(drawn_token)) == {0, 1, 2}


@pytest.mark.parametrize("urgency", [{"priority": -1}, {"deadline_s": 1.0}])
def test_a_stalled_prompt_does_not_hold_up_a_more_urgent_one_that_fits(urgency):
    engine = FakeEngine(8, 2, limits())
    engine.admit(0, [1] * 7, max_tokens=9)
    engine.step(drawn_token)
    engine.admit(1, [2] * 10, max_tokens=1)  # waits for the first to end
    engine.step(drawn_token)
    assert engine.state.stalled_head.seq_id == 1
    engine.admit(2, [0], max_tokens=1, **urgency)
    (_, urgent) = engine.step(drawn_token)

    assert (urgent.seq_id, urgent.finish_reason) == (2, "length")
    assert engine.preempted == []
    engine.step(drawn_token)
    assert engine.state.stalled_head.seq_id == 1, "it is remembered again"


def test_a_prompt_that_has_begun_goes_on_behind_a_more_urgent_one_that_waits_for_blocks():
    engine = FakeEngine(12, 2, limits(max_num_batched_tokens=2), caching=False)
    engine.admit(0, [1] * 14, priority=0, max_tokens=1)  # 7 blocks
    engine.step(drawn_token)
    engine.admit(1, [2] * 14, priority=0, deadline_s=1.0, max_tokens=1)
    steps = 0
    while 0 not in engine.finished:
        engine.step(drawn_token)
        steps += 1

    assert steps == 6, "it is not held up"
    assert set(engine.run(drawn_token)) == {0, 1}


def test_two_prompts_may_be_begun_and_the_more_urgent_one_gets_the_budget():
    engine = FakeEngine(64, 4, limits(max_num_batched_tokens=4))
    engine.admit(0, [1] * 12, priority=1, max_tokens=1)
    engine.step(drawn_token)
    engine.admit(1, [2] * 12, priority=0, max_tokens=1)
    order = []
    while engine.state.num_unfinished:
        order += [output.seq_id for output in engine.step(drawn_token)]

    assert order == [1, 1, 1, 0, 0]
    assert engine.preempted == []


def test_a_half_prefilled_prompt_gives_its_blocks_to_a_more_urgent_one():
    engine = FakeEngine(8, 2, limits(max_num_batched_tokens=4), caching=False)
    engine.admit(0, [1] * 16, priority=1, max_tokens=1)
    engine.step(drawn_token)
    engine.admit(1, [2] * 4, priority=0, max_tokens=1)
    (output,) = engine.step(drawn_token)

    assert (output.seq_id, output.finish_reason) == (1, "length")
    assert engine.preempted == [0]
    engine.run(drawn_token)


def test_what_gave_way_is_found_in_the_cache_when_it_comes_back():
    engine = FakeEngine(64, 2, limits(max_num_seqs=1))
    engine.admit(0, [1] * 9, priority=1, max_tokens=4)
    engine.step(drawn_token)
    engine.admit(1, [2] * 3, priority=0, max_tokens=1)
    engine.run(drawn_token)

    assert engine.preempted == [0]
    assert engine.prefix_hits[0] == 8


def test_the_first_of_all_is_never_preempted_however_small_the_pool():
    engine = FakeEngine(6, 2, limits(), caching=False)
    for seq_id, priority in enumerate((2, 1, 0, 1)):
        engine.admit(seq_id, [seq_id], priority=priority, max_tokens=9)
    finished = engine.run(drawn_token)

    assert engine.preempted and 2 not in engine.preempted
    assert next(iter(finished)) == 2


def test_blocks_that_a_newcomer_shares_with_those_that_give_way_are_counted_by_the_next_step():
    """What it needs grows when shared blocks become free; it starts one step later."""
    engine = FakeEngine(8, 2, limits())
    engine.admit(0, [1] * 7, priority=0, max_tokens=2)
    engine.admit(1, [2] * 5, priority=2, max_tokens=2)
    engine.step(drawn_token)
    engine.admit(2, [2] * 6, priority=1, max_tokens=2)
    finished = engine.run(drawn_token)

    assert set(finished) == {0, 1, 2}
