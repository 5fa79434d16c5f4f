"""Limits and pools that can't work are refused by name."""

import pytest

from nanovllm.core import EngineState, SchedulerLimits
from nanovllm.errors import ConfigError

LIMITS = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=100)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_limits_below_one_are_refused_by_name(name, value):
    given = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 1, name: value}
    with pytest.raises(ConfigError, match=name):
        SchedulerLimits(**given)


def test_a_chunk_limit_is_checked_and_may_be_left_out():
    assert LIMITS.max_prefill_chunk is None
    with pytest.raises(ConfigError, match="max_prefill_chunk"):
        SchedulerLimits(1, 1, 1, max_prefill_chunk=0)


@pytest.mark.parametrize(("name", "value"), [("num_blocks", 0), ("block_size", -4)])
def test_a_pool_without_blocks_is_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        EngineState.create(**{"num_blocks": 1, "block_size": 1, name: value})
