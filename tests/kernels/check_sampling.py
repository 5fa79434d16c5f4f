"""Sampling kernels against the plain operators, on Triton's interpreter: see test_interpreted."""

import pytest
import torch

from nanovllm.kernels import ops
from nanovllm.kernels.triton import greedy, sample
from tests.kernels.interpreter import _mended_interpreter  # noqa: F401  a fixture

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
INF, NAN = float("inf"), float("nan")


def logits_of(num_rows, vocab_size, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (4 * torch.randn(num_rows, vocab_size, generator=generator)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 3, 1024, 1025, 9000])
@pytest.mark.parametrize("num_rows", [1, 17])
def test_greedy_agrees(num_rows, vocab_size, dtype):
    """In half precision there are many ties: the lowest id has to win them."""
    logits = logits_of(num_rows, vocab_size, dtype)

    for expected, actual in zip(ops.greedy(logits), greedy.greedy(logits), strict=True):
        assert torch.equal(expected, actual)


def test_greedy_agrees_on_what_is_no_number():
    logits = logits_of(6, 3000)
    logits[0, [2000, 2500]] = NAN
    logits[1, 100], logits[1, 5] = NAN, INF
    logits[2] = -INF
    logits[3, [2999, 40]] = INF
    logits[4, :2999] = -INF
    ids, peak = greedy.greedy(logits)

    assert torch.equal(ops.greedy(logits)[0], ids)
    torch.testing.assert_close(peak, ops.greedy(logits)[1], rtol=0, atol=0, equal_nan=True)
    assert ids.tolist()[:5] == [2000, 100, 0, 40, 2999]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(3, 5), (4, 1024), (18, 5000)])
def test_draws_agree(num_rows, vocab_size, dtype):
    """Of each kind of row: greedy, hot, cold, cut by `min_p`."""
    logits = logits_of(num_rows, vocab_size, dtype)
    ids, peak = ops.greedy(logits)
    generator = torch.Generator().manual_seed(1)
    uniform = torch.rand(num_rows, generator=generator, dtype=torch.float64)
    uniform[0], uniform[1] = 0.0, 1 - 2.0**-53
    temperature = torch.tensor([1.0, 0.7, 0.0, 5.0, 1e38, 0.05]).repeat(3)[:num_rows]
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.1, 0.0, 0.5]).repeat(3)[:num_rows]
    arguments = logits, peak, temperature, min_p, uniform, ids

    assert torch.equal(ops.sample_any(*arguments), sample.sample_any(*arguments))


def test_rows_that_can_not_be_drawn_from_keep_their_greedy_id():
    logits = logits_of(3, 2000)
    logits[0, 1500], logits[1], logits[2, 7] = NAN, -INF, INF
    ids, peak = ops.greedy(logits)
    ones = torch.ones(3)
    arguments = logits, peak, ones, 0 * ones, ones.double() / 2, ids

    assert ids.tolist() == sample.sample_any(*arguments).tolist() == [1500, 0, 7]
    assert ids.tolist() == ops.sample_any(*arguments).tolist()
