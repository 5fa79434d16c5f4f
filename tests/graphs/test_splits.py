"""Splits: planned from what a graph freezes, bounded, and moving one way with each input."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphs import PlanError, plan_splits, tokens_per_split
from graphs.splits import MAX_NUM_SPLITS

SHAPES = st.fixed_dictionaries(
    {
        "bucket": st.integers(1, 512),
        "num_kv_heads": st.integers(1, 128),
        "max_context": st.integers(1, 200_000),
        "num_sms": st.integers(1, 200),
        "tile": st.sampled_from([16, 32, 64, 128]),
    }
)


@given(SHAPES)
def test_splits_are_bounded_and_cover_the_context_in_whole_tiles(shape):
    num_splits = plan_splits(**shape)
    length = tokens_per_split(shape["max_context"], num_splits, shape["tile"])

    assert 1 <= num_splits <= MAX_NUM_SPLITS
    assert num_splits <= -(-shape["max_context"] // shape["tile"])
    assert length % shape["tile"] == 0
    assert num_splits * length >= shape["max_context"]


@given(SHAPES, st.integers(1, 300))
def test_more_work_never_splits_more_and_more_room_never_splits_less(shape, more):
    num_splits = plan_splits(**shape)

    for name, sign in {"bucket": -1, "num_kv_heads": -1, "max_context": 1, "num_sms": 1}.items():
        grown = plan_splits(**{**shape, name: shape[name] + more})
        assert sign * (grown - num_splits) >= 0, name


def test_one_row_fills_the_device_and_a_full_batch_does_not_split():
    assert plan_splits(1, 8, 32_768, 132, 64) == 33  # 2 waves of 132 / 8 heads
    assert plan_splits(64, 8, 32_768, 132, 64) == 1


@pytest.mark.parametrize("name", ["bucket", "num_kv_heads", "max_context", "num_sms", "tile"])
def test_refuses_numbers_below_one(name):
    shape = {"bucket": 1, "num_kv_heads": 1, "max_context": 1, "num_sms": 1, "tile": 1}
    with pytest.raises(PlanError, match=f"`{name}` is 0"):
        plan_splits(**{**shape, name: 0})
