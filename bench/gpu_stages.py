"""The stages of `gpu_check`: each yields its results."""

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.gpu_world import World
from graphs import EagerBackend
from nanovllm.engine import Engine
from nanovllm.kernels import ops
from nanovllm.prompts import Prompt
from nanovllm.records import StepRecord
from nanovllm.runtime.captured_steps import VARIANTS
from nanovllm.workloads.distribution import Distribution

Rows = Iterator[dict[str, Any]]


def timed_us(world: World, work: Callable[[], object], count: int) -> float:
    """Microseconds of one piece of work, many enqueued back to back."""
    work()
    world.synchronize()
    start_s = time.perf_counter()
    for _ in range(count):
        work()
    world.synchronize()
    return (time.perf_counter() - start_s) / count * 1e6


# What the machine can do.


def probes(world: World, until_s: float) -> Rows:
    """Bandwidth, copies, and the cost of a launch."""
    num_bytes = 2**24 if world.is_small else 2**30
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=world.device)
    target = torch.empty_like(source)
    us = timed_us(world, lambda: target.copy_(source), 20)
    yield {"copy_tb_per_s": 2 * num_bytes / us / 1e6}  # read and written
    small = torch.zeros(64, device=world.device)
    yield {"eager_op_us": timed_us(world, lambda: small.add_(1), 1000)}
    if world.device.type != "cuda":
        return
    for kib in (16, 64, 256):
        host = torch.zeros(kib * 256, dtype=torch.int32, pin_memory=True)
        device = torch.zeros(kib * 256, dtype=torch.int32, device=world.device)
        copy = functools.partial(device.copy_, host, non_blocking=True)
        us = timed_us(world, copy, 200)
        yield {f"upload_{kib}_kib_us": us}
    graph, num_nodes = torch.cuda.CUDAGraph(), 300
    with torch.cuda.graph(graph):
        for _ in range(num_nodes):
            small.add_(1)
    yield {"graph_node_us": timed_us(world, graph.replay, 50) / num_nodes}
    start_s = time.perf_counter()
    for _ in range(20):
        graph.replay()
    yield {"graph_launch_us": (time.perf_counter() - start_s) / 20 * 1e6}
    world.synchronize()


# Every operator against its reference in float32 on the CPU.


