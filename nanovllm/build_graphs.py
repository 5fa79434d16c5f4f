"""Composition of the executor with captured steps, from a decoder that is on its device."""

import logging
from collections.abc import Callable

import attrs
import torch

from graphs import Event, EventKind, GraphBackend, plan_buckets
from nanovllm.config import DeviceFacts, ResolvedConfig
from nanovllm.errors import ConfigError
from nanovllm.model.decoder import Decoder
from nanovllm.runtime.captured_steps import CapturedSteps
from nanovllm.runtime.decode_program import DecodeStatics, decode_layout
from nanovllm.runtime.device_queue import DeviceQueue
from nanovllm.runtime.fused_decoder import FusedDecoder
from nanovllm.runtime.graph_executor import GraphExecutor
from nanovllm.runtime.kv_cache import allocate_kv_cache
from nanovllm.runtime.library_attention import make_attention
from nanovllm.runtime.paged_attention import AttentionShape, PagedAttention
from nanovllm.runtime.prompt_program import prompt_layouts
from nanovllm.runtime.step_inputs import max_mixed_words
from nanovllm.runtime.step_memory import CudaMemoryProbe, measure_step_bytes

NUM_PAD_BLOCKS = 1
"""Blocks behind those of the pool, for padding rows to attend to. Nobody writes there."""


LOUD = {EventKind.DEGRADED, EventKind.OVER_BUDGET, EventKind.FINDING}
"""Events that somebody should read: the engine goes on, but not as it was meant to."""


def log_event(event: Event) -> None:
    """Pass on what a backend tells to the log of this package."""
    level = logging.WARNING if event.kind in LOUD else logging.DEBUG
    logging.getLogger("nanovllm").log(level, "graphs: %s", event.message)


def attention_for(decoder: Decoder, config: ResolvedConfig, num_sms: int) -> PagedAttention:
    """The attention that a config names, for a device of so many multiprocessors."""
    shape = AttentionShape.of(
        decoder.config,
        block_size=config.kvcache_block_size,
        max_model_len=config.max_model_len,
        num_sms=num_sms,
    )
    return make_attention(config.attention_backend, shape)


def with_step_memory(
    facts: DeviceFacts, decoder: Decoder, expected: ResolvedConfig, device: torch.device
) -> DeviceFacts:
    """Facts of a GPU that say what the biggest step takes, so that it is left free.

    Raises:
        ConfigError: There is no memory for such a step.
    """
    attention = attention_for(decoder, expected, _num_sms(device))
    try:
        with torch.cuda.device(device):
            num_bytes = measure_step_bytes(
                decoder,
                attention,
                CudaMemoryProbe(device),
                max_num_batched_tokens=expected.max_num_batched_tokens,
                max_num_seqs=expected.limits.num_seats,
                max_model_len=expected.max_model_len,
            )
            torch.cuda.empty_cache()
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"No memory on {device} for a step of `max_num_batched_tokens` = "
            f"{expected.max_num_batched_tokens} positions beside the weights: {facts.free_bytes} "
            f"of {facts.total_bytes} bytes are free; lower it, or free some memory."
        ) from error
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return attrs.evolve(facts, free_bytes=free_bytes, activation_bytes=num_bytes)


def build_cuda_executor(
    decoder: Decoder, config: ResolvedConfig, device: torch.device
) -> GraphExecutor:
    """The executor of a GPU: CUDA graphs, its own streams."""
    # Delayed: these need a torch with CUDA.
    from graphs.cuda import CudaBackend
    from graphs.cuda_driver import TorchCudaDriver
    from nanovllm.runtime.cuda_queue import CudaQueue

    with torch.cuda.device(device):
        return build_graph_executor(
            decoder,
            config,
            attention=attention_for(decoder, config, _num_sms(device)),
            backend=CudaBackend(TorchCudaDriver(device)),
            queue=CudaQueue(device),
            on_event=log_event,
        )


def _num_sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def build_graph_executor(
    decoder: Decoder,
    config: ResolvedConfig,
    *,
    attention: PagedAttention,
    backend: GraphBackend,
    queue: DeviceQueue,
    on_event: Callable[[Event], None],
) -> GraphExecutor:
    """Allocate the K/V cache and the static buffers, and capture the decode step.

    Args:
        decoder: On its device.
        config: What runs. No `graph_batch_sizes`: nothing is captured, every step runs eagerly.
        attention: How steps attend.
        backend: What captures.
        queue: The device's.
        on_event: Told of everything that the backend does.
    """
    device, dtype = decoder.embedding.device, decoder.embedding.dtype
    block_size, num_blocks = config.kvcache_block_size, config.num_kvcache_blocks
    kv_cache = allocate_kv_cache(
        decoder.config,
        num_blocks=num_blocks + NUM_PAD_BLOCKS,
        block_size=block_size,
        dtype=dtype,
        device=device,
    )
    fused = FusedDecoder.create(decoder, kv_cache, max_model_len=config.max_model_len)
    num_columns = -(-config.max_model_len // block_size)
    num_seats = config.limits.num_seats
    layout = decode_layout(num_seats, num_columns, pad_block=num_blocks)
    prompts = prompt_layouts(
        config.graph_prompt_sizes,
        max_num_rows=num_seats,
        num_table_columns=num_columns,
        pad_block=num_blocks,
    )
    most_words = max_mixed_words(config.max_num_batched_tokens, num_seats, num_columns)
    num_words = max([most_words, *(one.num_words for one in prompts)])
    statics = DecodeStatics.create(fused, layout, num_mixed_words=num_words)
    captured = None
    if config.graph_batch_sizes:
        plan = plan_buckets(num_seats, sizes=config.graph_batch_sizes)
        captured = CapturedSteps(statics, attention, plan, backend, on_event, prompts)
    return GraphExecutor(statics, attention, captured, queue)
