import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.kernels.reference.philox import philox4x32
from nanovllm.runtime.philox import uniform

# The known answers published with the reference implementation (Random123, `kat_vectors`).
KNOWN_ANSWERS = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
INTEGERS = st.integers(min_value=-(2**70), max_value=2**70)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_gives_the_published_answers_for_integers(counter, key, answer):
    assert answer == philox4x32(counter, key)


def test_gives_the_published_answers_for_arrays_of_rows():
    counters, keys, answers = zip(*KNOWN_ANSWERS, strict=True)

    words = philox4x32(tuple(np.array(counters, np.uint64).T), tuple(np.array(keys, np.uint64).T))

    assert np.array_equal(np.array(answers, np.uint64).T, np.array(words))


def test_uniform_is_the_first_53_bits_of_the_first_two_words():
    expected = ((0x6627E8D5 << 32 | 0xE169C58D) >> 11) / 2**53

    assert expected == uniform([0], [0])[0]


@given(st.lists(st.tuples(INTEGERS, INTEGERS), min_size=1, max_size=40))
def test_a_row_draws_the_same_alone_and_in_any_batch(rows):
    seeds, positions = zip(*rows, strict=True)

    together = uniform(seeds, positions)

    alone = [uniform([seed], [position])[0] for seed, position in rows]
    assert together.dtype == np.float64
    assert alone == together.tolist()
    assert all(0 <= u < 1 for u in alone)


@given(INTEGERS, st.integers(0, 2**64 - 1), st.integers(-3, 3))
def test_seeds_count_modulo_2_to_the_64(seed, position, turns):
    assert uniform([seed], [position]) == uniform([seed + turns * 2**64], [position])


def test_every_bit_of_seed_and_position_matters():
    base = uniform([0], [0])[0]
    flipped = [uniform([1 << bit], [0])[0] for bit in range(64)]
    moved = [uniform([0], [1 << bit])[0] for bit in range(64)]

    assert len({base, *flipped, *moved}) == 129


def test_no_rows_give_no_numbers():
    assert uniform([], []).tolist() == []


def test_rows_of_unequal_number_are_refused():
    with pytest.raises(ValueError, match="zip"):
        uniform([1, 2], [3])


def test_numbers_fill_the_unit_interval_evenly_along_positions_and_along_seeds():
    num_draws, num_bins = 64_000, 64
    for seeds, positions in (
        ([7] * num_draws, range(num_draws)),
        (range(num_draws), [7] * num_draws),
    ):
        u = uniform(seeds, positions)

        observed = np.bincount((u * num_bins).astype(int), minlength=num_bins)
        chi_square = ((observed - num_draws / num_bins) ** 2 / (num_draws / num_bins)).sum()
        # 63 degrees of freedom: one in a thousand lies above 103.4, one in a thousand below 32.
        assert 32 < chi_square < 103.4


def test_neighbours_are_not_correlated():
    u = uniform(list(range(200)) * 200, list(itertools.chain(*([p] * 200 for p in range(200)))))
    grid = u.reshape(200, 200) - 0.5

    for neighbour in (np.roll(grid, 1, axis=0), np.roll(grid, 1, axis=1)):
        # The mean product of 40,000 independent pairs has a standard deviation of 1 / 2400.
        assert abs((grid * neighbour).mean()) < 4 / 2400
