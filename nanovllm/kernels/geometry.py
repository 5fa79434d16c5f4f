"""How kernels cut their work into tiles. Pure: shapes and counts in, sizes out.

Nothing here looks at a length, so that a captured step has the geometry of its bucket for good.
Tiles fit the shared memory of the smallest device that is supported: 99 KiB (sm_89, sm_120).
"""

import attrs

_MIN_DOT = 16
"""The least rows that a matrix unit multiplies."""

FEW_ROWS = 8
"""Rows up to which a product goes through kernels of ours: the columns of one matrix unit."""

MAX_FEW_CHANNELS = 2048
"""Channels up to which a program keeps a normalised row whole, in 96 KiB with its weights."""


@attrs.frozen
class Tile:
    """How one program of an attention kernel is cut.

    Attributes:
        num_rows: Rows of queries, a power of two; several heads and positions are rows.
        num_positions: Keys and values that one turn of the loop takes, a power of two.
        num_channels: `D` rounded up to a power of two.
        num_warps: Warps of the program.
        num_stages: How far loads run ahead. Of three, a turn's look-up of its blocks takes one
            and its keys and values another; of five, both would twice as far, in twice the memory.
    """

    num_rows: int
    num_positions: int
    num_channels: int
    num_warps: int
    num_stages: int


def next_power_of_2(count: int) -> int:
    """The least power of two that is not below `count`, which is at least 1."""
    return 1 << (count - 1).bit_length()


def decode_tile(*, head_dim: int, item_bytes: int, group_size: int) -> Tile:
    """The tile of `paged_decode`: the query heads of one key/value head are its rows.

    Args:
        head_dim: `D`.
        item_bytes: Bytes of one value of the cache.
        group_size: Query heads per key/value head, `H / K`.
    """
    num_channels = next_power_of_2(max(head_dim, _MIN_DOT))
    # The best of 36 or close to it, for 1 to 64 rows of 512 to 8,192 positions on an H200.
    is_usual = item_bytes <= 2 and num_channels <= 128
    return Tile(
        num_rows=next_power_of_2(max(group_size, _MIN_DOT)),
        num_positions=_num_positions(num_channels, item_bytes),
        num_channels=num_channels,
        num_warps=2 if is_usual else 4 if num_channels * item_bytes <= 512 else 8,
        num_stages=5 if is_usual else 3,
    )


@attrs.frozen
class LinearTile:
    """How one program of a product of few rows is cut.

    Attributes:
        num_outputs: Outputs of a program, a power of two.
        num_channels: Channels that a part multiplies at once, a power of two.
        num_parts: Parts that the channels are shared among; each is a warp's.
        num_warps: Warps of the program.
    """

    num_outputs: int
    num_channels: int
    num_parts: int
    num_warps: int


def num_few_rows(size: int, item_bytes: int) -> int:
    """Rows up to which products go through kernels of ours; of more, a library's are faster.

    Several rows only of 16 bits, and of models whose rows a program holds at once.

    Args:
        size: Channels of the residual stream.
        item_bytes: Bytes of a weight.
    """
    return FEW_ROWS if item_bytes == 2 and size <= MAX_FEW_CHANNELS else 1


def row_tile(size: int, *, gates: bool) -> LinearTile:
    """The tile of a product of one row: about 8 KiB of weights for each warp, all of them at once.

    Args:
        size: Channels of the row.
        gates: Outputs have two rows of weights each.
    """
    widest = next_power_of_2(size)
    num_channels = widest if widest <= 4096 else 2048
    return LinearTile(
        num_outputs=2 if gates else 4,
        num_channels=num_channels,
        num_parts=1,
        num_warps=max(1, num_channels // 1024),
    )


def few_tile(size: int) -> LinearTile:
    """The tile of a product of 2 to `FEW_ROWS` rows.

    Args:
        size: Channels of a row.
    """
    widest = max(next_power_of_2(size), 128)
    at_once = widest if widest <= MAX_FEW_CHANNELS else MAX_FEW_CHANNELS // 2
    num_parts = 8 if at_once >= 2048 else 4
    return LinearTile(
        num_outputs=16,
        num_channels=at_once // num_parts,
        num_parts=num_parts,
        num_warps=num_parts,
    )


def prefill_tile(*, head_dim: int, item_bytes: int, group_size: int, max_seqlen_q: int) -> Tile:
    """The tile of `paged_prefill`: several positions times the heads of a group are its rows.

    There are two of each model: one for steps of a few positions per sequence, one for others.

    Args:
        head_dim: `D`.
        item_bytes: Bytes of one value of the cache.
        group_size: Query heads per key/value head, `H / K`.
        max_seqlen_q: The most queries that one sequence has.
    """
    num_channels = next_power_of_2(max(head_dim, _MIN_DOT))
    # Products of float32 are three of narrower numbers, which takes registers: smaller tiles.
    most = 2**14 // num_channels if item_bytes <= 2 else 2**12 // num_channels
    most = min(most, 128 if item_bytes <= 2 else 64)
    # Two sizes and none in between: each is a kernel to compile, and a request would wait for it.
    wanted = _MIN_DOT if group_size * max_seqlen_q <= _MIN_DOT else most
    # A tile holds at least one position of the whole group.
    num_rows = max(wanted, next_power_of_2(group_size))
    return Tile(
        num_rows=num_rows,
        num_positions=_num_positions(num_channels, item_bytes),
        num_channels=num_channels,
        num_warps=8 if num_rows >= 64 or item_bytes > 2 else 4,
        num_stages=2,
    )


def vocab_tile(*, num_rows: int, vocab_size: int) -> int:
    """Logits that one program of `greedy` or `sample_any` looks at, a power of two.

    Few rows are cut finely, so that one row occupies a device; many rows coarsely, so that there
    is less to combine.
    """
    widest = next_power_of_2(vocab_size)
    return min(1024 if num_rows <= 16 else 4096, widest)


def _num_positions(num_channels: int, item_bytes: int) -> int:
    """Positions per turn: 16 KiB of keys and as much of values, but no more than 64."""
    most = 64 if item_bytes <= 2 else 32
    return min(most, 2**14 // (num_channels * item_bytes))
