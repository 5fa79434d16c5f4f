"""Admission and abort: what can never run is refused, with the numbers that say why."""

import pytest

from nanovllm.core import (
    EngineState,
    SchedulerLimits,
    Sequence,
    abort,
    admit,
    check,
    reset_prefix_cache,
)
from nanovllm.errors import ConfigError, RequestError
from nanovllm.sampling_params import SamplingParams
from tests.core.fake_engine import FakeEngine, drawn_token

LIMITS = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=100)


def make(seq_id, num_tokens=3, **params):
    return Sequence.create(seq_id, range(1, num_tokens + 1), SamplingParams(**params))


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_limits_below_one_are_refused_by_name(name, value):
    given = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 1, name: value}
    with pytest.raises(ConfigError, match=name):
        SchedulerLimits(**given)


def test_a_chunk_limit_is_checked_and_may_be_left_out():
    assert LIMITS.max_prefill_chunk is None
    with pytest.raises(ConfigError, match="max_prefill_chunk"):
        SchedulerLimits(1, 1, 1, max_prefill_chunk=0)


@pytest.mark.parametrize(("name", "value"), [("num_blocks", 0), ("block_size", -4)])
def test_a_pool_without_blocks_is_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        EngineState.create(**{"num_blocks": 1, "block_size": 1, name: value})


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
