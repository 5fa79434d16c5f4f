"""The composition root: from a model's name and options to an engine that runs."""

import importlib.util
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike

import attrs
import psutil
import torch

from nanovllm.backends import find_backend
from nanovllm.build_graphs import build_cuda_executor, with_step_memory
from nanovllm.config import (
    DeviceFacts,
    EngineConfig,
    ModelFacts,
    ResolvedConfig,
)
from nanovllm.engine import Engine
from nanovllm.errors import ConfigError
from nanovllm.facts import read_facts
from nanovllm.hub import FilesKind, ModelFiles, find_model
from nanovllm.model.checkpoint import Checkpoint
from nanovllm.model.config import ModelConfig, read_model_config, read_token_ids
from nanovllm.model.decoder import Decoder
from nanovllm.model.gguf_checkpoint import GgufCheckpoint
from nanovllm.model.linear import make_packed
from nanovllm.model.safetensors_checkpoint import open_folder
from nanovllm.model.weights import DTYPES, load_decoder
from nanovllm.prompts import PromptReader
from nanovllm.records import StepHook
from nanovllm.resolve import resolve
from nanovllm.runtime.executor import Executor, TorchExecutor
from nanovllm.runtime.kv_cache import allocate_kv_cache
from nanovllm.runtime.library_attention import AMPERE
from nanovllm.runtime.library_attention import obstacles as attention_obstacles
from nanovllm.runtime.threads import usable_threads
from nanovllm.text.structured import StructureCompiler
from nanovllm.text.tokenizer import Tokenizer, load_tokenizer

QUIET_S = 1.0
"""What takes longer than this says on standard error what it is doing."""


def build_engine(
    model: str | PathLike[str],
    config: EngineConfig,
    *,
    on_step: StepHook | None = None,
) -> tuple[Engine, PromptReader]:
    """Load a model and everything it needs, in the order in which mistakes are cheapest to find."""
    device = find_device(config.device)
    files = find_model(model)
    checkpoint = open_checkpoint(files)
    model_config = read_model_config(checkpoint.config, source=checkpoint.source)
    tokenizer = None
    if not config.skip_tokenizer_init:
        tokenizer = load_tokenizer(files, tokenizer=config.tokenizer)
    model_facts = read_model_facts(checkpoint, model_config, tokenizer)
    # Twice: before anything big is loaded, to refuse what can't work, and after, when what is
    # left of the memory is the K/V cache's.
    expected = resolve(config, model_facts, read_device_facts(device, model_config))
    decoder = _load(checkpoint, model_config, expected, device, _LoadProgress(files.name))
    device_facts = read_device_facts(device, model_config)
    if find_backend(expected.attention_backend).uses_graphs:
        device_facts = with_step_memory(device_facts, decoder, expected, device)
    resolved = resolve(config, model_facts, device_facts)
    facts = read_facts(files.name, decoder, device, kv_cache_bytes=resolved.kv_cache_bytes)
    executor = _make_executor(decoder, resolved, device)
    structures = None
    if tokenizer is not None:
        eos_token_ids = resolved.limits.eos_token_ids
        structures = StructureCompiler(tokenizer, model_config.vocab_size, eos_token_ids)
    reader = PromptReader(tokenizer, model_config.vocab_size, resolved.max_model_len, structures)
    return Engine(resolved, executor, tokenizer, on_step, facts), reader


def _load(
    checkpoint: Checkpoint,
    model: ModelConfig,
    config: ResolvedConfig,
    device: torch.device,
    progress: Callable[[int, int], None],
) -> Decoder:
    """Load the weights as the backend reads them."""
    dtype = DTYPES[config.dtype]
    if config.attention_backend != "native":
        return load_decoder(
            checkpoint,
            model,
            dtype=dtype,
            device=device,
            make_linear=make_packed,
            progress=progress,
        )
    # Delayed: Numba is an extra, and takes a while to import.
    from nanovllm.runtime.native.loading import load_in_panels

    return load_in_panels(
        checkpoint, model, dtype=dtype, int8=config.dtype == "int8", progress=progress
    )


def _make_executor(decoder: Decoder, config: ResolvedConfig, device: torch.device) -> Executor:
    if find_backend(config.attention_backend).uses_graphs:
        return build_cuda_executor(decoder, config, device)
    kv_cache = allocate_kv_cache(
        decoder.config,
        num_blocks=config.num_kvcache_blocks,
        block_size=config.kvcache_block_size,
        dtype=DTYPES[config.dtype],
        device=device,
    )
    if config.attention_backend == "torch":
        return TorchExecutor(decoder, kv_cache, block_size=config.kvcache_block_size, device=device)
    # Delayed: Numba is an extra, and takes a while to import.
    from nanovllm.runtime.native.executor import NativeExecutor
    from nanovllm.runtime.native.program import NativeProgram

    with _said_if_slow("preparing the CPU kernels (compiled once per type, about 10 s, then kept)"):
        program = NativeProgram(
            decoder,
            kv_cache,
            block_size=config.kvcache_block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            num_threads=usable_threads(),
        )
    return NativeExecutor(program)


