"""The draw by exact integer weights in two steps: sums of pieces of the vocabulary, then the pick.

Sums of int64 come out the same in any order, so that the pieces' size can not move a draw.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.geometry import next_power_of_2, vocab_tile
from nanovllm.kernels.reference.weights import MAX_TEMPERATURE, WEIGHT_ONE
from nanovllm.kernels.triton.launch import Kernel, Launch, run
from nanovllm.kernels.triton.overlap import begin


@triton.jit
def _weights_of_piece(
    logits,
    row,
    row_stride,
    piece,
    peak,
    temperature,
    min_p,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE: tl.constexpr,
):
    """`[BLOCK]` int64. Both steps compute them by this code, so that they come out the same."""
    token = piece * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * row_stride + token, token < VOCAB_SIZE, other=float("-inf"))
    weights = tl.exp((values.to(tl.float32) - peak) / temperature) * ONE
    return tl.where(weights >= min_p * ONE, weights, 0.0).to(tl.int64)


@triton.jit
def _is_drawn(temperature, peak):
    """A peak that is NaN or infinite is no distribution: the row keeps its greedy id."""
    return (temperature > 0) & (tl.abs(peak) < float("inf"))


@triton.jit(do_not_specialize=["peaks", "temperature", "min_p"])
def _sum_pieces(
    logits,
    peaks,
    temperature,
    min_p,
    sums,
    row_stride,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE: tl.constexpr,
    MAX_TEMP: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    heat = tl.load(temperature + row)
    peak = tl.load(peaks + row)
    if _is_drawn(heat, peak):
        weights = _weights_of_piece(
            logits,
            row,
            row_stride,
            piece,
            peak,
            tl.minimum(heat, MAX_TEMP),
            tl.load(min_p + row),
            VOCAB_SIZE,
            BLOCK,
            ONE,
        )
        tl.store(sums + row * tl.num_programs(1) + piece, tl.sum(weights))


@triton.jit(do_not_specialize=["peaks", "temperature", "min_p", "uniform", "greedy_ids"])
def _pick_token(
    logits,
    peaks,
    temperature,
    min_p,
    uniform,
    greedy_ids,
    sums,
    ids,
    row_stride,
    NUM_PIECES: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE: tl.constexpr,
    MAX_TEMP: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    peak = tl.load(peaks + row)
    chosen = tl.load(greedy_ids + row)
    if _is_drawn(heat, peak):
        index = tl.arange(0, BLOCK_PIECES)
        exists = index < NUM_PIECES
        piece_sums = tl.load(sums + row * NUM_PIECES + index, mask=exists, other=0)
        target = (tl.sum(piece_sums).to(tl.float64) * tl.load(uniform + row)).to(tl.int64)
        # The first piece, and in it the first token, whose cumulative weight is above the target:
        # as many are before it as have a cumulative weight that is not.
        is_before = (tl.cumsum(piece_sums) <= target) & exists
        piece = tl.sum(is_before.to(tl.int32))
        target -= tl.sum(tl.where(is_before, piece_sums, 0))
        weights = _weights_of_piece(
            logits,
            row,
            row_stride,
            piece,
            peak,
            tl.minimum(heat, MAX_TEMP),
            tl.load(min_p + row),
            VOCAB_SIZE,
            BLOCK,
            ONE,
        )
        place = tl.sum((tl.cumsum(weights) <= target).to(tl.int32))
        chosen = (piece * BLOCK + place).to(tl.int64)
    tl.store(ids + row, chosen)


SUM_PIECES = Kernel(_sum_pieces)
PICK_TOKEN = Kernel(_pick_token)


def sample_any(
    logits: torch.Tensor,
    peak: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    greedy_ids: torch.Tensor,
) -> torch.Tensor:
    """See `nanovllm.kernels.ops.sample_any`."""
    ids = torch.empty_like(greedy_ids)
    run(plan_sample_any(logits, peak, temperature, min_p, uniform, greedy_ids, ids))
    return ids


def plan_sample_any(
    logits: torch.Tensor,
    peak: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    greedy_ids: torch.Tensor,
    ids: torch.Tensor,
) -> tuple[Launch, ...]:
    """Two launches, with the pieces' sums in between, which are allocated here."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    assert uniform.dtype == torch.float64
    assert temperature.dtype == min_p.dtype == torch.float32
    block = vocab_tile(num_rows=num_rows, vocab_size=vocab_size)
    num_pieces = -(-vocab_size // block)
    sums = ids.new_empty(num_rows, num_pieces)
    shared = {
        "logits": logits,
        "peaks": peak,
        "temperature": temperature,
        "min_p": min_p,
        "sums": sums,
        "row_stride": logits.stride(0),
        "VOCAB_SIZE": vocab_size,
        "BLOCK": block,
        "ONE": float(WEIGHT_ONE),
        "MAX_TEMP": MAX_TEMPERATURE,
        "num_warps": 4,
    }
    pick = {
        **shared,
        "uniform": uniform,
        "greedy_ids": greedy_ids,
        "ids": ids,
        "NUM_PIECES": num_pieces,
        "BLOCK_PIECES": next_power_of_2(num_pieces),
    }
    return (
        Launch(SUM_PIECES, (num_rows, num_pieces), shared),
        Launch(PICK_TOKEN, (num_rows,), pick),
    )
