"""Bucket sizes fitted to an observed load: the set of sizes with the least expected cost. Pure.

    plan = fit_buckets(histogram, costs, max_num_graphs=8)

`histogram` says how often a step had `n` live rows, `costs` what a step of each bucket takes. The
best set of at most `max_num_graphs` sizes is found exactly, by dynamic programming over the sizes
in ascending order.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from graphs.errors import PlanError
from graphs.plan import BucketPlan, check_histogram

Floats = npt.NDArray[np.float64]


def fit_buckets(
    histogram: Mapping[int, float], costs: Mapping[int, float], *, max_num_graphs: int
) -> BucketPlan:
    """Choose at most `max_num_graphs` sizes that minimise the expected cost of a step.

    Args:
        histogram: How often, in any unit, a step had each number of live rows. Numbers that are
            missing weigh nothing, but keep a bucket: the largest size is always captured.
        costs: What a step costs in each candidate bucket, in any unit, measured or modelled
            (`interpolate_costs`). The candidates are its keys, the largest of which is the most
            rows that a step can have. Costs need not grow with size.
        max_num_graphs: How many graphs may be captured, at least 1.

    Returns:
        The best plan; of equally good ones, the one with the fewest graphs.

    Raises:
        PlanError: If the arguments cannot be used.
    """
    if max_num_graphs < 1:
        raise PlanError(f"`max_num_graphs` is {max_num_graphs}; it must be at least 1.")
    sizes = sorted(_checked_costs(costs))
    check_histogram(histogram, sizes[-1])
    cost = np.array([costs[size] for size in sizes])
    steps = _steps_up_to(sizes, histogram)

    # best[j]: the least cost of all steps of at most sizes[j] rows, where sizes[j] is captured.
    # One more graph is allowed in each round; cut[j] is the captured size below sizes[j], or -1.
    best = cost * steps
    cuts = [np.full(len(sizes), -1)]
    totals = [best[-1]]
    for _ in range(min(max_num_graphs, len(sizes)) - 1):
        best, cut = _allow_one_more(best, cost, steps)
        cuts.append(cut)
        totals.append(best[-1])
    num_graphs = int(np.argmin(totals)) + 1  # +1: the first entry has one graph
    return BucketPlan(_walk_back(sizes, cuts[:num_graphs]))


def expected_cost(
    plan: BucketPlan, histogram: Mapping[int, float], costs: Mapping[int, float]
) -> float:
    """Compute the mean cost of a step under this load, in the unit of `costs`."""
    check_histogram(histogram, plan.max_num_seqs)
    total = sum(count * costs[plan.bucket_for(n)] for n, count in histogram.items())
    return total / sum(histogram.values())


def interpolate_costs(measured: Mapping[int, float], max_num_seqs: int) -> dict[int, float]:
    """Estimate the cost of every size in `1..max_num_seqs` from some that were measured.

    Straight lines run between neighbours; outside the measured range the nearest value holds.
    """
    sizes = sorted(_checked_costs(measured))
    every = np.arange(1, max_num_seqs + 1)
    values = np.interp(every, sizes, [measured[size] for size in sizes])
    return dict(zip(every.tolist(), values.tolist(), strict=True))


def _allow_one_more(
    best: Floats, cost: Floats, steps: Floats
) -> tuple[Floats, npt.NDArray[np.int_]]:
    """One round: for each j, either a captured size i below it, or none."""
    # total[i, j]: the best up to i, and everything from there to j in bucket j.
    total = best[:, None] + cost[None, :] * (steps[None, :] - steps[:, None])
    total[np.tril_indices(len(best))] = np.inf  # i must be below j
    cut = np.argmin(total, axis=0)
    one_bucket = cost * steps
    shared = total[cut, np.arange(len(best))]
    # Strictly better only: an equal cost does not earn a graph.
    return np.minimum(shared, one_bucket), np.where(shared < one_bucket, cut, -1)


def _walk_back(sizes: list[int], cuts: list[npt.NDArray[np.int_]]) -> tuple[int, ...]:
    chosen, at = [], len(sizes) - 1
    for cut in reversed(cuts):
        chosen.append(sizes[at])
        at = int(cut[at])
        if at < 0:
            break
    return tuple(reversed(chosen))


def _steps_up_to(sizes: list[int], histogram: Mapping[int, float]) -> Floats:
    """`[len(sizes)]`: the steps that had at most that many rows."""
    counts = np.zeros(sizes[-1] + 1)
    for num_rows, count in histogram.items():
        counts[num_rows] = count
    return np.cumsum(counts)[sizes]


def _checked_costs(costs: Mapping[int, float]) -> Mapping[int, float]:
    if not costs:
        raise PlanError("`costs` is empty; give the cost of at least the largest batch size.")
    for size, cost in costs.items():
        if size < 1 or not 0 <= cost < float("inf"):
            raise PlanError(
                f"`costs` says that a step of {size} rows costs {cost}; sizes must be at least 1 "
                "and costs finite and not negative."
            )
    return costs
