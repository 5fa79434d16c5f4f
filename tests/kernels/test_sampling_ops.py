import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.kernels import ops
from nanovllm.kernels.reference import sampling, weights
from nanovllm.runtime import draw as runtime_draw
from nanovllm.runtime.philox import uniform
from nanovllm.runtime.ranking import best
from nanovllm.runtime.sampler import sample
from nanovllm.sampling_params import SamplingParams
from tests.runtime.sampling_rows import leave_the_cores_to_others, row

one_thread = pytest.fixture(autouse=True, scope="module")(leave_the_cores_to_others)

INF, NAN = float("inf"), float("nan")
LOGITS = st.sampled_from([0.0, -0.0, 1.5, 1.5, -2.0, 3.25, -INF])


def test_the_constants_are_those_of_the_runtime():
    assert sampling.WEIGHT_ONE == weights.WEIGHT_ONE
    assert sampling.MAX_TEMPERATURE == runtime_draw.MAX_TEMPERATURE


@given(st.lists(LOGITS | st.sampled_from([INF, NAN]), min_size=1, max_size=12))
def test_greedy_is_the_runtimes(values):
    logits = torch.tensor([values])
    for expected, actual in zip(best(logits), ops.greedy(logits), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-30, 0.3, 0.8, 1.0, 4.0, 1e38, 1e300]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.3, 1.0]),
)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(PARAMS, st.integers(0, 2**64), st.integers(0, 500)), min_size=1),
    vocab_size=st.sampled_from([1, 7, 300]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_draws_are_the_samplers(rows, vocab_size, dtype):
    """Bit for bit: whatever a row's neighbours are."""
    generator = torch.Generator().manual_seed(len(rows))
    logits = (5 * torch.randn(len(rows), vocab_size, generator=generator)).to(dtype)
    ids, peak = ops.greedy(logits)
    # 0 marks a row as greedy, as one with a tiny temperature is.
    given = [0.0 if row(*one).is_greedy else one[0].temperature for one in rows]
    temperature = torch.tensor(given, dtype=torch.float64)
    min_p = torch.tensor([params.min_p for params, _, _ in rows])
    numbers = uniform([seed for _, seed, _ in rows], [position for _, _, position in rows])
    drawn = ops.sample_any(logits, peak, temperature.float(), min_p, torch.from_numpy(numbers), ids)

    assert sample(logits, [row(*given) for given in rows]).token_ids == drawn.tolist()


def test_rows_that_can_not_be_drawn_from_keep_their_greedy_id():
    logits = torch.tensor([[0.0, NAN, 1.0], [-INF, -INF, -INF], [0.0, 1.0, INF]])
    ids, peak = ops.greedy(logits)
    ones = torch.ones(3)

    assert ids.tolist() == [1, 0, 2]
    assert ids.tolist() == ops.sample_any(logits, peak, ones, 0 * ones, ones.double(), ids).tolist()
