"""Which batch sizes to capture, and which of them serves a step. Pure: no torch.

A graph has one batch size. A step with fewer live rows runs in the smallest captured size that
holds it, its *bucket*, and the rest of the rows are padding. More buckets waste fewer rows, and
cost capture time and driver memory. `plan_buckets` lays out the default ladder or checks a user's
own; `graphs.fit` chooses sizes for an observed load.
"""

from collections.abc import Iterable, Mapping

import attrs

from graphs.errors import PlanError

_DENSE_TO = 8
_FINE_STEP, _FINE_TO = 4, 32
_MEDIUM_STEP, _MEDIUM_TO = 8, 256
_COARSE_STEP = 16


@attrs.frozen
class BucketPlan:
    """The captured batch sizes, and the bucket of every number of live rows.

    Attributes:
        sizes: Ascending and distinct; the last is the most rows that a step can have.
    """

    sizes: tuple[int, ...]
    _bucket_of: tuple[int, ...] = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        _check_sizes(self.sizes)
        object.__setattr__(self, "_bucket_of", _look_up_table(self.sizes))

    @property
    def max_num_seqs(self) -> int:
        """The most rows of a step, which is the largest bucket."""
        return self.sizes[-1]

    @property
    def capture_order(self) -> tuple[int, ...]:
        """Largest first, so that the smaller graphs fit into the memory of the first."""
        return self.sizes[::-1]

    def bucket_for(self, num_rows: int) -> int:
        """Look up the smallest bucket that holds `num_rows` live rows.

        Raises:
            PlanError: If `num_rows` is not in `1..max_num_seqs`.
        """
        if not 0 < num_rows < len(self._bucket_of):  # a negative one would count from the end
            raise PlanError(
                f"a step has {num_rows} rows, but this plan covers 1 to {self.max_num_seqs}; "
                "plan with a larger `max_num_seqs`."
            )
        return self._bucket_of[num_rows]

    def expected_waste(self, histogram: Mapping[int, float]) -> float:
        """Compute the share of all rows run that are padding, in [0, 1).

        Args:
            histogram: How often, in any unit, a step had each number of live rows.
        """
        check_histogram(histogram, self.max_num_seqs)
        live = sum(count * num_rows for num_rows, count in histogram.items())
        run = sum(count * self._bucket_of[num_rows] for num_rows, count in histogram.items())
        return 1.0 - live / run


def plan_buckets(max_num_seqs: int, *, sizes: Iterable[int] | None = None) -> BucketPlan:
    """Choose the batch sizes to capture, so that every `n` in `1..max_num_seqs` has a bucket.

    The default ladder has every size to 8, then steps of 4 to 32, of 8 to 256 and of 16 beyond,
    and always `max_num_seqs` itself: dense where a padded row costs most in proportion.

    Args:
        max_num_seqs: The most live rows of a step, at least 1.
        sizes: Sizes to use instead, in any order; `max_num_seqs` must be among them.

    Raises:
        PlanError: If `max_num_seqs` or `sizes` cannot be used.
    """
    if not _is_count(max_num_seqs):
        raise PlanError(f"`max_num_seqs` is {max_num_seqs!r}; it must be an integer of at least 1.")
    if sizes is None:
        return BucketPlan(_default_sizes(max_num_seqs))
    given = tuple(sizes)
    _check_sizes(given)
    if max(given) != max_num_seqs:
        raise PlanError(
            f"`sizes` is {list(given)}, which ends at {max(given)}, but `max_num_seqs` is "
            f"{max_num_seqs}; the largest size must be `max_num_seqs`: change one of the two."
        )
    return BucketPlan(tuple(sorted(given)))


def check_histogram(histogram: Mapping[int, float], max_num_seqs: int) -> None:
    """Refuse a histogram that is empty, negative, or counts steps no bucket is for."""
    for num_rows, count in histogram.items():
        if not _is_count(num_rows) or num_rows > max_num_seqs:
            raise PlanError(
                f"the histogram counts steps of {num_rows!r} rows; rows must be integers in "
                f"1..{max_num_seqs}."
            )
        if not 0 <= count < float("inf"):
            raise PlanError(
                f"the histogram counts {count} steps of {num_rows} rows; counts must be finite "
                "and not negative."
            )
    if sum(histogram.values()) <= 0:
        raise PlanError("the histogram counts no steps; observe some first, or use the default.")


def _default_sizes(max_num_seqs: int) -> tuple[int, ...]:
    ladder = [
        *range(1, _DENSE_TO + 1),
        *range(_DENSE_TO + _FINE_STEP, _FINE_TO + 1, _FINE_STEP),
        *range(_FINE_TO + _MEDIUM_STEP, _MEDIUM_TO + 1, _MEDIUM_STEP),
        *range(_MEDIUM_TO + _COARSE_STEP, max_num_seqs, _COARSE_STEP),
    ]
    # The largest is added, not rounded to: a ladder that ends below it leaves steps without a
    # graph, and one that ends above it runs rows that can never be live.
    return (*(size for size in ladder if size < max_num_seqs), max_num_seqs)


def _look_up_table(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """`[max_num_seqs + 1]`: the bucket of each number of rows; no rows have bucket 0."""
    table = [0]
    for size in sizes:
        table += [size] * (size - len(table) + 1)  # +1: entry `size` itself belongs to `size`
    return tuple(table)


def _check_sizes(sizes: tuple[int, ...]) -> None:
    if not sizes:
        raise PlanError("`sizes` is empty; give at least one batch size, or leave it out.")
    for size in sizes:
        if not _is_count(size):
            raise PlanError(f"`sizes` holds {size!r}; sizes must be integers of at least 1.")
    if len(set(sizes)) != len(sizes):
        twice = sorted({size for size in sizes if sizes.count(size) > 1})
        raise PlanError(f"`sizes` holds {twice} more than once; name each size once.")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
