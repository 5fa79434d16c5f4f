"""How many rows the usual lists of batch sizes waste on padding, ours beside others'. Pure.

python -m graphs.waste 256
"""

import math
import sys
from collections.abc import Callable, Mapping

from graphs.plan import BucketPlan, plan_buckets

_LOW_LOAD_MEAN = 4


def nano_vllm_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """List what nano-vllm captures: 1, 2, 4, 8, then steps of 16. May end below `max_num_seqs`."""
    return tuple(size for size in (1, 2, 4, 8) if size <= max_num_seqs) + tuple(
        range(16, max_num_seqs + 1, 16)
    )


def vllm_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """List what vLLM captures: 1, 2, 4, then steps of 8 below 256 and of 16 from there."""
    ladder = [1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs + 1, 16)]
    return tuple(size for size in ladder if size <= max_num_seqs)


def uniform_load(max_num_seqs: int) -> dict[int, float]:
    """Every number of live rows equally often."""
    return dict.fromkeys(range(1, max_num_seqs + 1), 1.0)


def low_load(max_num_seqs: int) -> dict[int, float]:
    """Few live rows: a Poisson distribution of mean 4, without 0."""
    return {
        num_rows: math.exp(-_LOW_LOAD_MEAN) * _LOW_LOAD_MEAN**num_rows / math.factorial(num_rows)
        for num_rows in range(1, min(max_num_seqs, 64) + 1)  # beyond, it is 0 in any float
    }


def waste_table(max_num_seqs: int) -> str:
    """Lay out, for each list, its number of graphs and the share of rows that are padding.

    A list that ends below `max_num_seqs` is given that size as well.
    """
    lists: Mapping[str, Callable[[int], tuple[int, ...]]] = {
        "ours": lambda most: plan_buckets(most).sizes,
        "nano-vllm": nano_vllm_sizes,
        "vLLM": vllm_sizes,
    }
    lines = [f"up to {max_num_seqs} rows   graphs  uniform  low load"]
    for name, sizes_up_to in lists.items():
        plan = BucketPlan(tuple(sorted({*sizes_up_to(max_num_seqs), max_num_seqs})))
        uniform = plan.expected_waste(uniform_load(max_num_seqs))
        low = plan.expected_waste(low_load(max_num_seqs))
        lines.append(f"{name:16s}  {len(plan.sizes):6d}  {uniform:7.1%}  {low:8.1%}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(waste_table(int(sys.argv[1]) if len(sys.argv) > 1 else 256) + "\n")
