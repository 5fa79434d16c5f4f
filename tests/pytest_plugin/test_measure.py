import attrs
import pytest

from nanovllm.pytest_plugin.measure import Measured
from nanovllm.pytest_plugin.round_clock import Window
from nanovllm.workloads.disturbances import Disturbance
from nanovllm.workloads.token_log import TokenLog
from tests.bench.step_records import request, step

QUIET = Disturbance(10.0, (), 0.0, None, 0, 0.0)


def measured(*rounds, cache=None, num_iterations=1, disturbance=QUIET, first_index=5):
    """Rounds of (seconds, prefix hits of 10 prompt tokens), each with two tokens of a sequence."""
    log, windows, now_s, index = TokenLog(), [], 0.0, first_index
    for seq_id, (seconds, num_hits) in enumerate(rounds):
        end_s, middle_s = now_s + seconds, now_s + seconds / 4
        log(
            step(
                index,
                now_s,
                middle_s,
                sampled=[seq_id],
                num_prefill_tokens=10 - num_hits,
                num_prefix_hit_tokens=num_hits,
            )
        )
        answered = request(seq_ids=[seq_id], arrival_s=now_s, first_token_s=middle_s)
        log(step(index + 1, middle_s, end_s, sampled=[seq_id], finished=[answered]))
        windows.append(Window(now_s, end_s))
        now_s, index = end_s + 1.0, index + 2
    return Measured.of(
        log, windows, cache=cache, num_iterations=num_iterations, disturbance=disturbance
    )


def test_rows_hold_requests_tokens_and_rounds():
    rows = measured((4.0, 0), (8.0, 0)).rows()

    assert rows == {"ttft": [1.0, 2.0], "itl": [3.0, 6.0], "itl_p99": [3.0, 6.0]}


def test_equal_rounds_of_a_warm_engine_give_no_warning():
    assert measured((4.0, 0), (4.0, 0), (4.1, 0)).warnings() == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"first_index": 0}, "first work"),
        ({"disturbance": attrs.evolve(QUIET, throttled_s=0.5)}, "throttled"),
        ({"cache": "cold", "num_iterations": 3}, "of the 3 calls of a round only the first"),
    ],
)
def test_what_spoils_a_measurement_is_said(given, words):
    (warning,) = measured((4.0, 0), (4.0, 0), **given).warnings()

    assert words in warning


def test_a_first_round_much_slower_than_the_others_was_not_warmed_up():
    (warning,) = measured((7.0, 0), (4.0, 0), (4.0, 0)).warnings()

    assert "more warmup_rounds" in warning


@pytest.mark.parametrize(
    ("cache", "hits", "words"),
    [
        (None, (0, 9), "0% to 90%"),
        ("warm", (0, 9), "0% to 90%"),
        (None, (9, 9), "served 90%"),
        ("warm", (9, 9), None),
        (None, (0, 0), None),
        ("cold", (0, 0), None),
    ],
)
def test_the_cache_is_spoken_of_where_a_test_does_not_say_what_it_wants(cache, hits, words):
    warnings = measured(*[(4.0, num_hits) for num_hits in hits], cache=cache).warnings()

    assert [words in warning for warning in warnings] == ([] if words is None else [True])


def test_no_rounds_have_no_rows():
    nothing = measured()

    assert nothing.rows() == {}
    assert nothing.as_data()["num_tokens"] == 0
