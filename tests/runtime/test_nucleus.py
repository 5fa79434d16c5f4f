import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.runtime.nucleus import keep_nucleus

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from(
    [-math.inf, -1.0, -0.0, 0.0, 1.0, 2.0**-149, -(2.0**-149)]
)


def sorted_nucleus(logits, weights, target):
    kept, mass = [0] * len(logits), 0
    for i in sorted(range(len(logits)), key=lambda i: (-logits[i], i)):
        if mass >= target:
            break
        kept[i] = weights[i]
        mass += weights[i]
    return kept


class TestKeepNucleus:
    @settings(max_examples=300, deadline=None)
    @given(st.lists(FLOATS, min_size=1, max_size=30), st.floats(0, 1), st.integers(0, 40))
    def test_keeps_what_a_sort_keeps(self, logits, share, shift):
        ranks = {logit + 0.0: i for i, logit in enumerate(sorted(set(logits)))}
        weights = [(ranks[logit + 0.0] << shift) + 1 for logit in logits]
        target = max(1, min(sum(weights), int(share * sum(weights))))

        # Twice, to see that rows do not mix.
        kept = keep_nucleus(
            torch.tensor([logits, logits]),
            torch.tensor([weights, weights]),
            torch.tensor([[target], [1]]),
        ).tolist()

        assert kept[0] == sorted_nucleus(logits, weights, target)
        assert kept[1] == sorted_nucleus(logits, weights, 1)

    def test_holds_for_logits_that_differ_in_the_last_bit_only(self):
        one = np.float32(1)
        logits = [one]
        for _ in range(5000):
            logits.append(np.nextafter(logits[-1], np.float32(2)))
        logits = torch.from_numpy(np.array(logits)[np.random.default_rng(0).permutation(5001)])
        weights = torch.ones_like(logits, dtype=torch.int64)

        for target in (1, 2, 2500, 5000, 5001):
            kept = keep_nucleus(logits[None], weights[None], torch.tensor([[target]]))[0]

            assert int(kept.sum()) == target
            assert bool((logits[kept == 1].min() > logits[kept == 0]).all())
