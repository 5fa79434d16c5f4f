import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.kernels.reference.weights import WEIGHT_ONE, pick, target_weight, weigh


class TestWeigh:
    def test_the_peak_weighs_one_and_a_mask_nothing(self):
        logits = torch.tensor([[3.0, -math.inf, 2.0, -200.0]])

        weights = weigh(logits, torch.tensor([[3.0]]))

        assert weights[0, [0, 1, 3]].tolist() == [WEIGHT_ONE, 0, 0]
        assert abs(int(weights[0, 2]) / WEIGHT_ONE - math.exp(-1)) < 1e-7

    def test_a_logit_weighs_the_same_at_every_place_of_tensors_of_every_size(self):
        """What batch invariance rests on, and what no library promises."""
        values = -60 * torch.rand(997, generator=torch.Generator().manual_seed(0))
        peak = torch.zeros(1, 1)
        expected = torch.cat([weigh(value[None, None], peak) for value in values], 1)
        for size in (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 100, 957):
            for start in range(40):
                some = slice(start, start + size)
                assert torch.equal(weigh(values[None, some], peak), expected[:, some])
        long, expected = values.repeat(153)[None], expected.repeat(1, 153)
        for size in (32768, 32769, 49152, 65537, 151936, 152541):
            assert torch.equal(weigh(long[:, :size], peak), expected[:, :size])

    def test_weights_never_rise_as_logits_fall(self):
        logits = torch.linspace(0, -60, 1_000_000)[None]

        weights = weigh(logits, torch.zeros(1, 1))

        assert bool((weights.diff() <= 0).all())

    def test_what_is_below_min_weight_weighs_nothing(self):
        logits = torch.log(torch.tensor([[1.0, 0.5, 0.25]]))

        weights = weigh(logits, torch.zeros(1, 1), 1.0, torch.tensor([[0.4 * WEIGHT_ONE]]))

        assert (weights > 0).tolist() == [[True, True, False]]


WEIGHTS = st.lists(st.integers(0, 2**40) | st.integers(0, 2), min_size=1, max_size=20).filter(any)
UNIT = st.integers(0, 2**53 - 1).map(lambda bits: bits / 2**53)


class TestPick:
    @settings(max_examples=300)
    @given(WEIGHTS, st.sampled_from([0.0, 2.0**-53, 0.5, 1 - 2.0**-53]) | UNIT)
    def test_finds_the_share_that_u_falls_into_and_never_an_impossible_token(self, weights, u):
        index = int(pick(torch.tensor([weights]), torch.tensor([[u]], dtype=torch.float64)))

        assert weights[index] > 0
        before, total = sum(weights[:index]), sum(weights)
        slack = total * 2.0**-50
        assert before - slack <= u * total <= before + weights[index] + slack

    def test_the_ends_of_the_unit_interval_pick_the_first_and_last_possible(self):
        weights = torch.tensor([[0, 0, 5, 1, 2**40, 0]])
        for u, index in ((0.0, 2), (1 - 2.0**-53, 4)):
            assert int(pick(weights, torch.tensor([[u]], dtype=torch.float64))) == index

    @given(st.integers(1, 2**60))
    def test_the_largest_u_stays_below_any_sum(self, total):
        u = torch.tensor([[1 - 2.0**-53]], dtype=torch.float64)

        assert int(pick(torch.tensor([[total, 0]]), u)) == 0


class TestTargetWeight:
    @given(st.integers(1, 2**60), st.floats(0, 1))
    def test_is_at_least_1_and_at_most_the_mass(self, mass, top_p):
        column = torch.tensor([[top_p]], dtype=torch.float64)

        target = int(target_weight(torch.tensor([[mass]]), column))

        assert 1 <= target <= mass
        assert abs(target - top_p * mass) <= 1 + mass * 2.0**-50
