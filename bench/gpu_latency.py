"""The stages of `gpu_check` that say how fast: each yields its results."""

import itertools
import time
from collections.abc import Iterator
from typing import Any

from bench.gpu_stages import Waiting, replay_ms
from bench.gpu_world import World
from nanovllm.records import StepRecord
from nanovllm.workloads.distribution import Distribution

Rows = Iterator[dict[str, Any]]


def first_tokens(world: World, until_s: float) -> Rows:
    """Time of a step that computes one prompt, captured and eager."""
    lengths = (3, 12) if world.is_small else (16, 100, 250, 512, 2000)
    options: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 2048, "num_kvcache_blocks": 400}
    if world.is_small:
        options |= {"max_model_len": 64, "graph_prompt_sizes": (4, 16)}
    for name, changes in (("captured", {}), ("eager", {"graph_prompt_sizes": ()})):
        config = world.config(**{**options, **changes}, enable_prefix_caching=False)
        engine = world.engine(config)
        records: list[StepRecord] = []
        engine.subscribe(records.append)
        for length in lengths:
            if time.perf_counter() > until_s:
                yield {"skipped": f"{length} positions, {name}: no time left"}
                return
            records.clear()
            for attempt in range(12):
                engine.add(world.prompts([length], prompt_seed=attempt, max_tokens=1))
                while engine.has_unfinished_requests():
                    engine.step()
            steps = records[2:]  # the first ones warm up
            took = Distribution.of(step.end_s - step.start_s for step in steps)
            yield {
                "positions": length,
                "run": name,
                "bucket": steps[-1].bucket,
                "step_p50_ms": _ms(took.median_s),
                "step_max_ms": _ms(took.max_s),
            }
        engine.close()


def latency(world: World, until_s: float) -> Rows:
    """Time between tokens by batch and context, the host in step and ahead; GPU time alone."""
    shapes = [(batch, 512) for batch in (1, 2, 4, 8, 16, 64)] + [(1, 4096), (8, 4096)]
    num_tokens = 400
    if world.is_small:
        shapes, num_tokens = [(1, 32), (4, 32)], 12
    for (batch, context), waits in itertools.product(shapes, (True, False)):
        if time.perf_counter() > until_s:
            yield {"skipped": f"batch {batch}, context {context}: no time left"}
            return
        yield _latency_case(world, batch, context, num_tokens, waits=waits)


def _latency_case(
    world: World, batch: int, context: int, num_tokens: int, *, waits: bool
) -> dict[str, Any]:
    max_model_len = context + num_tokens + 16
    block_size = 64
    blocks = batch * -(-max_model_len // block_size)
    config = world.config(
        max_num_seqs=batch,
        max_model_len=max_model_len,
        num_kvcache_blocks=blocks,
        kvcache_block_size=block_size,
        graph_batch_sizes=(batch,),
        graph_prompt_sizes=(),
        freeze_gc=True,
        max_num_batched_tokens=max(4096, batch),
    )
    engine = world.engine(config)
    executor: Any = engine._loop.executor
    if waits:
        engine._loop.executor = Waiting(executor)
    records: list[StepRecord] = []
    engine.subscribe(records.append)
    engine.add(world.prompts([context] * batch, prompt_seed=3, max_tokens=num_tokens))
    while engine.has_unfinished_requests():
        engine.step()
    decodes = [record for record in records if record.num_prefill_tokens == 0]
    decodes = decodes[len(decodes) // 10 :]  # the first ones warm up
    gaps = Distribution.of(b.end_s - a.end_s for a, b in itertools.pairwise(decodes))
    host = Distribution.of(r.schedule_s + r.pack_s + r.postprocess_s for r in decodes)
    device_ms = None
    if world.device.type == "cuda":
        engine._loop.executor = executor
        device_ms = replay_ms(world, engine, batch)
    engine.close()
    row = {
        "batch": batch,
        "context": context,
        "ahead": not waits,
        "itl_p50_ms": _ms(gaps.median_s),
        "itl_p99_ms": _ms(gaps.percentile_s(99)),
        "itl_max_ms": _ms(gaps.max_s),
        "host_p50_us": None if host.median_s is None else host.median_s * 1e6,
        "tokens_per_s": batch / gaps.median_s if gaps.median_s else None,
    }
    if device_ms is not None:
        row["device_ms"] = device_ms
        row["weights_tb_per_s"] = world.facts()["weights_gib"] * 2**30 / device_ms / 1e9
    return row


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else value_s * 1e3
