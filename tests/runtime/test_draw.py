import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.runtime.philox import uniform
from nanovllm.runtime.sampler import sample
from nanovllm.sampling_params import SamplingParams
from tests.runtime.sampling_rows import INF, KINDS, leave_the_cores_to_others, row, token_of

one_thread = pytest.fixture(autouse=True, scope="module")(leave_the_cores_to_others)


def reference(logits, given_row, *, min_p_nudge=0.0, top_p_nudge=0.0, u_nudge=0.0):
    """The token of a row, computed the slow and obvious way: float32 logits, float64 sums.

    The nudges move the cuts and the draw a little, to see whether rounding may decide.
    """
    params = given_row.params
    logits = [np.float32(logit) for logit in logits]
    for token_id, bias in params.logit_bias:
        logits[token_id] = np.float32(float(logits[token_id]) + bias)
    completion = list(given_row.completion_token_ids())
    for token_id in {*given_row.prompt_token_ids(), *completion}:
        logit, penalty = float(logits[token_id]), params.repetition_penalty
        logits[token_id] = np.float32(logit / penalty if logit > 0 else logit * penalty)
    for token_id in set(completion):
        loss = params.presence_penalty + params.frequency_penalty * completion.count(token_id)
        logits[token_id] = np.float32(float(logits[token_id]) - loss)
    logits = [float(logit) for logit in logits]
    if given_row.num_completion_tokens < params.min_tokens:
        banned = [-INF if i in given_row.stop_token_ids else x for i, x in enumerate(logits)]
        logits = banned if max(banned) > -INF else logits
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.temperature == 0:
        return ranked[0]
    peak = logits[ranked[0]]
    weights = [math.exp((logit - peak) / params.temperature) for logit in logits]
    kept = [i for i in ranked if weights[i] >= params.min_p * (1 + min_p_nudge)] or ranked[:1]
    if params.top_k > 0:
        kept = kept[: params.top_k]
    if params.top_p < 1:
        target = params.top_p * (1 + top_p_nudge) * sum(weights[i] for i in kept)
        size, mass = 0, 0.0
        while size < len(kept) and (size == 0 or mass < target):
            mass += weights[kept[size]]
            size += 1
        kept = kept[:size]
    u = uniform([given_row.seed], [given_row.position])[0] + u_nudge
    left = u * sum(weights[i] for i in kept)
    for i in sorted(kept):
        left -= weights[i]
        if left < 0:
            return i
    return max(i for i in kept if weights[i] > 0)


def neighbours(logits, given_row):
    """Every token that rounding may make of the reference's."""
    nudges = (-3e-6, 0.0, 3e-6)
    return {
        reference(logits, given_row, min_p_nudge=a, top_p_nudge=b, u_nudge=c)
        for a in nudges
        for b in nudges
        for c in nudges
    }


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 1.9, 100.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 19, 20, 21, 2**31]),
    top_p=st.sampled_from([0.0, 1e-4, 0.3, 0.9, 0.999, 1 - 1e-9, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.2, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.7, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.4]),
    logit_bias=st.dictionaries(
        st.integers(0, 19), st.integers(-24, 24).map(lambda n: n / 8), max_size=3
    ),
    min_tokens=st.integers(0, 6),
)
TOKENS = st.lists(st.integers(0, 19), max_size=8)


class TestAgainstTheReference:
    @settings(deadline=None, max_examples=500)
    @given(st.data())
    def test_every_combination_of_parameters_gives_the_reference_token(self, data):
        num_tokens = data.draw(st.sampled_from([20, 20, 20, 300, 1500]), label="num_tokens")
        generator = np.random.default_rng(data.draw(st.integers(0, 2**32), label="logits"))
        logits = (generator.standard_normal(num_tokens) * 2).astype(np.float32)
        if data.draw(st.booleans(), label="with ties and masks"):
            logits = np.round(logits * 2) / 2
            logits[generator.random(num_tokens) < 0.3] = -INF
            logits[generator.integers(num_tokens)] = 1.0
        given_row = row(
            data.draw(PARAMS, label="params"),
            seed=data.draw(st.integers(-(2**65), 2**65), label="seed"),
            position=data.draw(st.integers(0, 10**6), label="position"),
            prompt=data.draw(TOKENS, label="prompt"),
            completion=data.draw(TOKENS, label="completion"),
            stop=data.draw(st.sets(st.integers(0, 19), max_size=2), label="stop"),
        )

        token_id = sample(torch.from_numpy(logits)[None], [given_row]).token_ids[0]

        if token_id is None:
            assert np.isneginf(logits).all()
        elif token_id != (expected := reference(logits, given_row)):
            # Float32 may fall on the other side of a border, but only by its rounding.
            assert token_id in neighbours(logits, given_row), (token_id, expected)


