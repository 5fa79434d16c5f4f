"""What a step takes in: decodes never wait, prefill is bounded, the oldest always gets on."""

import pytest

from nanovllm.core import EngineState, SchedulerLimits, Sequence, admit, postprocess, schedule
from nanovllm.sampling_params import SamplingParams
from tests.core.fake_engine import FakeEngine, drawn_token, expected_completion


def limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=1000, **others):
    return SchedulerLimits(max_num_seqs, max_num_batched_tokens, max_model_len, **others)


def steps_of(engine):
    """Run to the end; yields for each step {sequence: new token or None}."""
    while engine.state.num_unfinished:
        yield {output.seq_id: output.new_token_id for output in engine.step(drawn_token)}


def test_nothing_to_do_schedules_nothing():
    state = EngineState.create(4, 4)
    after, plan = schedule(state, limits())

    assert plan.scheduled == () and plan.num_tokens == 0
    assert after == state


def test_decodes_come_first_and_are_never_left_out_for_a_prefill():
    engine = FakeEngine(64, 4, limits(max_num_batched_tokens=8, max_prefill_chunk=3))
    engine.admit(0, [1, 2], max_tokens=12)
    engine.admit(1, [1], max_tokens=12)
    engine.step(drawn_token)
    engine.admit(2, [2] * 20, max_tokens=2)
    steps = list(steps_of(engine))

    # 20 prompt tokens at 3 a step take 7 steps; the other two get a token in each of them.
    assert [step[2] for step in steps[:7]] == [None] * 6 + [steps[6][2]]
    assert all(step[0] is not None and step[1] is not None for step in steps[:7])


def test_a_prefill_alone_may_use_the_whole_budget():
    engine = FakeEngine(64, 4, limits(max_num_batched_tokens=8, max_prefill_chunk=3))
    engine.admit(0, [1] * 16, max_tokens=1)

    assert len(list(steps_of(engine))) == 2


@pytest.mark.parametrize("caching", [True, False])
def test_a_prompt_takes_as_many_steps_as_it_has_budgets(caching):
    engine = FakeEngine(8, 4, limits(max_num_batched_tokens=4), caching=caching)
    engine.admit(0, list(range(1, 14)), max_tokens=1)

    assert len(list(steps_of(engine))) == 4


def test_a_short_prompt_does_not_wait_for_a_long_one():
    engine = FakeEngine(64, 4, limits(max_num_batched_tokens=8))
    engine.admit(0, [1] * 64, max_tokens=1)
    engine.admit(1, [2] * 3, max_tokens=1)
    steps = list(steps_of(engine))

    assert steps[0] == {0: None, 1: expected_completion([2] * 3, 1)[0]}
    assert len(steps) == 9  # and the long one is held up by 3 tokens


def test_a_long_prompt_keeps_half_of_the_budget_whatever_comes_behind_it():
    engine = FakeEngine(256, 4, limits(max_num_seqs=16, max_num_batched_tokens=8))
    engine.admit(0, [1] * 64, max_tokens=1)
    for seq_id in range(1, 60):
        engine.admit(seq_id, [2] * 2, max_tokens=1)
    num_steps = next(number for number, step in enumerate(steps_of(engine), 1) if step.get(0))

    assert num_steps <= 64 / (8 / 2)


def test_a_prompt_too_long_to_overtake_waits_and_a_shorter_one_behind_it_does_not():
    engine = FakeEngine(64, 4, limits(max_num_batched_tokens=8))
    for seq_id, num_tokens in enumerate((64, 5, 4)):
        engine.admit(seq_id, [seq_id] * num_tokens, max_tokens=1)
    steps = list(steps_of(engine))

    assert set(steps[0]) == {0, 2}
    assert [number for number, step in enumerate(steps) if 1 in step] == [8, 9]


def test_no_more_sequences_hold_blocks_than_there_are_seats():
    engine = FakeEngine(64, 4, limits(max_num_seqs=2))
    for seq_id in range(5):
        engine.admit(seq_id, [seq_id] * 3, max_tokens=6)
    waits = dict.fromkeys(range(5), 0)
    for step in steps_of(engine):  # the engine checks the seats after each step
        for seq in engine.state.running:
            waits[seq.seq_id] = 0 if seq.seq_id in step else waits[seq.seq_id] + 1

        assert max(waits.values()) == 0, "no sequence waits between its own tokens"


