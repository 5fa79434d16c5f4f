"""Admission, abort and expiry: what can never run is refused, with the numbers that say why."""

import math

import pytest

from nanovllm.core import (
    EngineState,
    SchedulerLimits,
    Sequence,
    abort,
    admit,
    check,
    expire,
    reset_prefix_cache,
)
from nanovllm.errors import RequestError
from nanovllm.sampling_params import SamplingParams
from tests.core.fake_engine import FakeEngine, drawn_token

LIMITS = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=100)


def make(seq_id, num_tokens=3, **params):
    return Sequence.create(seq_id, range(1, num_tokens + 1), SamplingParams(**params))


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "num_blocks", "fits"),
    [
        (3, 2, 1, True),  # 5 tokens, but the last one needs no K/V
        (3, 3, 1, False),
        (3, 3, 2, True),
        (6, 16, 2, False),
        (8, 1, 2, True),
        (9, 1, 2, False),
    ],
)
def test_admission_counts_the_blocks_of_all_tokens_but_the_last(
    num_tokens, max_tokens, num_blocks, fits
):
    state = EngineState.create(num_blocks, 4)
    seq = make(1, num_tokens, max_tokens=max_tokens)
    needed = -(-(num_tokens + max_tokens - 1) // 4)
    if fits:
        assert admit(state, seq, LIMITS).num_unfinished == 1
    else:
        with pytest.raises(RequestError, match=rf"needs {needed} blocks.* has {num_blocks}"):
            admit(state, seq, LIMITS)


@pytest.mark.parametrize(("num_tokens", "num_new"), [(14, 2), (15, 1), (16, None), (100, None)])
def test_prompt_and_completion_share_the_model_length(num_tokens, num_new):
    limits = SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=16)
    engine = FakeEngine(64, 4, limits)
    if num_new is None:
        with pytest.raises(RequestError, match=rf"{num_tokens} tokens .* is 16"):
            engine.admit(1, [1] * num_tokens, max_tokens=8)
    else:
        engine.admit(1, [1] * num_tokens, max_tokens=8)
        (output,) = engine.run(drawn_token).values()

        assert output.sequence.num_completion_tokens == num_new
        assert output.finish_reason == "length"


def test_the_id_of_a_live_sequence_is_refused_and_a_finished_one_may_come_again():
    engine = FakeEngine(8, 4, LIMITS)
    engine.admit(5, [1, 2], max_tokens=1)
    engine.admit(3, [1, 2], max_tokens=1)
    for taken in (3, 5):
        with pytest.raises(RequestError, match=f"{taken} belongs to a live request"):
            engine.admit(taken, [1], max_tokens=1)
    engine.run(drawn_token)
    engine.admit(5, [1, 2], max_tokens=1)

    assert engine.state.find(5) is not None and engine.state.find(3) is None


def test_a_refused_request_leaves_the_state_untouched():
    state = EngineState.create(2, 4)
    before = admit(state, make(1, max_tokens=1), LIMITS)
    with pytest.raises(RequestError):
        admit(before, make(2, 50), LIMITS)

    assert before.num_unfinished == 1


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_abort_frees_every_block_in_whatever_state_the_sequence_is(num_steps):
    engine = FakeEngine(16, 2, SchedulerLimits(2, 3, 100))
    for seq_id in range(3):
        engine.admit(seq_id, [1, 2, 3, 4, 5], max_tokens=10)
    for _ in range(num_steps):
        engine.step(drawn_token)
    for seq_id in (1, 0, 2):
        engine.abort(seq_id)

    assert engine.state.num_unfinished == 0
    assert engine.state.pool.num_free == 16


def test_aborting_an_unknown_or_dead_id_changes_nothing():
    state = admit(EngineState.create(4, 4), make(1, max_tokens=9), LIMITS)

    assert abort(state, 99) is state
    assert abort(abort(state, 1), 1) == abort(state, 1)


def test_a_reset_cache_hits_nothing_and_keeps_what_runs():
    engine = FakeEngine(16, 2, LIMITS)
    engine.admit(0, [1, 2, 3, 4, 5], max_tokens=5)
    engine.step(drawn_token)
    engine.state = reset_prefix_cache(engine.state)
    check(engine.state, LIMITS, at_rest=True)
    engine.admit(1, [1, 2, 3, 4, 5], max_tokens=5)
    engine.run(drawn_token)

    assert engine.prefix_hits == {0: 0, 1: 0}


def queue_of(engine):
    return [seq.seq_id for seq in engine.state.waiting]


def test_the_queue_is_by_priority_then_by_deadline_then_by_age():
    engine = FakeEngine(64, 4, LIMITS)
    urgencies = [
        (1, None),
        (0, None),
        (0, 9.0),
        (-3, None),
        (0, 5.0),
        (0, 9.0),
        (1, 1.0),
        (0, None),
    ]
    for seq_id, (priority, deadline_s) in enumerate(urgencies):
        engine.admit(seq_id, [1], priority=priority, deadline_s=deadline_s, max_tokens=1)

    assert queue_of(engine) == [3, 4, 2, 5, 1, 7, 6, 0]


def test_an_urgent_newcomer_queues_behind_prompts_that_have_begun():
    engine = FakeEngine(64, 4, SchedulerLimits(4, 4, 100))
    engine.admit(0, [1] * 9, max_tokens=1)
    engine.step(drawn_token)
    engine.admit(1, [2] * 9, priority=-1, max_tokens=1)

    assert queue_of(engine) == [0, 1]
    engine.step(drawn_token)
    assert queue_of(engine) == [1, 0], "both have begun now"


def test_expiry_ends_what_is_late_wherever_it_is_and_frees_its_blocks():
    engine = FakeEngine(64, 2, SchedulerLimits(2, 4, 100))
    for seq_id, deadline_s in enumerate((5.0, None, 5.0, 7.0, None)):
        engine.admit(seq_id, [seq_id] * 6, deadline_s=deadline_s, max_tokens=9)
    for _ in range(2):
        engine.step(drawn_token)
    assert [seq.seq_id for seq in engine.state.running] == [0]
    assert engine.state.waiting[0].seq_id == 2 and engine.state.waiting[0].block_table

    assert engine.expire(4.9) == ()
    assert engine.expire(5.0) == (0, 2)
    assert engine.state.pool.num_used == 0
    assert queue_of(engine) == [3, 1, 4]
    assert engine.state.next_deadline_s == 7.0
    assert engine.expire(1e9) == (3,)
    assert engine.state.next_deadline_s == math.inf
    engine.run(drawn_token)
    assert set(engine.finished) == {1, 4}


def test_a_state_in_which_no_deadline_can_have_come_is_returned_as_it_is():
    state = admit(EngineState.create(4, 4), make(1, max_tokens=9), LIMITS)

    assert expire(state, 1e9) == (state, ())
    assert expire(state, 1e9)[0] is state


def test_expiry_in_flight_leaves_the_others_of_the_step_alone():
    engine = FakeEngine(64, 2, LIMITS)
    engine.admit(0, [1, 2], deadline_s=1.0, max_tokens=3)
    engine.admit(1, [2, 1], max_tokens=3)
    engine.step(drawn_token, expire_in_flight=2.0)
    engine.run(drawn_token)

    assert set(engine.finished) == {1}
