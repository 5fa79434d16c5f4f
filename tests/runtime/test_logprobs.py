import json
import math

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.runtime.sampler import SamplingRow, TokenLogprobs, sample
from nanovllm.runtime.sampling import LOGPROB_FLOOR
from nanovllm.sampling_params import SamplingParams


def logprobs_of(logits, **params):
    params = {"temperature": 0, "logprobs": 3, **params}
    sampled = sample(torch.tensor([logits]), [SamplingRow(SamplingParams(**params), 0, 0)])
    return sampled.logprobs[0]


@pytest.mark.parametrize("num_tokens", [3, 500, 49152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_are_the_log_softmax_of_the_logits(num_tokens, dtype):
    logits = torch.randn(4, num_tokens, generator=torch.Generator().manual_seed(0)).to(dtype) * 5
    rows = [SamplingRow(SamplingParams(logprobs=3), seed, 0) for seed in range(4)]

    sampled = sample(logits, rows)

    expected = torch.log_softmax(logits.double(), -1)
    for i, report in enumerate(sampled.logprobs):
        assert report.token_id == sampled.token_ids[i]
        assert report.logprob == pytest.approx(float(expected[i, report.token_id]), abs=1e-5)
        assert report.rank == 1 + int((logits[i] > logits[i, report.token_id]).sum())
        ranked = sorted(range(num_tokens), key=lambda j: (-float(logits[i, j]), j))[:3]
        assert [token_id for token_id, _ in report.top] == ranked
        for token_id, logprob in report.top:
            assert logprob == pytest.approx(float(expected[i, token_id]), abs=1e-5)


def test_are_those_of_the_model_whatever_the_request_does_to_its_logits():
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1)).tolist()
    plain = logprobs_of(logits)

    for params in (
        {"temperature": 3.0},
        {"temperature": 1.0, "top_k": 2},
        {"temperature": 1.0, "top_p": 0.0},
        {"logit_bias": {7: 100.0}},
    ):
        assert logprobs_of(logits, **params).top == plain.top
    assert logprobs_of(logits, logit_bias={7: 100.0}).token_id == 7
    assert logprobs_of(logits, logit_bias={7: 100.0}).rank > 1


def test_probabilities_of_the_whole_vocabulary_add_up_to_1():
    logits = torch.randn(20, generator=torch.Generator().manual_seed(2)).tolist()

    top = logprobs_of(logits, logprobs=20).top

    assert math.fsum(math.exp(logprob) for _, logprob in top) == pytest.approx(1, abs=1e-6)


def test_equally_likely_tokens_share_a_rank_and_list_the_lower_id_first():
    report = logprobs_of([1.0, 2.0, 2.0, 0.0, 1.0, 1.0])

    assert report.token_id == 1
    assert report.rank == 1
    assert [token_id for token_id, _ in report.top] == [1, 2, 0]


def test_impossible_tokens_have_a_number_that_json_knows():
    report = logprobs_of([-math.inf, 1.0, -math.inf])

    assert report == TokenLogprobs(1, 0.0, 1, ((1, 0.0), (0, LOGPROB_FLOOR), (2, LOGPROB_FLOOR)))
    json.dumps(attrs.asdict(report), allow_nan=False)
    assert logprobs_of([-3e38, 3e38]).top[1] == (0, LOGPROB_FLOOR)


def test_come_only_for_the_rows_that_ask_and_none_at_all_if_no_row_does():
    plain = SamplingRow(SamplingParams(), 0, 0)
    asking = SamplingRow(SamplingParams(logprobs=0), 0, 0)
    logits = torch.zeros(3, 5)

    mixed = sample(logits, [plain, asking, plain])

    assert [report is None for report in mixed.logprobs] == [True, False, True]
    assert mixed.logprobs[1].top == ()
    assert sample(logits, [plain] * 3).logprobs is None


def test_more_alternatives_than_tokens_are_all_tokens():
    assert len(logprobs_of([0.0, 1.0], logprobs=20).top) == 2


@settings(deadline=None)
@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=30))
def test_the_alternatives_are_the_first_in_order(logits):
    report = logprobs_of(logits, logprobs=5)

    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    assert [token_id for token_id, _ in report.top] == ranked[:5]