def test_a_budget_of_one_token_works_slowly():
    engine = FakeEngine(8, 2, limits(max_num_batched_tokens=1))
    for seq_id in range(3):
        engine.admit(seq_id, [seq_id + 1] * 3, max_tokens=2)
    finished = engine.run(drawn_token)

    assert engine.num_steps == 3 * (3 + 1)
    assert all(len(output.sequence.completion_token_ids) == 2 for output in finished.values())


def test_preempts_the_youngest_and_keeps_its_tokens():
    engine = FakeEngine(6, 2, limits())
    for seq_id in range(3):
        engine.admit(seq_id, [seq_id], max_tokens=8)
    finished = engine.run(drawn_token)

    assert engine.preempted and 0 not in engine.preempted
    assert engine.preempted[0] == 2
    for seq_id, output in finished.items():
        assert output.sequence.completion_token_ids == expected_completion([seq_id], 8)


def test_what_was_preempted_queues_by_age_in_front_of_what_never_ran():
    engine = FakeEngine(6, 2, limits(max_num_seqs=3))
    for seq_id in range(5):
        engine.admit(seq_id, [seq_id], max_tokens=8)
    while len(set(engine.preempted)) < 2:
        engine.step(drawn_token)

    assert [seq.seq_id for seq in engine.state.waiting] == [1, 2, 3, 4]
    assert all(not seq.block_table for seq in engine.state.waiting)


def test_a_half_prefilled_prompt_gives_way_when_it_is_the_youngest():
    engine = FakeEngine(8, 2, limits(max_num_batched_tokens=2))
    engine.admit(0, [1, 1], max_tokens=9)
    engine.step(drawn_token)
    engine.admit(1, [2] * 7, max_tokens=1)
    finished = engine.run(drawn_token)

    assert engine.preempted == [1]
    assert finished[1].sequence.completion_token_ids == expected_completion([2] * 7, 1)


def test_two_that_do_not_fit_together_both_finish_without_taking_turns_for_ever():
    engine = FakeEngine(6, 2, limits())
    engine.admit(0, [1, 2], max_tokens=9)  # 5 blocks each
    engine.admit(1, [2, 1], max_tokens=9)
    num_computed = 0
    while engine.state.num_unfinished:
        state, plan = schedule(engine.state, engine.limits)
        num_computed += plan.num_tokens
        engine.step(drawn_token)

    assert 0 not in engine.preempted
    assert engine.num_steps <= 10 * 18
    assert num_computed <= 1.5 * 2 * (2 + 8)


def test_three_growing_prompts_in_a_small_pool_end_as_if_alone():
    prompts = [[1] * 7, [2] * 7, [0] * 7]
    engine = FakeEngine(6, 4, limits(max_num_seqs=3))
    for seq_id, prompt in enumerate(prompts):
        engine.admit(seq_id, prompt, max_tokens=12)
    finished = engine.run(drawn_token)

    assert engine.preempted
    for seq_id, prompt in enumerate(prompts):
        assert finished[seq_id].sequence.completion_token_ids == expected_completion(prompt, 12)


def test_a_newcomer_leaves_one_block_to_each_that_may_still_grow():
    engine = FakeEngine(4, 2, limits())
    engine.admit(0, [1, 1], max_tokens=5)
    engine.admit(1, [2, 2, 2, 2], max_tokens=1)
    engine.admit(2, [2], max_tokens=1)
    first = engine.step(drawn_token)
    late = engine.step(drawn_token)

    assert {output.seq_id for output in first} == {0, 1}
    assert {output.seq_id for output in late} == {0, 2}
    assert engine.preempted == []


def test_a_stalled_head_is_not_looked_up_again_until_its_blocks_are_free(monkeypatch):
    from nanovllm.core.blocks import PoolEditor

    lookups = []
    find_prefix = PoolEditor.find_prefix
    monkeypatch.setattr(
        PoolEditor, "find_prefix", lambda *args: lookups.append(1) or find_prefix(*args)
    )
    engine = FakeEngine(8, 2, limits())
    engine.admit(0, [1] * 4, max_tokens=9)
    engine.admit(1, [2] * 12, max_tokens=1)
    engine.run(drawn_token)

    assert engine.num_steps == 9 + 1
    assert len(lookups) <= 3