def find_device(name: str) -> torch.device:
    """The device of that name, which must be there.

    Raises:
        ConfigError: It is not, or the name means nothing.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    named = re.fullmatch("cpu|cuda(?::([0-9]+))?", name)
    if named is None:
        raise ConfigError(f"`device` is {name!r} but must be 'auto', 'cpu', 'cuda' or 'cuda:N'.")
    if name == "cpu":
        return torch.device(name)
    # Read here, as torch takes the number modulo 256: cuda:256 would be cuda:0.
    index = int(named[1] or 0)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        raise ConfigError(
            f"`device` is {name!r} but torch {torch.__version__} sees {count} CUDA devices; "
            "use 'cpu', or install a CUDA build of torch and check the driver."
        )
    return torch.device("cuda", index)


def read_device_facts(device: torch.device, model: ModelConfig) -> DeviceFacts:
    """Measure a device, and see whether the model can run natively on it."""
    if device.type == "cpu":
        memory = psutil.virtual_memory()
        obstacle = _native_obstacle(model)
        fast = {"float32"}
        # The native kernels are bound by memory, and bfloat16 halves what they read.
        if obstacle is None or torch.ops.mkldnn._is_mkldnn_bf16_supported():
            fast.add("bfloat16")
        obstacles = {} if obstacle is None else {"native": obstacle}
        return DeviceFacts("cpu", memory.total, memory.available, frozenset(fast), obstacles)
    torch.cuda.empty_cache()  # what torch keeps of tensors that are gone is free
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    fast = {"float16", "float32"}
    capability = torch.cuda.get_device_capability(device)
    if capability >= AMPERE:  # which bfloat16 arrived with
        fast.add("bfloat16")
    return DeviceFacts(
        str(device),
        total_bytes,
        free_bytes,
        frozenset(fast),
        attention_obstacles(capability, model.head_dim),
    )


def _native_obstacle(model: ModelConfig) -> str | None:
    """Why the model can't run natively on this CPU."""
    if importlib.util.find_spec("numba") is None:
        return "Numba is not installed (pip install 'nanovllm[cpu]')"
    try:
        # Delayed: Numba is an extra, and takes a while to import.
        from nanovllm.runtime.native.program import native_obstacle
    except Exception as error:  # noqa: BLE001  # whatever is wrong with a Numba, torch still works
        return f"Numba fails to load ({type(error).__name__}: {error})"
    return native_obstacle(model)


def open_checkpoint(files: ModelFiles) -> Checkpoint:
    """The checkpoint in a model's files."""
    return GgufCheckpoint(files.path) if files.kind is FilesKind.GGUF else open_folder(files.path)


def read_model_facts(
    checkpoint: Checkpoint, model: ModelConfig, tokenizer: Tokenizer | None
) -> ModelFacts:
    """What `resolve` needs to know of a model.

    The ids that end a text are the union of what config, generation config and tokenizer name:
    published models disagree with themselves, and any of them is meant to end the text.
    """
    eos_token_ids = model.eos_token_ids | read_token_ids(
        checkpoint.generation_config.get("eos_token_id")
    )
    if tokenizer is not None:
        eos_token_ids |= tokenizer.eos_token_ids
    return ModelFacts(
        max_position_embeddings=model.max_position_embeddings,
        sliding_window=model.sliding_window,
        kv_values_per_token=2 * model.num_layers * model.num_kv_heads * model.head_dim,
        dtype=model.dtype,
        eos_token_ids=eos_token_ids,
    )


@contextmanager
def _said_if_slow(message: str) -> Iterator[None]:
    """Write a line to standard error if the block takes long enough to wonder."""
    timer = threading.Timer(QUIET_S, lambda: sys.stderr.write(message + "\n"))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@attrs.define
class _LoadProgress:
    """Says on standard error how far loading is, if it takes long enough to wonder."""

    name: str
    _said_s: float = attrs.field(factory=time.perf_counter)

    def __call__(self, done: int, total: int) -> None:
        now_s = time.perf_counter()
        if now_s - self._said_s > QUIET_S:
            self._said_s = now_s
            sys.stderr.write(f"loading {self.name}: layer {done} of {total}\n")
