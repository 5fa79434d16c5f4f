import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.runtime.ranking import best, largest, settle_ties

LOGITS = st.lists(
    st.sampled_from([-math.inf, -1.5, -0.0, 0.0, 0.25, 1.0, 7.0]), min_size=1, max_size=40
)


def in_order(logits):
    return sorted(range(len(logits)), key=lambda i: (-logits[i], i))


class TestBest:
    @given(LOGITS)
    def test_is_the_first_in_order(self, logits):
        ids, values = best(torch.tensor([logits, logits]))

        first = in_order(logits)[0]
        assert ids.tolist() == [first] * 2
        assert values.tolist() == [logits[first]] * 2

    @pytest.mark.parametrize("place", [0, 1, 17, 63, 64, 99])
    def test_shows_a_nan_wherever_it_is(self, place):
        logits = torch.ones(1, 100)
        logits[0, place] = math.nan
        logits[0, 50] = math.inf

        assert math.isnan(best(logits)[1])


class TestSettledLargest:
    @settings(max_examples=200, deadline=None)
    @given(st.lists(LOGITS, min_size=1, max_size=3), st.data())
    def test_keeps_the_first_in_order_also_where_the_cut_falls_between_equals(self, rows, data):
        num_tokens = min(len(row) for row in rows)
        rows = [row[:num_tokens] for row in rows]
        count = data.draw(st.integers(2, num_tokens + 2), label="count")
        most = num_tokens if count >= num_tokens else count - 1
        kept = [data.draw(st.integers(1, most), label="kept") for _ in rows]
        logits = torch.tensor(rows)

        values, ids = largest(logits, count)
        settled = settle_ties(logits, values, ids, torch.tensor(kept))

        for i, row in enumerate(rows):
            order = in_order(row)
            assert sorted(settled[i, : kept[i]].tolist()) == sorted(order[: kept[i]])
            assert values[i, : kept[i]].tolist() == [row[j] for j in order[: kept[i]]]