def test_the_prefix_of_a_finished_prompt_is_hit_and_the_chunk_starts_behind_it():
    engine = FakeEngine(16, 4, limits(max_num_batched_tokens=3))
    engine.admit(0, list(range(9)), max_tokens=1)
    engine.run(drawn_token)
    engine.admit(1, list(range(9)), max_tokens=1)
    (output,) = engine.step(drawn_token)

    assert engine.prefix_hits[1] == 8
    assert output.new_token_id is not None


def test_two_equal_prompts_in_one_step_share_nothing_unwritten_and_leak_nothing():
    engine = FakeEngine(16, 4, limits())
    prompt = list(range(1, 10))
    for seq_id in range(2):
        engine.admit(seq_id, prompt, max_tokens=2)
    engine.run(drawn_token)
    engine.admit(2, prompt, max_tokens=2)
    engine.run(drawn_token)

    assert engine.prefix_hits == {0: 0, 1: 0, 2: 8}


def test_a_block_that_was_freed_and_hit_again_keeps_its_place_in_the_chain():
    """A hit on freed blocks once lost their hash, and the next block was keyed as a first one."""
    engine = FakeEngine(8, 4, limits())
    prompt = list(range(1, 10))
    engine.admit(0, prompt, max_tokens=1)
    engine.run(drawn_token)
    engine.admit(1, prompt, max_tokens=5)
    forced = iter([21, 22, 23, 24, 25])
    engine.run(lambda seq: next(forced))
    engine.admit(2, [9, 21, 22, 23, 77], max_tokens=1)
    engine.run(drawn_token)
    engine.admit(3, prompt, max_tokens=1)
    engine.run(drawn_token)

    assert engine.prefix_hits == {0: 0, 1: 8, 2: 0, 3: 8}


def test_without_prefix_caching_nothing_is_registered_or_hit():
    engine = FakeEngine(16, 4, limits(), caching=False)
    for seq_id in range(2):
        engine.admit(seq_id, list(range(9)), max_tokens=1)
        engine.run(drawn_token)

    assert engine.prefix_hits == {0: 0, 1: 0}
    assert engine.state.pool.num_cached == 0


@pytest.mark.parametrize("num_tokens", [4, 8, 12])
def test_exact_multiples_of_the_block_size_drain_completely_every_time(num_tokens):
    engine = FakeEngine(4, 4, limits())
    for seq_id in range(200):
        engine.admit(seq_id, [(seq_id // 3 + i) % 3 for i in range(num_tokens)], max_tokens=2)
        engine.run(drawn_token)

        assert engine.state.pool.num_free == 4


def test_a_request_that_needs_the_whole_pool_waits_for_it_and_finishes():
    engine = FakeEngine(1, 4, limits())
    engine.admit(0, [1, 2, 0], max_tokens=2)
    engine.admit(1, [1, 2, 0], max_tokens=2)
    finished = engine.run(drawn_token)

    assert set(finished) == {0, 1}


def test_the_state_in_flight_holds_the_snapshots_of_the_plan():
    state = EngineState.create(8, 4)
    for seq_id in range(2):
        state = admit(
            state, Sequence.create(seq_id, [1, 2, 3], SamplingParams(max_tokens=9)), limits()
        )
    state, plan = schedule(state, limits(max_num_batched_tokens=4))

    assert plan.running is state.running and plan.waiting is state.waiting
    assert plan.scheduled == (*state.running, state.waiting[0])
    assert [seq.num_scheduled_tokens for seq in plan.scheduled] == [3, 1]
    state, _ = postprocess(state, plan, [9, 9])
    assert [seq.num_scheduled_tokens for seq in (*state.running, *state.waiting)] == [0, 0]


def test_more_than_the_queue_has_seats_is_not_looked_at():
    engine = FakeEngine(64, 4, limits(max_num_seqs=2))
    for seq_id in range(50):
        engine.admit(seq_id, [1], max_tokens=1, min_tokens=0)
    sizes = [len(step) for step in steps_of(engine)]

    assert sizes == [2] * 25


def test_default_parameters_need_no_limits_of_their_own():
    assert SamplingParams().max_tokens == 64
