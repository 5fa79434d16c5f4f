"""How many parts a decode attention kernel cuts the context into. Pure.

A graph freezes its launch grid, so the number of splits must not depend on how long the live
contexts are: it is planned from the bucket and the longest context there may be, and a split that
finds nothing to do at replay exits at once.
"""

from graphs.errors import PlanError

MAX_NUM_SPLITS = 64
"""More partial results than this cost more to combine than the parallelism gains."""

_WAVES = 2
"""Programs per multiprocessor to aim at: one alone leaves memory latency exposed."""


def plan_splits(bucket: int, num_kv_heads: int, max_context: int, num_sms: int, tile: int) -> int:
    """Choose the number of splits of each row's context for split-K/V decode attention.

    It never grows with `bucket` or `num_kv_heads`, and never shrinks with `max_context` or
    `num_sms`.

    Args:
        bucket: Rows of the graph, padding included.
        num_kv_heads: Key/value heads; one program serves all query heads of one of them.
        max_context: The most tokens that a row may attend to.
        num_sms: Multiprocessors of the device.
        tile: Tokens that a program reads at once; a split is at least one tile long.

    Returns:
        A number in `1..min(MAX_NUM_SPLITS, ceil(max_context / tile))`.
    """
    given = {
        "bucket": bucket,
        "num_kv_heads": num_kv_heads,
        "max_context": max_context,
        "num_sms": num_sms,
        "tile": tile,
    }
    for name, value in given.items():
        if value < 1:
            raise PlanError(f"`{name}` is {value}; it must be at least 1.")
    wanted = _ceil_div(_WAVES * num_sms, bucket * num_kv_heads)
    return min(wanted, MAX_NUM_SPLITS, _ceil_div(max_context, tile))


def tokens_per_split(max_context: int, num_splits: int, tile: int) -> int:
    """Compute the length of each split: whole tiles, so that together they cover the context."""
    return _ceil_div(_ceil_div(max_context, tile), num_splits) * tile


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
