"""The largest logit of each row in two steps: of each piece of the vocabulary, then of these."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.geometry import next_power_of_2, vocab_tile
from nanovllm.kernels.triton.launch import Kernel, Launch, run
from nanovllm.kernels.triton.overlap import begin


@triton.jit
def _first_of_largest(values, ids, NO_ID: tl.constexpr):
    """The largest value and the lowest id that has it; NaN counts as larger than all."""
    is_nan = values != values
    peak = tl.max(tl.where(is_nan, float("-inf"), values))
    has_nan = tl.max(is_nan.to(tl.int32)) > 0
    is_best = tl.where(has_nan, is_nan, values == peak)
    best = tl.min(tl.where(is_best, ids, NO_ID))
    return tl.where(has_nan, float("nan"), peak), best


@triton.jit
def _largest_of_pieces(
    logits,
    peaks,
    ids,
    row_stride,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    token = piece * BLOCK + tl.arange(0, BLOCK)
    # What lies behind the vocabulary is -inf of a higher id, which wins no tie.
    values = tl.load(logits + row * row_stride + token, token < VOCAB_SIZE, other=float("-inf"))
    peak, best = _first_of_largest(values.to(tl.float32), token, NO_ID=VOCAB_SIZE)
    place = row * tl.num_programs(1) + piece
    tl.store(peaks + place, peak)
    tl.store(ids + place, best)


@triton.jit
def _largest_of_rows(
    piece_peaks,
    piece_ids,
    peaks,
    ids,
    NUM_PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, BLOCK)
    exists = piece < NUM_PIECES
    place = row * NUM_PIECES + piece
    values = tl.load(piece_peaks + place, mask=exists, other=float("-inf"))
    tokens = tl.load(piece_ids + place, mask=exists, other=VOCAB_SIZE)
    peak, best = _first_of_largest(values, tokens, NO_ID=VOCAB_SIZE)
    tl.store(peaks + row, peak)
    tl.store(ids + row, best.to(tl.int64))


LARGEST_OF_PIECES = Kernel(_largest_of_pieces)
LARGEST_OF_ROWS = Kernel(_largest_of_rows)


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `nanovllm.kernels.ops.greedy`."""
    ids = logits.new_empty(len(logits), dtype=torch.int64)
    peaks = logits.new_empty(len(logits), dtype=torch.float32)
    run(plan_greedy(logits, ids, peaks))
    return ids, peaks


def plan_greedy(logits: torch.Tensor, ids: torch.Tensor, peaks: torch.Tensor) -> tuple[Launch, ...]:
    """Two launches, with the pieces' results in between, which are allocated here."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    block = vocab_tile(num_rows=num_rows, vocab_size=vocab_size)
    num_pieces = -(-vocab_size // block)
    piece_peaks = peaks.new_empty(num_rows, num_pieces)
    piece_ids = ids.new_empty(num_rows, num_pieces, dtype=torch.int32)
    pieces = {
        "logits": logits,
        "peaks": piece_peaks,
        "ids": piece_ids,
        "row_stride": logits.stride(0),
        "VOCAB_SIZE": vocab_size,
        "BLOCK": block,
        "num_warps": 4,
    }
    rows = {
        "piece_peaks": piece_peaks,
        "piece_ids": piece_ids,
        "peaks": peaks,
        "ids": ids,
        "NUM_PIECES": num_pieces,
        "BLOCK": next_power_of_2(num_pieces),
        "VOCAB_SIZE": vocab_size,
        "num_warps": 1,
    }
    return (
        Launch(LARGEST_OF_PIECES, (num_rows, num_pieces), pieces),
        Launch(LARGEST_OF_ROWS, (num_rows,), rows),
    )
