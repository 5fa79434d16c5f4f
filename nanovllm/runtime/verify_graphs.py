"""`verify_decode`: proof, on a CPU, that the decode step of a model can be captured and replayed.

Every batch size and way of choosing tokens is recorded on `graphs.tape` and replayed over a churn
of requests, beside a plain computation of the same steps: see `graphs.verify` and `verify_worlds`.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from graphs import GraphKey, plan_buckets
from graphs.churn import ChurnRow, churn
from graphs.verdict import VerifyReport
from graphs.verify import VerifyStep, World, verify
from nanovllm.core import Batch
from nanovllm.core.batch import NO_BLOCK, Int32Array
from nanovllm.model.config import ModelConfig
from nanovllm.model.decoder import Decoder
from nanovllm.runtime.captured_steps import VARIANTS
from nanovllm.runtime.decode_program import NO_SOURCE
from nanovllm.runtime.paged_attention import AttentionShape, TritonAttention
from nanovllm.runtime.sampler import SamplingRow
from nanovllm.runtime.verify_worlds import CapturedWorld, DecodeStep, Geometry, PlainWorld
from nanovllm.sampling_params import SamplingParams

NUM_STEPS = 40

_NUM_SMS = 132
"""Splits are planned as for a device with so many multiprocessors: an H100."""

_GREEDY = SamplingParams(temperature=0)
_DRAWING = (
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.5, min_p=0.05),
    _GREEDY,  # a row that does not draw among others that do
)


def verify_decode(
    decoder: Decoder,
    *,
    geometry: Geometry = Geometry(),  # noqa: B008  # frozen
    num_steps: int = NUM_STEPS,
    seed: int = 0,
) -> VerifyReport:
    """Replay the decode step of a model on the tape, over a schedule that brings out its faults.

    Args:
        decoder: The model: float32, on the CPU, of plain linear layers, and small, as it is run
            some hundred times.
        geometry: Batch sizes, blocks and contexts.
        num_steps: Steps of the schedule.
        seed: Of the schedule.
    """
    steps = decode_schedule(geometry, decoder.config.vocab_size, num_steps=num_steps, seed=seed)
    return verify_world(
        lambda: CapturedWorld(decoder, attention_for(decoder.config, geometry), geometry),
        lambda: PlainWorld(decoder, geometry),
        steps,
        geometry,
    )


def verify_world(
    make_captured: Callable[[], World],
    make_plain: Callable[[], World],
    steps: Iterable[VerifyStep],
    geometry: Geometry,
) -> VerifyReport:
    """Compare two worlds over a schedule; every variant of every batch size is captured."""
    # `verify` makes the world that it replays first, and then the one to compare it with.
    worlds = (make() for make in (make_captured, make_plain))
    keys = [GraphKey(size, variant) for size in geometry.sizes for variant in VARIANTS]
    with _one_thread():
        return verify(worlds.__next__, keys, steps, canary_pages=(geometry.canary_block,))


def attention_for(model: ModelConfig, geometry: Geometry) -> TritonAttention:
    """The operators of this package, planned as for a GPU."""
    return TritonAttention(
        AttentionShape.of(
            model,
            block_size=geometry.block_size,
            max_model_len=geometry.max_model_len,
            num_sms=_NUM_SMS,
        )
    )


def decode_schedule(
    geometry: Geometry, vocab_size: int, *, num_steps: int, seed: int
) -> Iterator[VerifyStep]:
    """Steps of requests that come and go, each with a `DecodeStep` as its inputs.

    Blocks go to new owners at once. Some rows go on from the token that the device keeps, the
    others from one that the host gives; some steps choose greedily, others draw.
    """
    plan = plan_buckets(geometry.max_num_rows, sizes=geometry.sizes)
    draw = random.Random(seed)
    # Before the first step nothing is stored anywhere, not even where padding attends to.
    freed: list[int] = [*range(geometry.num_blocks), geometry.pad_block]
    num_previous_rows = 0
    num_seen: Counter[int] = Counter()
    for index, step in enumerate(
        churn(
            num_steps=num_steps,
            max_rows=geometry.max_num_rows,
            page_size=geometry.block_size,
            num_pages=geometry.num_blocks,
            max_len=geometry.max_model_len,
            seed=seed,
        )
    ):
        # By turns for each number of rows, so that all of them are tried in both.
        num_seen[len(step.rows)] += 1
        variant = VARIANTS[num_seen[len(step.rows)] % len(VARIANTS)]
        params = [_GREEDY if variant == "greedy" else draw.choice(_DRAWING) for _ in step.rows]
        if variant == "sample":
            params[0] = _DRAWING[0]  # or all could be greedy
        share = draw.choice((0.0, 0.5, 1.0))  # of the rows that can go on from the device's token
        sources = [
            NO_SOURCE if row.previous_row is None or draw.random() >= share else row.previous_row
            for row in step.rows
        ]
        decodes = DecodeStep(
            _batch(step.rows, sources, geometry, partial(draw.randrange, vocab_size)),
            tuple(map(_sampling_row, step.rows, params)),
            np.array(sources, np.int32),
            side=index % 2,
            num_previous_rows=num_previous_rows,
        )
        key = GraphKey(plan.bucket_for(len(step.rows)), variant)
        yield VerifyStep(key, len(step.rows), decodes, freed + list(step.freed_pages))
        freed, num_previous_rows = [], len(step.rows)


def _sampling_row(row: ChurnRow, params: SamplingParams) -> SamplingRow:
    return SamplingRow(params, seed=row.request, position=row.position + 1)  # +1: of the new token


def _batch(
    rows: tuple[ChurnRow, ...],
    sources: list[int],
    geometry: Geometry,
    draw_token: Callable[[], int],
) -> Batch:
    """What `nanovllm.core.build_batch` makes of such rows."""
    positions = np.array([row.position for row in rows], np.int32)
    tables = np.full((len(rows), max(len(row.pages) for row in rows)), NO_BLOCK, np.int32)
    for table, row in zip(tables, rows, strict=True):
        table[: len(row.pages)] = row.pages
    cu_seqlens_q: Int32Array = np.arange(len(rows) + 1, dtype=np.int32)
    block, offset = np.divmod(positions, geometry.block_size)
    return Batch(
        num_decodes=len(rows),
        input_ids=np.array([draw_token() for _ in rows], np.int32),
        positions=positions,
        slot_mapping=tables[cu_seqlens_q[:-1], block] * np.int32(geometry.block_size) + offset,
        context_lens=positions + 1,  # +1: its own position counts
        block_tables=tables,
        cu_seqlens_q=cu_seqlens_q,
        sampled_rows=cu_seqlens_q[:-1],
        logits_indices=cu_seqlens_q[:-1],
        max_seqlen_q=1,
        sources=None if NO_SOURCE in sources else np.array(sources, np.int32),
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch from splitting tensors this small: threads that wait cost more than the work."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
