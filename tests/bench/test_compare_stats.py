import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.compare_stats import Comparison, Launch, Verdict, sign_test

TIMES = st.floats(1e-4, 1e-2)


def launch(change=1.0, bias=1.0, num_blocks=24):
    """Blocks of a machine whose speed drifts, which all sides feel alike."""
    base = [1e-3 * (1 + 0.5 * math.sin(block)) for block in range(num_blocks)]
    wobble = [1 + 0.01 * (-1) ** block for block in range(num_blocks)]
    return Launch(
        base_s=base,
        again_s=[b * bias * w for b, w in zip(base, wobble, strict=True)],
        head_s=[b * change * w for b, w in zip(base, wobble, strict=True)],
    )


def comparison(*launches):
    return Comparison("a case", launches)


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (1.0, Verdict.NO_CHANGE),
        (1.02, Verdict.NO_CHANGE),
        (0.98, Verdict.NO_CHANGE),
        (1.1, Verdict.REGRESSION),
        (0.9, Verdict.FASTER),
    ],
)
def test_a_change_above_the_noise_is_found_whatever_the_machine_does(change, verdict):
    assert comparison(*[launch(change)] * 3).verdict is verdict


def test_a_change_within_the_noise_of_equal_code_is_none():
    noisy = comparison(*[launch(1.1, bias=1.1)] * 3)

    assert noisy.floor == pytest.approx(2 * math.log(1.1), rel=0.1)
    assert noisy.verdict is Verdict.NO_CHANGE
    assert not noisy.is_settled


def test_one_launch_that_fell_badly_does_not_decide():
    assert comparison(launch(), launch(1.2), launch()).verdict is Verdict.NO_CHANGE
    assert comparison(launch(1.1), launch(1.0), launch(1.1)).verdict is Verdict.REGRESSION


def test_launches_that_contradict_each_other_or_hardly_differ_ask_for_more():
    assert not comparison(launch(), launch(1.1), launch(1.1)).is_settled
    assert not comparison(launch(1.03), launch(1.03), launch(1.03)).is_settled
    assert comparison(launch(), launch(), launch()).is_settled
    assert comparison(launch(1.1), launch(1.1), launch(1.12)).is_settled


def test_a_few_blocks_are_no_evidence():
    assert comparison(launch(1.1, num_blocks=3)).verdict is Verdict.NO_CHANGE


@given(st.lists(st.tuples(TIMES, TIMES, TIMES), min_size=1, max_size=15))
def test_the_other_way_round_the_ratio_is_its_inverse(blocks):
    blocks = blocks[len(blocks) % 2 == 0 :]  # of an even number the median is a mean: no such law
    base, again, head = zip(*blocks, strict=True)

    assert Launch(base, base, head).estimate * Launch(head, head, base).estimate == (
        pytest.approx(1)
    )
    assert Launch(base, again, head).noise >= 0


def test_the_sign_test_is_the_binomial_one():
    assert sign_test(5, 10) == 1
    assert sign_test(10, 10) == sign_test(0, 10) == 2 / 2**10
    assert sign_test(9, 10) == 2 * 11 / 2**10


def test_least_times_are_over_both_bases():
    one = Launch([3.0, 2.0], [1.5, 4.0], [5.0, 6.0])

    assert (comparison(one).base_s, comparison(one).head_s) == (1.5, 5.0)
