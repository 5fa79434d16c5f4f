"""The soak of `bench.soak`, for seconds instead of minutes."""

import pytest

from bench.soak import KINDS, soak
from tests.checkpoints import VOCAB_SIZE, checkpoint_folder

TOLERANCE_BYTES = 16 << 20
"""Threads come and go, and each takes an arena of the allocator when it first needs one."""


@pytest.fixture(scope="module")
def findings():
    folder = checkpoint_folder("llama")
    return soak(folder, VOCAB_SIZE, 5.0, num_threads=4, num_requests=10, num_tasks=60)


def test_every_answer_is_its_own_and_nothing_is_left(findings):
    assert findings.faults == []
    assert all(findings.outcomes[kind] for kind in KINDS), findings.outcomes


def test_memory_and_threads_are_as_after_the_first_round(findings):
    assert findings.growth_bytes < TOLERANCE_BYTES
    assert findings.num_threads[-1] <= findings.num_threads[0]
