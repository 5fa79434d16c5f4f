from hypothesis import given
from hypothesis import strategies as st

from nanovllm.workloads.token_log import (
    TokenLog,
    gaps_s,
    prefix_hit_rate,
    sequence_times,
    ttfts_s,
)
from tests.bench.step_records import request, step


def test_tokens_come_at_the_end_of_the_step_that_sampled_them():
    steps = [
        step(0, 0.0, 1.0),
        step(1, 1.0, 2.0, sampled=[7]),
        step(2, 2.0, 4.0, sampled=[7, 8]),
        step(3, 4.0, 5.5, sampled=[8, 7]),
    ]

    times = sequence_times(steps)

    assert times[7].token_s == (2.0, 4.0, 5.5)
    assert times[7].gaps_s == (2.0, 1.5)
    assert times[7].tpot_s == 1.75
    assert times[8].gaps_s == (1.5,)
    assert sorted(gaps_s(steps)) == [1.5, 1.5, 2.0]


def test_several_tokens_of_one_step_share_the_time_since_the_last_one():
    steps = [step(0, 0.0, 1.0, sampled=[7]), step(1, 1.0, 4.0, sampled=[7, 7, 7])]

    assert gaps_s(steps) == [1.0, 1.0, 1.0]


def test_one_token_has_no_time_between_tokens():
    (times,) = sequence_times([step(sampled=[7])]).values()

    assert times.gaps_s == ()
    assert times.tpot_s is None


@given(st.lists(st.lists(st.integers(0, 4), unique=True), max_size=20))
def test_the_gaps_of_a_sequence_add_up_to_the_time_between_its_first_and_last_token(sampled):
    steps = [step(i, i, i + 1, sampled=ids) for i, ids in enumerate(sampled)]

    for times in sequence_times(steps).values():
        assert sum(times.gaps_s) == times.token_s[-1] - times.token_s[0]
    assert len(gaps_s(steps)) == sum(map(len, sampled)) - len(sequence_times(steps))


def test_a_window_holds_the_steps_that_lie_within_it():
    log = TokenLog()
    for i in range(6):
        log(step(i, i, i + 1))

    assert [one.index for one in log.within(1.0, 4.0)] == [1, 2, 3]
    assert [one.index for one in log.within(1.5, 4.5)] == [2, 3]
    assert log.within(10, 20) == []


def test_the_first_token_counts_where_the_request_came_and_had_it_within_the_window():
    requests = [
        request(arrival_s=1.0, first_token_s=1.5),
        request(arrival_s=0.5, first_token_s=1.5),  # came before
        request(arrival_s=1.0, first_token_s=2.5),  # had it after
        request(arrival_s=1.0, first_token_s=None),  # had none
    ]

    assert ttfts_s(requests, 1.0, 2.0) == [0.5]


def test_the_hit_rate_is_the_share_of_prompt_tokens_that_were_not_computed():
    steps = [step(num_prefill_tokens=4, num_prefix_hit_tokens=12), step(num_decode_tokens=3)]

    assert prefix_hit_rate(steps) == 0.75
    assert prefix_hit_rate(steps[1:]) is None
