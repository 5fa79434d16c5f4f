"""`resolve`: from what was asked and what is there to what runs. Pure, so it can be tested."""

import math

import attrs

from graphs import PlanError, plan_buckets
from nanovllm.backends import Backend, choose_backend
from nanovllm.config import DTYPE_NAMES, DeviceFacts, EngineConfig, ModelFacts, ResolvedConfig
from nanovllm.errors import ConfigError

CPU_KV_CACHE_SHARE = 0.25  # of the memory that is free
CPU_KV_CACHE_MAX_BYTES = 4 * 2**30

NUM_GRAPH_VARIANTS = 2  # decodes: greedy and drawing ones; prompts: of few rows and of many
PROMPT_SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512)
"""Beyond, a model is busy for as long as the host needs to launch a step."""
GRAPH_BYTES = 12 * 2**20
"""Set aside for each CUDA graph. vLLM's logs show 6 to 26 MiB for big models; what the graphs of
an engine took is in `describe()["graphs"]`."""


def resolve_dtype(config: EngineConfig, model: ModelFacts, device: DeviceFacts) -> str:
    """The type of weights and K/V: what was asked, or the checkpoint's where that is fast."""
    if config.dtype != "auto":
        return config.dtype
    wanted = model.dtype if model.dtype in DTYPE_NAMES else "float32"
    for name in (wanted, "bfloat16", "float16"):
        if name in device.fast_dtypes:
            return name
    return "float32"


