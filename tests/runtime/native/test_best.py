"""The choice of greedy tokens inside the native step, beside `ranking.best`."""

import itertools

import numpy as np
import pytest
import torch

pytest.importorskip("numba", reason="Numba is not installed")

from numba import njit

from nanovllm.runtime.native.best import BEST_PART, best_of_part, best_of_row
from nanovllm.runtime.native.buffers import BUFFERS, make_record
from nanovllm.runtime.ranking import best


@njit
def run(address, length, width, num_rows, buffers):
    num_parts = -(-length // BEST_PART)
    for row in range(num_rows):
        for part in range(num_parts):
            first = part * BEST_PART
            place = address + 4 * (row * width + first)
            count = min(BEST_PART, length - first)
            best_of_part(place, count, first, row * num_parts + part, buffers)
        best_of_row(row, num_parts, buffers)


def found(logits):
    """Ids and logits, of rows that have padding behind them which would win."""
    num_rows, length = logits.shape
    padded = np.full((num_rows, length + 16), np.inf, np.float32)
    padded[:, :length] = logits
    num_parts = -(-length // BEST_PART)
    arrays = {
        "best_peaks": np.zeros(num_rows, np.float32),
        "best_ids": np.zeros(num_rows, np.int32),
        "part_peaks": np.zeros((num_rows, num_parts), np.float32),
        "part_ids": np.zeros((num_rows, num_parts), np.int32),
    }
    run(padded.ctypes.data, length, length + 16, num_rows, make_record(BUFFERS, **arrays))
    return arrays["best_ids"], arrays["best_peaks"]


SPECIAL = (-np.inf, -1.5, -0.0, 0.0, 1e-45, 3.25, np.inf, np.nan, -np.nan)


def check(logits):
    ids, peaks = found(logits)
    want_ids, want_peaks = best(torch.from_numpy(logits))
    np.testing.assert_array_equal(ids, want_ids.numpy())
    np.testing.assert_array_equal(peaks, want_peaks.numpy())


def test_any_three_values_come_in_the_same_order():
    check(np.array(list(itertools.product(SPECIAL, repeat=3)), np.float32))


@pytest.mark.parametrize("length", [1, 15, BEST_PART, BEST_PART + 1, 3 * BEST_PART + 100])
def test_ties_and_parts_change_nothing(length):
    rng = np.random.default_rng(length)
    for scale in (1, 3, 1000):
        check(np.round(rng.standard_normal((8, length)) * scale).astype(np.float32))
    broken = rng.standard_normal((8, length)).astype(np.float32)
    broken[np.arange(8), rng.integers(0, length, 8)] = rng.choice(SPECIAL, 8)
    check(broken)
