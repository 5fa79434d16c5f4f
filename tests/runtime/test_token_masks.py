import math

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.runtime.sampler import sample
from nanovllm.runtime.token_masks import keep_allowed
from nanovllm.sampling_params import SamplingParams
from tests.runtime.sampling_rows import INF, KINDS, leave_the_cores_to_others, mixed_rows, row

one_thread = pytest.fixture(autouse=True, scope="module")(leave_the_cores_to_others)

STRUCTURED = SamplingParams(temperature=0, regex="a")


def words(ids, num_words):
    """The bitmask of some ids, bit by bit."""
    mask = np.zeros(num_words, np.uint32)
    for token_id in ids:
        mask[token_id // 32] |= np.uint32(1 << token_id % 32)
    return mask.view(np.int32)


def with_mask(one, mask):
    return attrs.evolve(one, allowed_tokens=lambda: mask)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_keeps_the_logits_of_the_tokens_in_the_mask_and_no_other(data):
    num_tokens = data.draw(st.integers(1, 130))
    num_words = data.draw(st.integers(1, 6))  # fewer or more than the logits have
    allowed = data.draw(st.sets(st.integers(0, 32 * num_words - 1)))
    given_logits = torch.randn(num_tokens, generator=torch.Generator().manual_seed(1))
    kept = [i if i in allowed else None for i in range(num_tokens)]
    expected = [float(given_logits[i]) if i is not None else -INF for i in kept]
    logits = given_logits.clone()

    if all(i is None for i in kept):
        with pytest.raises(ValueError, match="allows no token"):
            keep_allowed(logits, words(allowed, num_words))
    else:
        keep_allowed(logits, words(allowed, num_words))
        assert logits.tolist() == expected


@pytest.mark.parametrize("num_tokens", [8191, 8192, 8193, 16385, 49152])
@pytest.mark.parametrize("num_words", [1, 255, 257, 513, 1536])
def test_large_vocabularies_are_gone_through_in_pieces(num_tokens, num_words):
    generator = np.random.default_rng(num_tokens + num_words)
    allowed = generator.integers(-(2**31), 2**31, num_words).astype(np.int32)
    bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")
    bits = np.resize(np.append(bits, np.zeros(num_tokens, np.uint8)), num_tokens)
    logits = torch.randn(num_tokens, generator=torch.Generator().manual_seed(0))
    expected = torch.where(torch.from_numpy(bits == 1), logits, -INF)
    keep_allowed(logits, allowed)

    assert torch.equal(logits, expected)


@pytest.mark.parametrize("broken", [[math.nan, 1.0], [1.0, INF], [-INF, -INF]])
def test_a_broken_row_stays_as_it_is(broken):
    logits = torch.tensor(broken)
    keep_allowed(logits, words([0], 1))

    torch.testing.assert_close(logits, torch.tensor(broken), equal_nan=True)


def test_what_is_allowed_but_impossible_to_the_model_is_no_token():
    with pytest.raises(ValueError, match="allows no token"):
        keep_allowed(torch.tensor([-INF, 1.0]), words([0], 1))


@settings(deadline=None, max_examples=20)
@given(st.data())
def test_rows_of_every_kind_choose_among_their_allowed_tokens_and_leave_neighbours_alone(data):
    num_tokens = 90
    rows = mixed_rows(2 * len(KINDS), num_tokens)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))
    logits = torch.randn(len(rows), num_tokens, generator=generator) * 3
    expected = sample(logits, rows)
    allowed = {}
    for i in range(0, len(rows), 2):
        # 10 to 89: never a stop token, of which `min_tokens` would leave none.
        allowed[i] = data.draw(st.sets(st.integers(10, num_tokens - 1), min_size=1, max_size=9))
    constrained = [
        with_mask(one, words(allowed[i], 3)) if i in allowed else one for i, one in enumerate(rows)
    ]

    sampled = sample(logits, constrained)

    for i, token_id in enumerate(sampled.token_ids):
        if i in allowed:
            assert token_id in allowed[i]
        else:
            assert token_id == expected.token_ids[i]


def test_a_plain_greedy_row_with_a_structure_is_masked_too():
    logits = torch.tensor([[5.0, 1.0, 2.0]])

    assert sample(logits, [with_mask(row(STRUCTURED), words([1, 2], 1))]).token_ids == [2]


def test_log_probabilities_are_those_of_the_model_whatever_is_allowed():
    logits = torch.tensor([[5.0, 1.0, 2.0]])
    params = SamplingParams(temperature=0, regex="a", logprobs=1)
    (report,) = sample(logits, [with_mask(row(params), words([1], 1))]).logprobs

    assert (report.token_id, report.rank) == (1, 3)
    assert report.logprob == pytest.approx(float(logits.log_softmax(-1)[0, 1]), abs=1e-6)
