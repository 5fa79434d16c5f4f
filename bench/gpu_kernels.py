"""The kernels' stage of `gpu_check`: every operator against its reference in float32 on the CPU."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.gpu_world import World
from nanovllm.kernels import ops
from nanovllm.kernels.geometry import num_few_rows

Rows = Iterator[dict[str, Any]]


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
    for num_rows in (1, 5, 8):
        yield from _linear_cases(world, num_rows, generator, row)
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


def _linear_cases(
    world: World, num_rows: int, generator: torch.Generator, row: Callable[..., dict[str, Any]]
) -> Rows:
    """The products of few rows, where this model has kernels for as many."""
    model = world.model
    size, inner_size = model.hidden_size, model.intermediate_size
    if num_rows > num_few_rows(size, world.dtype.itemsize):
        return

    def random(*shape: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """On the device, and the same values on the CPU."""
        values = torch.randn(shape, generator=generator).mul_(scale).to(world.dtype)
        return values.to(world.device), values.float()

    x, norm = random(num_rows, size), random(size)
    gates, inner = random(2 * inner_size, size, scale=size**-0.5), random(num_rows, inner_size)
    down, bias = random(size, inner_size, scale=inner_size**-0.5), random(size)
    got, want = (ops.norm_linear(x[i], norm[i], 1e-6, gates[i], None) for i in range(2))
    yield row("norm_linear", got, want, rows=num_rows)
    got, want = (ops.norm_gate_up(x[i], norm[i], 1e-6, gates[i], None) for i in range(2))
    yield row("norm_gate_up", got, want, rows=num_rows)
    for i in range(2):
        ops.linear_add(inner[i], down[i], bias[i], x[i])
    yield row("linear_add", *x, rows=num_rows)


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