def resolve(config: EngineConfig, model: ModelFacts, device: DeviceFacts) -> ResolvedConfig:
    """Decide everything that was left open.

    Raises:
        ConfigError: The options can't work with this model on this device.
    """
    notes: list[str] = []
    dtype = resolve_dtype(config, model, device)
    notes.append(f"dtype {dtype}: " + _why_dtype(config, model, dtype))
    if device.is_cpu and dtype == "float16":
        notes.append("float16 is slow on a CPU: bfloat16 and float32 are many times as fast")
    max_model_len = _resolve_max_model_len(config, model, notes)
    choice = choose_backend(
        config.attention_backend,
        device_type="cpu" if device.is_cpu else "cuda",
        dtype=dtype,
        block_size=config.kvcache_block_size,
        obstacles=device.obstacles,
    )
    notes.append(f"backend {choice.backend.name}: {choice.why}")
    block_size = config.kvcache_block_size or choice.backend.block_size
    max_num_seqs = config.max_num_seqs or (64 if device.is_cpu else 256)
    max_num_batched_tokens = config.max_num_batched_tokens or (2048 if device.is_cpu else 16384)
    max_prefill_chunk = config.max_prefill_chunk or (128 if device.is_cpu else 2048)
    block_bytes = model.kv_values_per_token * block_size * (4 if dtype == "float32" else 2)
    num_seats = min(max_num_seqs, max_num_batched_tokens)
    graph_batch_sizes = _resolve_graphs(config, choice.backend, num_seats, notes)
    graph_prompt_sizes: tuple[int, ...] = ()
    if graph_batch_sizes and choice.backend.captures_prompts:
        graph_prompt_sizes = _resolve_prompt_graphs(config, max_num_batched_tokens, notes)
    num_graphs = len(graph_batch_sizes) + len(graph_prompt_sizes)
    num_blocks = _resolve_num_blocks(
        config,
        attrs.evolve(
            device,
            activation_bytes=device.activation_bytes
            + num_graphs * NUM_GRAPH_VARIANTS * GRAPH_BYTES,
        ),
        block_bytes,
        max_num_seqs * -(-max_model_len // block_size),
        notes,
    )
    return ResolvedConfig(
        device=device.device,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_chunk=max_prefill_chunk,
        kvcache_block_size=block_size,
        num_kvcache_blocks=num_blocks,
        kv_cache_bytes=num_blocks * block_bytes,
        attention_backend=choice.backend.name,
        graph_batch_sizes=graph_batch_sizes,
        graph_prompt_sizes=graph_prompt_sizes,
        enable_prefix_caching=config.enable_prefix_caching,
        eos_token_ids=model.eos_token_ids,
        seed=config.seed,
        max_queued_requests=config.max_queued_requests,
        freeze_gc=config.freeze_gc,
        notes=tuple(notes),
    )


def _resolve_graphs(
    config: EngineConfig, backend: Backend, num_seats: int, notes: list[str]
) -> tuple[int, ...]:
    """The decode batch sizes to capture; none where steps are run as they are."""
    if not backend.uses_graphs:
        return ()
    if config.enforce_eager:
        notes.append("no CUDA graphs: `enforce_eager`")
        return ()
    sizes = None
    if config.graph_batch_sizes is not None:
        # The largest batch that there can be needs a graph, or steps of that size would be slow.
        sizes = {*config.graph_batch_sizes, num_seats}
    try:
        plan = plan_buckets(num_seats, sizes=sizes)
    except PlanError as error:
        raise ConfigError(
            f"`graph_batch_sizes` is {config.graph_batch_sizes} but a step has at most {num_seats} "
            "sequences (`max_num_seqs`, `max_num_batched_tokens`); leave larger sizes out."
        ) from error
    notes.append(f"{len(plan.sizes)} decode batch sizes as CUDA graphs, up to {num_seats}")
    return plan.sizes


def _resolve_prompt_graphs(
    config: EngineConfig, max_num_batched_tokens: int, notes: list[str]
) -> tuple[int, ...]:
    """The numbers of positions to capture steps with prompts for."""
    asked = config.graph_prompt_sizes
    if asked is None:
        sizes = tuple(size for size in PROMPT_SIZES if size <= max_num_batched_tokens)
    elif asked and max(asked) > max_num_batched_tokens:
        raise ConfigError(
            f"`graph_prompt_sizes` is {asked} but a step has at most {max_num_batched_tokens} "
            "positions (`max_num_batched_tokens`); leave larger sizes out."
        )
    else:
        sizes = tuple(sorted(set(asked)))
    if sizes:
        notes.append(f"steps with prompts as CUDA graphs, up to {sizes[-1]} positions")
    return sizes


def _why_dtype(config: EngineConfig, model: ModelFacts, dtype: str) -> str:
    if config.dtype == "int8":
        return "as asked; weights only, K/V in bfloat16"
    if config.dtype != "auto":
        return "as asked"
    if dtype == model.dtype:
        return "as the checkpoint's config names it"
    return f"the checkpoint has {model.dtype or 'no type'}, and this is the device's fast one"


def _resolve_max_model_len(config: EngineConfig, model: ModelFacts, notes: list[str]) -> int:
    window = model.sliding_window
    trained = model.max_position_embeddings
    most = trained if window is None else min(trained, window)
    asked = config.max_model_len
    if asked is not None and asked > most:
        reason = (
            f"the model was trained for {trained}"
            if most == trained
            else f"the model attends to a sliding window of {window}, which is supported up to it"
        )
        raise ConfigError(
            f"`max_model_len` is {asked} but {reason}; lower it to {most} or leave it out."
        )
    if asked is None and most < trained:
        notes.append(f"max_model_len {most}: within the model's sliding window attention is exact")
    return asked if asked is not None else most


def _resolve_num_blocks(
    config: EngineConfig,
    device: DeviceFacts,
    block_bytes: int,
    num_useful_blocks: int,
    notes: list[str],
) -> int:
    """Blocks in the K/V cache: as asked, else what the memory allows and the limits can fill."""
    if config.num_kvcache_blocks is not None:
        num_bytes = config.num_kvcache_blocks * block_bytes
        if num_bytes > device.total_bytes:
            raise ConfigError(
                f"`num_kvcache_blocks` is {config.num_kvcache_blocks}, which takes {num_bytes} "
                f"bytes, but {device.device} has {device.total_bytes}; lower it or leave it out."
            )
        return config.num_kvcache_blocks
    if config.kv_cache_bytes is not None:
        if config.kv_cache_bytes > device.total_bytes:
            raise ConfigError(
                f"`kv_cache_bytes` is {config.kv_cache_bytes} but {device.device} has "
                f"{device.total_bytes}; lower it or leave it out."
            )
        if config.kv_cache_bytes < block_bytes:
            raise ConfigError(
                f"`kv_cache_bytes` is {config.kv_cache_bytes} but one block takes {block_bytes}; "
                f"give at least that."
            )
        return config.kv_cache_bytes // block_bytes
    if device.is_cpu:
        budget = min(CPU_KV_CACHE_MAX_BYTES, math.floor(device.free_bytes * CPU_KV_CACHE_SHARE))
        why = f"{CPU_KV_CACHE_SHARE:.0%} of {device.free_bytes} free bytes, 4 GiB at most"
        advice = "free some memory or give `kv_cache_bytes`"
    else:
        # What other processes use counts too: the share is one of the whole device.
        used, needed = device.total_bytes - device.free_bytes, device.activation_bytes
        budget = math.floor(device.total_bytes * config.gpu_memory_utilization) - used - needed
        why = (
            f"{config.gpu_memory_utilization:.0%} of {device.total_bytes} bytes, less {used} in "
            f"use and {needed} for steps and graphs,"
        )
        share = math.ceil((used + needed + block_bytes) / device.total_bytes * 100) / 100
        advice = "free some memory"
        if share <= 1:
            advice += f" or raise `gpu_memory_utilization` to at least {share}"
    if budget < block_bytes:
        raise ConfigError(
            f"No memory for the K/V cache: {why} leaves {budget} bytes, and one block takes "
            f"{block_bytes}; {advice}."
        )
    num_blocks = min(budget // block_bytes, num_useful_blocks)
    if num_blocks == num_useful_blocks:
        why = "as many as `max_num_seqs` requests of `max_model_len` tokens can fill"
    notes.append(f"{num_blocks} K/V blocks of {block_bytes} bytes: {why}")
    return num_blocks
