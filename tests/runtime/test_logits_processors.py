import math

import pytest
import torch

from nanovllm.runtime.logits_processors import adjust
from nanovllm.runtime.sampling import SamplingRow
from nanovllm.sampling_params import SamplingParams

INF = math.inf
MAX = torch.finfo(torch.float32).max


def adjusted(logits, prompt=(), completion=(), stop=(), **params):
    row = SamplingRow(
        SamplingParams(**params),
        seed=0,
        position=0,
        num_completion_tokens=len(completion),
        stop_token_ids=frozenset(stop),
        prompt_token_ids=lambda: prompt,
        completion_token_ids=lambda: completion,
    )
    return adjust(torch.tensor([logits]), [row])[0].tolist()


def test_rows_that_ask_for_nothing_are_passed_on_without_a_copy():
    logits = torch.zeros(2, 3)
    rows = [SamplingRow(SamplingParams(min_tokens=4), 0, 9, num_completion_tokens=4)] * 2

    assert adjust(logits, rows) is logits


def test_only_the_rows_that_ask_are_changed():
    plain = SamplingRow(SamplingParams(), 0, 0)
    biased = SamplingRow(SamplingParams(logit_bias={0: 1.0}), 0, 0)

    after = adjust(torch.zeros(3, 2), [plain, biased, plain])

    assert after.tolist() == [[0, 0], [1, 0], [0, 0]]


def test_bias_is_added():
    assert adjusted([1.0, 2.0, 3.0], logit_bias={0: 0.5, 2: -4}) == [1.5, 2.0, -1.0]


def test_repetition_divides_positive_and_multiplies_negative_logits_of_prompt_and_output_once():
    logits = [4.0, -4.0, 4.0, -4.0, 0.0, 1.0]

    after = adjusted(logits, prompt=(0, 1, 0, 4), completion=(2, 3, 2, 0), repetition_penalty=2.0)

    assert after == [2.0, -8.0, 2.0, -8.0, 0.0, 1.0]


def test_presence_counts_once_and_frequency_each_time_and_both_only_in_the_output():
    after = adjusted(
        [0.0] * 4,
        prompt=(3, 3),
        completion=(1, 2, 2, 2),
        presence_penalty=0.5,
        frequency_penalty=0.25,
    )

    assert after == [0.0, -0.75, -1.25, 0.0]


def test_the_order_is_bias_then_repetition_then_presence():
    after = adjusted(
        [1.0],
        completion=(0,),
        logit_bias={0: 3.0},
        repetition_penalty=2.0,
        presence_penalty=1.0,
    )

    assert after == [(1 + 3) / 2 - 1]


def test_penalties_without_tokens_change_nothing():
    assert adjusted([1.0, 2.0], repetition_penalty=2.0, presence_penalty=1.0) == [1.0, 2.0]


def test_stop_tokens_are_banned_before_min_tokens_and_not_from_then_on():
    logits = [1.0, 2.0, 3.0]

    assert adjusted(logits, completion=(0, 0), stop=(2,), min_tokens=3) == [1.0, 2.0, -INF]
    assert adjusted(logits, completion=(0, 0, 0), stop=(2,), min_tokens=3) == logits


def test_a_stop_token_without_a_logit_is_ignored():
    assert adjusted([1.0, 2.0], stop=(0, 2, 99), min_tokens=1) == [-INF, 2.0]


@pytest.mark.parametrize("logits", [[1.0, 2.0], [-INF, 2.0]])
def test_the_ban_is_lifted_where_it_would_leave_nothing(logits):
    stop = [i for i, logit in enumerate(logits) if logit > -INF]

    assert adjusted(logits, stop=stop, min_tokens=1) == logits


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {0: 1e300, 1: -1e300, 2: 1e300, 3: -1e300, 4: 1e300}},
        {"repetition_penalty": 5e-324},
        {"repetition_penalty": 1e300},
        {"presence_penalty": 2.0, "frequency_penalty": -2.0},
        {"min_tokens": 9},
    ],
)
def test_finite_logits_stay_finite_and_others_as_they_are(params):
    logits = [3e38, -3e38, 0.0, -INF, INF, math.nan, 1.0]

    after = adjusted(logits, prompt=range(6), completion=range(6), stop=(3, 4, 5), **params)

    assert all(map(math.isfinite, after[:3]))
    assert after[3:5] == [-INF, INF]
    assert math.isnan(after[5])