def kernels(world: World, until_s: float) -> Rows:
    """Largest error of each operator; NaN lies wherever nothing may be read from."""
    block_size, model = 16, world.model
    head_dim, num_kv_heads = model.head_dim, model.num_kv_heads
    num_heads, tolerance = model.num_heads, 1e-4 if world.dtype is torch.float32 else 3e-2
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def row(name: str, got: torch.Tensor, want: torch.Tensor, **facts: Any) -> dict[str, Any]:
        error = (got.detach().cpu().float() - want.float()).abs().max().item()
        scale = want.float().abs().max().item()
        relative = error / max(scale, 1e-9)
        # A NaN compares as not below.
        return {"kernel": name, "error": relative, "ok": relative < tolerance, **facts}

    def on_device(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone().to(world.device, world.dtype)

    x, residual, weight = (
        random(7, model.hidden_size),
        random(7, model.hidden_size),
        random(model.hidden_size),
    )
    as_given = on_device(residual)
    got = ops.add_rms_norm(on_device(x), as_given, on_device(weight), 1e-6)
    wide = on_device(residual).cpu().float()
    want = ops.add_rms_norm(on_device(x).cpu().float(), wide, on_device(weight).cpu().float(), 1e-6)
    yield row("add_rms_norm", got, want)
    yield row("add_rms_norm residual", as_given, wide)
    gate_up = random(5, 2 * model.intermediate_size)
    yield row(
        "silu_mul",
        ops.silu_mul(on_device(gate_up)),
        ops.silu_mul(on_device(gate_up).cpu().float()),
    )
    lengths = [1, block_size - 1, block_size, block_size + 1, 300 if world.is_small else 4096]
    for num_splits in (1, 2, 7, 32):
        yield row(
            "paged_decode",
            *_decode_case(world, lengths, block_size, num_splits, generator),
            splits=num_splits,
        )
    yield row("paged_prefill", *_prefill_case(world, block_size, generator))
    qkv = random(6, (num_heads + 2 * num_kv_heads) * head_dim)
    yield row("qkv_rope_store", *_store_case(world, qkv, block_size, generator))
    logits = random(4, model.vocab_size)
    ids, peak = ops.greedy(on_device(logits))
    wanted_ids, wanted_peak = ops.greedy(on_device(logits).cpu())
    same = bool((ids.cpu() == wanted_ids).all())
    yield {"kernel": "greedy", "ok": same and bool((peak.cpu() == wanted_peak).all())}
    yield _sampler_case(world, generator)


def _cache(
    world: World, num_blocks: int, block_size: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (num_blocks * block_size, world.model.num_kv_heads, world.model.head_dim)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def _tables(
    lengths: list[int], block_size: int, generator: torch.Generator
) -> tuple[torch.Tensor, int, set[int]]:
    """Scattered block tables, the number of blocks, and the slots that no row may read."""
    needed = [-(-length // block_size) for length in lengths]
    num_blocks = sum(needed) + 3
    order = torch.randperm(num_blocks, generator=generator).tolist()
    tables = torch.full((len(lengths), max(needed) + 2), num_blocks - 1, dtype=torch.int32)
    readable: set[int] = set()
    for index, (count, length) in enumerate(zip(needed, lengths, strict=True)):
        blocks, order = order[:count], order[count:]
        tables[index, :count] = torch.tensor(blocks, dtype=torch.int32)
        readable |= {
            blocks[position // block_size] * block_size + position % block_size
            for position in range(length)
        }
    return tables, num_blocks, set(range(num_blocks * block_size)) - readable


def _poison(caches: tuple[torch.Tensor, torch.Tensor], slots: set[int]) -> None:
    for cache in caches:
        cache[sorted(slots)] = float("nan")


def _attention_inputs(
    world: World, lengths: list[int], num_queries: int, block_size: int, generator: torch.Generator
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor]:
    tables, num_blocks, unread = _tables(lengths, block_size, generator)
    caches = _cache(world, num_blocks, block_size, generator)
    _poison(caches, unread)
    shape = (num_queries, world.model.num_heads, world.model.head_dim)
    query = torch.randn(shape, generator=generator)
    return query, caches, tables, torch.tensor(lengths, dtype=torch.int32)


def _decode_case(
    world: World,
    lengths: list[int],
    block_size: int,
    num_splits: int,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    query, caches, tables, lens = _attention_inputs(
        world, lengths, len(lengths), block_size, generator
    )
    scale = world.model.head_dim**-0.5
    moved = [tensor.to(world.device, world.dtype) for tensor in (query, *caches)]
    got = ops.paged_decode(
        *moved, tables.to(world.device), lens.to(world.device), block_size, scale, num_splits
    )
    rounded = [tensor.cpu().float() for tensor in moved]
    return got, ops.paged_decode(*rounded, tables, lens, block_size, scale, 1)


def _prefill_case(
    world: World, block_size: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    lengths, num_queries = [40, 17, 5, 64], [9, 1, 5, 64]  # chunks, a decode, whole prompts
    query, caches, tables, lens = _attention_inputs(
        world, lengths, sum(num_queries), block_size, generator
    )
    scale = world.model.head_dim**-0.5
    starts = torch.tensor([0, *itertools.accumulate(num_queries)], dtype=torch.int32)
    moved = [tensor.to(world.device, world.dtype) for tensor in (query, *caches)]
    got = ops.paged_prefill(
        *moved,
        *(tensor.to(world.device) for tensor in (tables, lens, starts)),
        max(num_queries),
        block_size,
        scale,
    )
    rounded = [tensor.cpu().float() for tensor in moved]
    want = ops.paged_prefill(*rounded, tables, lens, starts, max(num_queries), block_size, scale)
    return got, want


def _store_case(
    world: World, qkv: torch.Tensor, block_size: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and both caches as one tensor each."""
    model = world.model
    caches = _cache(world, 4, block_size, generator)
    slots = torch.tensor([5, -1, 33, 0, 63, 18], dtype=torch.int32)
    positions = torch.tensor([0, 3, 17, 200, 1000 % model.max_position_embeddings, 5]).int()
    angles = torch.rand(1024, model.head_dim // 2, generator=generator) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    norms = [torch.randn(model.head_dim, generator=generator) for _ in range(2)]

    def run(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(world.dtype).to(device, dtype)

        key_cache, value_cache = map(moved, caches)
        query = ops.qkv_rope_store(
            moved(qkv),
            positions.to(device),
            slots.to(device),
            table.to(device),
            moved(norms[0]),
            moved(norms[1]),
            model.rms_norm_eps,
            key_cache,
            value_cache,
        )
        return torch.cat([tensor.flatten() for tensor in (query, key_cache, value_cache)])

    return run(world.device, world.dtype), run(torch.device("cpu"), torch.float32)


def _sampler_case(world: World, generator: torch.Generator) -> dict[str, Any]:
    """Draws from eight likely tokens: the counts against what the logits say."""
    num_rows, vocab_size = 4096, 1000
    one = torch.full((vocab_size,), -20.0)
    one[torch.randperm(vocab_size, generator=generator)[:8]] = torch.linspace(0, 2, 8)
    logits = one.expand(num_rows, -1).contiguous().to(world.device, torch.float32)
    ids, peak = ops.greedy(logits)
    uniform = torch.rand(num_rows, generator=generator, dtype=torch.float64).to(world.device)
    column = torch.full((num_rows,), 0.9, device=world.device)
    drawn = ops.sample_any(logits, peak, column, torch.zeros_like(column), uniform, ids)
    want = (one / 0.9).softmax(0) * num_rows
    counts = torch.bincount(drawn.cpu(), minlength=vocab_size).float()
    likely = want > 5
    chi_square = ((counts - want)[likely].square() / want[likely]).sum().item()
    # 7 degrees of freedom: above 30 once in 10,000 times.
    return {"kernel": "sample_any", "chi_square": chi_square, "ok": chi_square < 30}


# Captures.


def capture(world: World, until_s: float) -> Rows:
    """What capturing costs, twice: the second shows what the first left behind."""
    used = []
    config = world.config(
        max_num_seqs=world.max_num_seqs, max_model_len=1024, num_kvcache_blocks=256
    )
    for attempt in range(2):
        executor = world.executor(config)
        described = executor.describe_graphs()
        captures = described["captures"]
        yield {
            "attempt": attempt,
            "ok": described["degraded"] is None,
            "degraded": described["degraded"],
            "graphs": len(captures),
            "capture_ms": sum(row["capture_ms"] for row in captures),
            "warmup_ms": sum(row["warmup_ms"] for row in captures),
            "pool_mib": sum(row["pool_bytes"] for row in captures) / 2**20,
            "driver_mib": sum(row["driver_bytes"] or 0 for row in captures) / 2**20,
        }
        executor.close()
        del executor
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
            free_bytes, _ = torch.cuda.mem_get_info(world.device)
            used.append(-free_bytes)
    if used:
        yield {"leaked_mib": (used[1] - used[0]) / 2**20}


# Replay against the same programs, run eagerly.


def parity(world: World, until_s: float) -> Rows:
    """Engines in step: one replays, one runs the same padded programs eagerly."""
    block = {"kvcache_block_size": 16}
    for name, options, params in (
        ("greedy", block, {}),
        ("sample", block, {"temperature": 0.8, "seed": 11}),
        ("big blocks", {"kvcache_block_size": 256}, {}),
    ):
        config = world.config(
            max_num_seqs=world.max_num_seqs, max_model_len=1024, num_kvcache_blocks=400, **options
        )
        yield {"case": name, **_lockstep(world, config, params)}
        if time.perf_counter() > until_s:
            return
    yield {"case": "one step ahead", **_ahead(world)}


def _script(world: World, params: dict[str, Any]) -> list[list[Prompt]]:
    """What arrives before each step: rows join and leave, so that buckets change all the time."""
    arrivals: list[list[Prompt]] = []
    counts = (3, 0, 5, 0, 4, 0, 1) if world.is_small else (3, 0, 5, 0, 0, 56, 0, 0, 0, 1, 0, 2)
    for index, count in enumerate(counts):
        lengths = [5 + (7 * index + 3 * i) % 60 for i in range(count)]
        arrivals.append(
            world.prompts(lengths, prompt_seed=index, max_tokens=4 + 5 * (index % 4), **params)
        )
    return arrivals


def _lockstep(world: World, config: Any, params: dict[str, Any]) -> dict[str, Any]:
    arrivals = _script(world, params)
    differences = []
    executors: list[Any] = [world.executor(config), world.executor(config, EagerBackend())]
    engines = [Engine(config, executor, None) for executor in executors]
    for engine in engines:
        # In step, so that logits can be compared; one step ahead is another case.
        engine._loop.executor = _Waiting(engine._loop.executor)
    outputs: list[list[Any]] = [[], []]
    drivers = [
        _collect(engine, arrivals, out) for engine, out in zip(engines, outputs, strict=True)
    ]
    num_steps = 0
    for _ in zip(*drivers, strict=True):
        num_steps += 1
        world.synchronize()
        left, right = (executor._statics.logits for executor in executors)
        differences.append((left.float() - right.float()).abs().max().item())
    tokens = [[c.token_ids for r in out for c in r.completions] for out in outputs]
    for engine in engines:
        engine.close()
    return {
        "ok": tokens[0] == tokens[1],
        "steps": num_steps,
        "tokens": sum(map(len, tokens[0])),
        "max_logit_difference": max(differences),
    }


def _collect(engine: Engine, arrivals: list[list[Prompt]], into: list[Any]) -> Iterator[None]:
    waiting = list(arrivals)
    while waiting or engine.has_unfinished_requests():
        if waiting:
            into += engine.add(waiting.pop(0))
        engine.step()
        yield


class _Waiting:
    """An executor that never lets the engine run ahead."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.submit, self.close = executor.submit, executor.close
        self.describe_graphs, self.recover = executor.describe_graphs, executor.recover

    def may_run_ahead(self, rows: Any) -> bool:
        return False


def _ahead(world: World) -> dict[str, Any]:
    """The same requests with and without running ahead, the device held up at random."""
    config = world.config(
        max_num_seqs=world.max_num_seqs,
        max_model_len=1024,
        num_kvcache_blocks=400,
        kvcache_block_size=16,
    )
    arrivals = _script(world, {})
    tokens = []
    for waits in (True, False):
        engine = world.engine(config)
        if waits:
            engine._loop.executor = _Waiting(engine._loop.executor)
        elif world.device.type == "cuda":
            _hold_up(engine)
        out: list[Any] = []
        for _ in _collect(engine, arrivals, out):
            pass
        tokens.append([c.token_ids for request in out for c in request.completions])
        engine.close()
    return {"ok": tokens[0] == tokens[1], "tokens": sum(map(len, tokens[0]))}


def _hold_up(engine: Engine) -> None:
    """Let the device sleep before every third step, so that the host is far ahead of it."""
    executor: Any = engine._loop.executor
    run, count = executor._queue.run, itertools.count()

    def held_up(work: Callable[[], object]) -> None:
        if next(count) % 3 == 0:
            run(lambda: torch.cuda._sleep(2_000_000))  # about a millisecond
        run(work)

    executor._queue.run = held_up


# How fast.


def latency(world: World, until_s: float) -> Rows:
    """Time between tokens by batch and context, the host in step and ahead; GPU time alone."""
    shapes = [(1, 512), (8, 512), (64, 512), (1, 4096), (8, 4096)]
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
        max_num_batched_tokens=max(4096, batch),
    )
    engine = world.engine(config)
    executor: Any = engine._loop.executor
    if waits:
        engine._loop.executor = _Waiting(executor)
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
        step = executor._captured.step(batch, VARIANTS[0])
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        world.synchronize()
        events[0].record()
        for _ in range(100):
            step.replay()
        events[1].record()
        world.synchronize()
        device_ms = events[0].elapsed_time(events[1]) / 100
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