class TestDistribution:
    NUM_DRAWS = 20_000

    def chi_square(self, logits, params, probabilities):
        rows = [row(params, seed=123, position=i) for i in range(self.NUM_DRAWS)]
        drawn = sample(logits.expand(self.NUM_DRAWS, -1), rows).token_ids
        observed = np.bincount(drawn, minlength=len(logits))
        expected = self.NUM_DRAWS * np.asarray(probabilities)
        possible = expected > 0
        assert observed[~possible].sum() == 0
        difference = observed[possible] - expected[possible]
        degrees = possible.sum() - 1
        # In standard deviations of a chi-square variable from its mean.
        return ((difference**2 / expected[possible]).sum() - degrees) / math.sqrt(2 * degrees)

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
    def test_matches_the_softmax(self, temperature):
        logits = torch.randn(30, generator=torch.Generator().manual_seed(8))
        params = SamplingParams(temperature=temperature)

        probabilities = torch.softmax(logits.double() / temperature, -1)

        assert abs(self.chi_square(logits, params, probabilities)) < 3

    @pytest.mark.parametrize(
        "params",
        [SamplingParams(top_k=6), SamplingParams(top_p=0.8), SamplingParams(min_p=0.2)],
    )
    def test_matches_the_renormalised_softmax_of_what_is_kept(self, params):
        logits = torch.randn(30, generator=torch.Generator().manual_seed(9)) * 2
        ranked, ids = torch.softmax(logits.double(), -1).sort(descending=True)
        keep = {
            6: torch.arange(30) < 6,
            0: (ranked.cumsum(-1) - ranked < params.top_p) & (ranked >= params.min_p * ranked[0]),
        }[params.top_k]

        probabilities = torch.zeros(30).double()
        probabilities[ids] = ranked * keep / (ranked * keep).sum()

        assert abs(self.chi_square(logits, params, probabilities)) < 3

    def test_is_as_good_over_seeds_as_over_positions(self):
        rows = [row(SamplingParams(), seed=i, position=5) for i in range(self.NUM_DRAWS)]

        drawn = sample(torch.zeros(self.NUM_DRAWS, 16), rows).token_ids

        counts = np.bincount(drawn, minlength=16)
        chi_square = ((counts - self.NUM_DRAWS / 16) ** 2 / (self.NUM_DRAWS / 16)).sum()
        assert abs(chi_square - 15) / math.sqrt(30) < 3


class TestLimits:
    @pytest.mark.parametrize("seed", range(20))
    def test_top_p_of_0_keeps_exactly_the_top_token(self, seed):
        assert token_of([1.0, 2.0, 2.0, 1.9999999], SamplingParams(top_p=0), seed) == 1
        # Also where float32 cannot tell the weights of two different logits apart.
        flat = SamplingParams(top_p=0, temperature=1e9)
        assert token_of([1.0, 1.5, 2.0, 1.9], flat, seed) == 2

    @pytest.mark.parametrize("top_k", [-1, 0, 6, 7, 2**31, 2**70])
    def test_top_k_of_no_effect_is_off(self, top_k):
        for seed in range(20):
            logits = [0.0, 0.1, 0.2, 0.1, 0.0, 0.3]

            limited = token_of(logits, SamplingParams(top_k=top_k), seed)

            assert limited == token_of(logits, SamplingParams(), seed)

    def test_rows_with_different_top_k_share_a_batch(self):
        logits = torch.arange(10.0).flip(0).repeat(400, 1)
        top_ks = [(-1, 0, 1, 2, 9, 10, 11, 2**31)[i % 8] for i in range(400)]
        rows = [row(SamplingParams(temperature=50.0, top_k=k), i) for i, k in enumerate(top_ks)]

        tokens = sample(logits, rows).token_ids

        for top_k in set(top_ks):
            drawn = {t for t, k in zip(tokens, top_ks, strict=True) if k == top_k}
            assert drawn == set(range(10 if top_k in (-1, 0) else min(top_k, 10)))

    def test_top_p_just_under_1_keeps_all_that_counts(self):
        drawn = {token_of([0.0] * 8, SamplingParams(top_p=1 - 1e-9), seed) for seed in range(200)}

        assert drawn == set(range(8))

    @pytest.mark.parametrize("temperature", [1e20, 1e38, 1e39, 1e300])
    def test_huge_temperatures_are_flat_but_masks_hold(self, temperature):
        params = SamplingParams(temperature=temperature)

        drawn = {token_of([9.0, -INF, -9.0, 0.0], params, seed) for seed in range(100)}

        assert drawn == {0, 2, 3}

    def test_extreme_logits_do_not_overflow(self):
        for params in KINDS:
            assert token_of([-3e38, 3e38, -INF, 0.0], params, completion=(0, 3)) == 1

    def test_ties_at_the_cut_keep_the_lowest_ids(self):
        logits = [1.0, 3.0, 2.0, 2.0, 2.0, 2.0]
        for params in (SamplingParams(top_k=3), SamplingParams(top_p=0.55)):
            assert {token_of(logits, params, seed) for seed in range(100)} == {1, 2, 3}

    @pytest.mark.parametrize("num_tokens", [2000, 49152])
    def test_a_flat_nucleus_larger_than_the_first_guess_is_exact(self, num_tokens):
        logits = torch.randn(40, num_tokens, generator=torch.Generator().manual_seed(10)) * 0.1
        logits = logits.bfloat16().float()
        params = SamplingParams(top_p=0.5)

        tokens = sample(logits, [row(params, seed) for seed in range(40)]).token_ids

        ranked, ids = logits.double().softmax(-1).sort(descending=True, stable=True)
        size = (ranked.cumsum(-1) < 0.5).sum(-1) + 1
        for i in range(40):
            assert tokens[i] in ids[i, : size[i] + 1]
