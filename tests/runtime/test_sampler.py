import math

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.runtime.sampler import (
    Sampled,
    SamplingRow,
    is_plain_greedy,
    sample,
    sample_greedy,
)
from nanovllm.sampling_params import SamplingParams
from tests.runtime.sampling_rows import (
    GREEDY,
    INF,
    KINDS,
    RANDOM,
    leave_the_cores_to_others,
    mixed_rows,
    row,
    token_of,
)

one_thread = pytest.fixture(autouse=True, scope="module")(leave_the_cores_to_others)


class TestGreedy:
    def test_takes_the_largest_logit(self):
        assert token_of([1.0, 3.0, 2.0], GREEDY) == 1

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    @pytest.mark.parametrize("num_tokens", [2, 15, 64, 1000, 49152, 70001])
    def test_takes_the_lowest_id_on_ties(self, dtype, num_tokens):
        generator = np.random.default_rng(num_tokens)
        logits = torch.zeros(6, num_tokens, dtype=dtype)
        firsts = []
        for i in range(6):
            tied = sorted(generator.choice(num_tokens, size=2, replace=False).tolist())
            logits[i, tied] = 5.0
            firsts.append(tied[0])

        assert sample_greedy(logits) == firsts
        assert sample(logits, [row(attrs.evolve(GREEDY, logprobs=0))] * 6).token_ids == firsts

    def test_zeros_of_either_sign_are_a_tie(self):
        assert token_of([-1.0, -0.0, 0.0], GREEDY) == 1
        assert token_of([-1.0, 0.0, -0.0], GREEDY) == 1
        assert token_of([-1.0, -0.0, 0.0], SamplingParams(top_k=1)) == 1
        assert token_of([-1.0, -0.0, 0.0], SamplingParams(top_p=0)) == 1

    def test_does_not_depend_on_random_neighbours(self):
        logits = torch.randn(30, 300, generator=torch.Generator().manual_seed(0))
        logits[:, 5] = -INF
        rows = [row(GREEDY) if i % 2 else row(KINDS[i // 2], seed=i) for i in range(30)]

        mixed = sample(logits, rows).token_ids

        assert mixed[1::2] == logits.argmax(-1).tolist()[1::2]

    @pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-300, 5e-324])
    def test_tiny_temperatures_are_greedy_also_on_ties(self, temperature):
        params = SamplingParams(temperature=temperature)
        logits = [0.0, 7.0, 7.0, -INF, 6.999999]

        assert {token_of(logits, params, seed) for seed in range(20)} == {1}

    def test_plain_rows_are_recognised(self):
        assert is_plain_greedy(GREEDY)
        assert is_plain_greedy(SamplingParams(temperature=0, top_k=5, top_p=0.1, seed=3))
        assert not is_plain_greedy(RANDOM)
        for name, value in (
            ("logit_bias", {1: 1.0}),
            ("repetition_penalty", 1.1),
            ("presence_penalty", 0.1),
            ("frequency_penalty", -0.1),
            ("min_tokens", 1),
            ("logprobs", 0),
            ("json_schema", {}),
            ("regex", "a"),
            ("choice", ["a"]),
            ("grammar", 'start: "a"'),
        ):
            assert not is_plain_greedy(SamplingParams(temperature=0, **{name: value}))


class TestBrokenRows:
    BROKEN = (
        [math.nan, 1.0, 2.0, 3.0],
        [1.0, 2.0, 3.0, math.nan],
        [1.0, INF, 2.0, 3.0],
        [-INF, -INF, -INF, -INF],
        [-INF, math.nan, -INF, INF],
    )

    @pytest.mark.parametrize("broken", BROKEN)
    @pytest.mark.parametrize("params", KINDS)
    def test_give_no_token_and_leave_their_neighbours_alone(self, broken, params):
        fine = [0.5, 1.0, -INF, 0.25]
        rows = [row(params, seed, stop=(3,)) for seed in range(3)]

        with_broken = sample(torch.tensor([fine, broken, fine]), rows)
        without = sample(torch.tensor([fine, fine]), [rows[0], rows[2]])

        assert with_broken.token_ids[1] is None
        assert [with_broken.token_ids[i] for i in (0, 2)] == without.token_ids
        if params.logprobs is not None:
            assert with_broken.logprobs[1] is None
            assert [with_broken.logprobs[i] for i in (0, 2)] == without.logprobs

    def test_plain_greedy_rows_do_so_too(self):
        fine = [0.5, 1.0, -INF, 0.25]
        logits = torch.tensor([fine, *self.BROKEN, fine])

        for some in (logits, logits.bfloat16(), logits.double()):
            assert sample_greedy(some) == [1, None, None, None, None, None, 1]

    @pytest.mark.parametrize("params", KINDS)
    def test_one_possible_token_is_enough(self, params):
        logits = [-INF, -INF, -3e38, -INF, -INF]

        assert {token_of(logits, params, seed, stop=(2,)) for seed in range(20)} == {2}

    @pytest.mark.parametrize("params", KINDS)
    def test_masked_tokens_stay_impossible(self, params):
        logits = torch.full((200, 40), -INF)
        logits[:, 10:20] = torch.randn(200, 10, generator=torch.Generator().manual_seed(1))
        rows = [row(params, seed, completion=(1, 12), stop=(3,)) for seed in range(200)]

        assert set(sample(logits, rows).token_ids) <= set(range(10, 20))


class TestInputs:
    def test_logits_are_not_changed(self):
        logits = torch.randn(len(KINDS), 50, generator=torch.Generator().manual_seed(2))
        before = logits.clone()

        sample(logits, mixed_rows(len(KINDS), 50))

        assert torch.equal(logits, before)

    def test_any_float_type_counts_as_its_float32_values(self):
        logits = torch.randn(60, 700, generator=torch.Generator().manual_seed(3)) * 4
        rows = mixed_rows(60, 700)

        for dtype in (torch.bfloat16, torch.float16):
            rounded = logits.to(dtype)

            assert sample(rounded, rows) == sample(rounded.float(), rows)
        assert sample(logits.double(), rows) == sample(logits, rows)

    def test_strides_do_not_matter(self):
        wide = torch.randn(45, 1100, generator=torch.Generator().manual_seed(4)) * 4
        rows = mixed_rows(45, 900)
        expected = sample(wide[:, :900].clone(), rows)

        assert sample(wide[:, :900], rows) == expected
        assert sample(wide.t().contiguous().t()[:, :900], rows) == expected
        assert sample_greedy(wide[:, :900]) == wide[:, :900].argmax(-1).tolist()

    def test_inference_tensors_and_tensors_with_gradients_are_fine(self):
        rows = mixed_rows(15, 50)
        with torch.inference_mode():
            frozen = torch.ones(15, 50)

        assert sample(frozen, rows) == sample(torch.ones(15, 50, requires_grad=True), rows)

    def test_no_rows_give_no_tokens(self):
        assert sample(torch.empty(0, 10), []) == Sampled([], None)

    def test_penalties_ask_for_tokens_and_nothing_else_does(self):
        def refuse():
            raise AssertionError("not needed")

        for params in KINDS:
            if params.repetition_penalty == 1 and params.frequency_penalty == 0:
                given_row = SamplingRow(params, 0, 0, 0, frozenset(), refuse, refuse)
                sample(torch.zeros(1, 10), [given_row])


class TestBatchInvariance:
    """A row's result depends on nothing but the row, to the last bit."""

    @settings(deadline=None, max_examples=60)
    @given(st.data())
    def test_a_row_gives_the_same_alone_and_anywhere_in_a_batch(self, data):
        num_tokens = data.draw(st.integers(2, 700), label="num_tokens")
        seed = data.draw(st.integers(0, 2**32), label="seed")
        order = data.draw(st.permutations(range(len(KINDS))), label="order")
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(len(KINDS), num_tokens, generator=generator) * 3
        # Rounded, so that ties are everywhere.
        logits = logits.bfloat16().float()
        rows = [
            row(params, seed + i, i, prompt=(0,), completion=(0,)) for i, params in enumerate(KINDS)
        ]

        together = sample(logits, rows)
        shuffled = sample(logits[list(order)], [rows[i] for i in order])

        for i, place in enumerate(order):
            alone = sample(logits[place : place + 1], [rows[place]])
            assert together.token_ids[place] == shuffled.token_ids[i] == alone.token_ids[0]
            if rows[place].params.logprobs is not None:
                assert together.logprobs[place] == shuffled.logprobs[i] == alone.logprobs[0]

    @pytest.mark.parametrize("num_tokens", [49152, 151936])
    def test_so_it_does_in_a_real_vocabulary(self, num_tokens):
        logits = torch.randn(len(KINDS), num_tokens, generator=torch.Generator().manual_seed(5))
        rows = mixed_rows(len(KINDS), num_tokens)

        together = sample(logits, rows)
        backwards = sample(logits.flip(0), rows[::-1])
        alone = [sample(logits[i : i + 1], [r]).token_ids[0] for i, r in enumerate(rows)]

        assert together.token_ids == alone == backwards.token_ids[::-1]
        assert together.logprobs == backwards.logprobs[::-1]

    def test_the_number_of_threads_does_not_matter(self):
        logits = torch.randn(len(KINDS), 80000, generator=torch.Generator().manual_seed(6))
        rows = mixed_rows(len(KINDS), 80000)
        one = sample(logits, rows)
        try:
            torch.set_num_threads(2)
            two = sample(logits, rows)
        finally:
            torch.set_num_threads(1)

        assert one == two

    def test_a_seeded_row_ignores_seeds_and_shapes_of_its_neighbours(self):
        ours = torch.randn(1, 300, generator=torch.Generator().manual_seed(7))
        for params in KINDS:
            expected = sample(ours, [row(params, 42, 17)]).token_ids[0]
            for place in range(9):
                logits = torch.randn(9, 300, generator=torch.Generator().manual_seed(place))
                logits[place] = ours[0]
                rows = [row(KINDS[(place + i) % len(KINDS)], place * i) for i in range(9)]
                rows[place] = row(params, 42, 17)

                assert sample(logits, rows).token_ids[place] == expected

    def test_neither_global_generator_is_touched(self):
        torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()

        sample(torch.randn(15, 20, generator=torch.Generator()), mixed_rows(15, 20))

        assert torch.equal(torch.get_rng_state(), torch_state)
        assert np.array_equal(np.random.get_state()[1], numpy_state)

    def test_draws_are_those_of_the_first_release(self):
        """A change here breaks every user's seeds: say so in the changelog."""
        logits = torch.linspace(-2, 2, 11)[None]
        tokens = [
            sample(logits, [row(SamplingParams(top_p=0.9), seed, position)]).token_ids[0]
            for seed, position in ((0, 0), (0, 1), (0, 2), (1, 0), (-1, 0), (2**64, 1), (9, 10**6))
        ]

        assert tokens == [9, 10, 5, 10, 9, 10, 8]


class TestFailingRows:
    @pytest.mark.parametrize("params", KINDS)
    def test_an_exception_fails_its_own_row_and_changes_no_other(self, params):
        def raising():
            raise LookupError("no such token")

        rows = [row(params, seed, prompt=(0,), completion=(1, 1), stop=(3,)) for seed in range(5)]
        logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
        expected = sample(logits, rows)
        rows[1] = attrs.evolve(rows[1], allowed_tokens=raising)
        penalised = SamplingParams(repetition_penalty=2.0)
        rows[3] = attrs.evolve(rows[3], params=penalised, completion_token_ids=raising)

        sampled = sample(logits, rows)

        message = "LookupError: no such token"
        assert sampled.failures == {1: message, 3: message}
        assert [sampled.token_ids[i] for i in (1, 3)] == [None, None]
        for i in (0, 2, 4):
            assert sampled.token_ids[i] == expected.token_ids[i]
            if expected.logprobs is not None:
                assert sampled.logprobs[i] == expected.logprobs[i]

    def test_a_lone_row_fails_and_a_broken_one_says_nothing_of_its_own(self):
        def raising():
            raise ValueError("no")

        one = attrs.evolve(row(GREEDY), allowed_tokens=raising)

        assert sample(torch.ones(1, 4), [one]).failures == {0: "ValueError: no"}
        assert sample(torch.full((1, 4), math.nan), [row(GREEDY)]).failures == {}
