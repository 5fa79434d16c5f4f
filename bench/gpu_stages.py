"""The stages of `gpu_check`: each yields its results."""

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from bench.gpu_world import World, make_world
from graphs import EagerBackend
from nanovllm.engine import Engine
from nanovllm.prompts import Prompt
from nanovllm.runtime.captured_steps import VARIANTS

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
    # In float32: a row that joins a step later is computed in other company, which in 16 bits may
    # turn a token.
    yield {"case": "one step ahead", **_ahead(make_world(world.device, is_exact=True))}
    if world.device.type == "cuda":
        yield {"case": "kernels that overlap", **_overlapping(world)}


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
        engine._loop.executor = Waiting(engine._loop.executor)
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


class Waiting:
    """An executor that never lets the engine run ahead."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.submit, self.close = executor.submit, executor.close
        self.describe_graphs, self.recover = executor.describe_graphs, executor.recover

    def may_run_ahead(self, rows: Any) -> bool:
        """See `Executor`."""
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
            engine._loop.executor = Waiting(engine._loop.executor)
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


def _overlapping(world: World) -> dict[str, Any]:
    """The same requests by kernels that begin while the one before ends, and by ones that wait."""
    from nanovllm.kernels.triton import launch, overlap

    config = world.config(
        max_num_seqs=world.max_num_seqs, max_model_len=1024, num_kvcache_blocks=400
    )
    tokens, step_ms = [], []
    for arch in (overlap.current_arch, lambda: 0):
        with mock.patch.object(launch, "current_arch", arch):
            engine = world.engine(config)
            out: list[Any] = []
            for _ in _collect(engine, _script(world, {}), out):
                pass
        tokens.append([c.token_ids for request in out for c in request.completions])
        step_ms.append(replay_ms(world, engine, 1))
        engine.close()
    return {
        "ok": tokens[0] == tokens[1],
        "tokens": sum(map(len, tokens[0])),
        "one_row_ms": step_ms[0],
        "one_row_waiting_ms": step_ms[1],
    }


def replay_ms(world: World, engine: Engine, num_rows: int) -> float:
    """What a captured step takes on the device, whatever it finds in its inputs."""
    executor: Any = engine._loop.executor
    step = executor._captured.step(num_rows, VARIANTS[0])
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    world.synchronize()
    events[0].record()
    for _ in range(100):
        step.replay()
    events[1].record()
    world.synchronize()
    return float(events[0].elapsed_time(events[1])) / 100
