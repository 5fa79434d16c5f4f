"""Engines whose steps go through captured programs and a device's queue, on a CPU."""

import contextlib

import attrs

from graphs import EagerBackend
from nanovllm.build_graphs import build_graph_executor
from nanovllm.runtime.device_queue import ImmediateQueue
from nanovllm.runtime.paged_attention import AttentionShape, TritonAttention
from tests.engines import tiny_llm
from tests.runtime.decoders import load_plain_decoder


def attention_for(decoder, config):
    """The operators on a CPU, planned as for a device with many multiprocessors."""
    shape = AttentionShape.of(
        decoder.config,
        block_size=config.kvcache_block_size,
        max_model_len=config.max_model_len,
        num_sms=132,
    )
    return TritonAttention(shape)


@contextlib.contextmanager
def graph_llm(
    name="llama",
    *,
    backend=None,
    queue=None,
    sizes=(1, 2, 4),
    prompt_sizes=(4, 16),
    events=None,
    **options,
):
    """A tiny engine that runs as on a GPU with CUDA graphs.

    Args:
        name: The checkpoint.
        backend: What captures.
        queue: The device.
        sizes: Batch sizes to capture; the largest batch is always one. None: run eagerly.
        prompt_sizes: Numbers of positions to capture steps with prompts for.
        events: A list that gets what the backend tells.
        **options: Of the engine.
    """
    with tiny_llm(name, attention_backend="torch", **options) as llm:
        engine = llm._engine
        seats = llm.config.limits.num_seats
        captured = (
            () if sizes is None else tuple(sorted({*sizes, seats} - set(range(seats + 1, 99))))
        )
        prompts = tuple(one for one in prompt_sizes if one <= llm.config.max_num_batched_tokens)
        config = attrs.evolve(
            llm.config,
            graph_batch_sizes=captured,
            graph_prompt_sizes=prompts if captured else (),
        )
        decoder = load_plain_decoder(name)  # the engine's own has oneDNN's layout
        engine._loop.executor.close()
        engine._loop.executor = build_graph_executor(
            decoder,
            config,
            attention=attention_for(decoder, config),
            backend=backend or EagerBackend(),
            queue=queue or ImmediateQueue(),
            on_event=(lambda event: None) if events is None else events.append,
        )
        yield llm
