"""How a step's tokens are taken in, and how a sequence ends."""

import pytest

from nanovllm.core import EngineState, SchedulerLimits, Sequence, admit, postprocess, schedule
from nanovllm.sampling_params import SamplingParams
from tests.core.fake_engine import FakeEngine, drawn_token


def limits(**others):
    given = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 1000, **others}
    return SchedulerLimits(**given)


def finish(tokens, *, eos=(), **params):
    """Feed tokens to one sequence until it ends; returns (number taken, reason)."""
    engine = FakeEngine(64, 4, limits(eos_token_ids=frozenset(eos)))
    engine.admit(0, [1, 2, 3], **params)
    feed = iter(tokens)
    (output,) = engine.run(lambda seq: next(feed)).values()
    return output.sequence.num_completion_tokens, output.finish_reason


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"max_tokens": 9}, (2, "stop")),
        ({"max_tokens": 2}, (2, "stop")),  # stop is the better reason where both hold
        ({"max_tokens": 1}, (1, "length")),
        ({"max_tokens": 9, "ignore_eos": True}, (9, "length")),
        ({"max_tokens": 9, "ignore_eos": True, "stop_token_ids": [14]}, (5, "stop")),
        ({"max_tokens": 9, "min_tokens": 1}, (2, "stop")),
        ({"max_tokens": 9, "min_tokens": 2}, (9, "length")),
        ({"max_tokens": 9, "min_tokens": 2, "stop_token_ids": [14]}, (5, "stop")),
        ({"max_tokens": 9, "min_tokens": 5, "stop_token_ids": [14]}, (9, "length")),
    ],
)
def test_ends_by_stop_ids_or_by_length(params, expected):
    assert finish(range(10, 20), eos=[11], **params) == expected


@pytest.mark.parametrize("eos", [5, 7, 9])
def test_any_of_several_end_ids_ends_it(eos):
    assert finish([1, eos, 1, 1], eos=[5, 7, 9], max_tokens=4) == (2, "stop")


def test_an_intermediate_chunk_appends_nothing_and_ignores_the_token():
    engine = FakeEngine(8, 4, limits(max_num_batched_tokens=3))
    engine.admit(0, [1] * 5, max_tokens=1)
    (chunk,) = engine.step(lambda seq: 99)
    (last,) = engine.step(lambda seq: 98)

    assert (chunk.new_token_id, chunk.finish_reason) == (None, None)
    assert chunk.sequence.num_cached_tokens == 3 and chunk.sequence.num_tokens == 5
    assert last.new_token_id == 98 and last.finish_reason == "length"
    assert last.sequence.token_ids == (1, 1, 1, 1, 1, 98)


def test_a_finished_sequence_keeps_its_tokens_and_nothing_else():
    engine = FakeEngine(8, 4, limits())
    engine.admit(0, [1, 2, 3, 4, 5], max_tokens=1)
    (output,) = engine.step(lambda seq: 6)
    seq = output.sequence

    assert seq.is_finished and not seq.is_prefill
    assert (seq.block_table, seq.num_cached_tokens) == ((), 0)
    assert seq.token_ids == (1, 2, 3, 4, 5, 6)


def test_what_was_aborted_in_flight_is_passed_over():
    engine = FakeEngine(16, 4, limits(max_num_batched_tokens=9))
    engine.admit(0, [1] * 3, max_tokens=9)
    engine.admit(1, [2] * 3, max_tokens=9)
    engine.admit(2, [2] * 30, max_tokens=9)
    for victim, left in ((0, [1, 2]), (2, [1]), (1, [])):
        outputs = engine.step(drawn_token, abort_in_flight=victim)

        assert [output.seq_id for output in outputs] == left


def test_needs_one_token_per_scheduled_sequence():
    state = admit(
        EngineState.create(8, 4), Sequence.create(0, [1, 2], SamplingParams(max_tokens=9)), limits()
    )
    state, plan = schedule(state, limits())
    with pytest.raises(ValueError, match="2 token ids for 1 scheduled"):
        postprocess(state, plan, [1, 2])


def test_taking_in_one_plan_twice_gives_two_independent_futures():
    state = admit(
        EngineState.create(8, 4), Sequence.create(0, [1, 2], SamplingParams(max_tokens=9)), limits()
    )
    state, plan = schedule(state, limits())
    first, _ = postprocess(state, plan, [5])
    second, _ = postprocess(state, plan, [6])
    again, _ = postprocess(state, plan, [5])

    assert first.running[0].token_ids == (1, 2, 5)
    assert second.running[0].token_ids == (1, 2, 6)
    assert again == first


def test_blocks_are_registered_when_their_last_position_is_cached_and_not_before():
    engine = FakeEngine(8, 4, limits(max_num_batched_tokens=3))
    engine.admit(0, list(range(1, 7)), max_tokens=4)
    cached = []
    while engine.state.num_unfinished:
        engine.step(drawn_token)
        cached.append(engine.state.pool.num_cached)

    # 3, 6 of the prompt; then 7, 8, 9 positions: the last of 10 tokens needs none.
    assert cached == [0, 1, 1, 2, 2]
