"""The composition root: from a model's name and options to an engine that runs."""

import sys
import time
from collections.abc import Callable
from os import PathLike

import attrs
import psutil
import torch

from nanovllm.config import (
    DeviceFacts,
    EngineConfig,
    ModelFacts,
    ResolvedConfig,
    resolve,
    resolve_dtype,
)
from nanovllm.engine import Engine, StepRecord
from nanovllm.errors import ConfigError
from nanovllm.hub import FilesKind, ModelFiles, find_model
from nanovllm.model.checkpoint import Checkpoint
from nanovllm.model.config import ModelConfig, read_model_config, read_token_ids
from nanovllm.model.gguf_checkpoint import GgufCheckpoint
from nanovllm.model.safetensors_checkpoint import open_folder
from nanovllm.model.weights import DTYPES, load_decoder
from nanovllm.prompts import PromptReader
from nanovllm.runtime.executor import TorchExecutor
from nanovllm.runtime.kv_cache import allocate_kv_cache
from nanovllm.text.tokenizer import Tokenizer, load_tokenizer

QUIET_LOAD_S = 1.0
"""Loading says what it is doing only when it takes longer than this."""


def build_engine(
    model: str | PathLike[str],
    config: EngineConfig,
    *,
    on_step: Callable[[StepRecord], None] | None = None,
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
    resolve(config, model_facts, read_device_facts(device))  # to refuse before loading
    dtype = DTYPES[resolve_dtype(config, model_facts, read_device_facts(device))]
    decoder = load_decoder(
        checkpoint, model_config, dtype=dtype, device=device, progress=_LoadProgress(files.name)
    )
    # Now that the weights are there, what is left is the K/V cache's.
    resolved: ResolvedConfig = resolve(config, model_facts, read_device_facts(device))
    kv_cache = allocate_kv_cache(
        model_config,
        num_blocks=resolved.num_kvcache_blocks,
        block_size=resolved.kvcache_block_size,
        dtype=dtype,
        device=device,
    )
    executor = TorchExecutor(
        decoder, kv_cache, block_size=resolved.kvcache_block_size, device=device
    )
    reader = PromptReader(tokenizer, model_config.vocab_size, resolved.max_model_len)
    return Engine(resolved, executor, tokenizer, on_step), reader


def find_device(name: str) -> torch.device:
    """The device of that name, which must be there.

    Raises:
        ConfigError: It is not, or the name means nothing.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"`device` is {name!r} but must be 'auto', 'cpu', 'cuda' or 'cuda:N'."
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"`device` is {name!r}; 'cpu' and 'cuda' are supported.")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = device.index or 0
        if index >= count:
            raise ConfigError(
                f"`device` is {name!r} but torch {torch.__version__} sees {count} CUDA devices; "
                "use 'cpu', or install a CUDA build of torch and check the driver."
            )
        device = torch.device("cuda", index)
    return device


def read_device_facts(device: torch.device) -> DeviceFacts:
    """Measure a device."""
    if device.type == "cpu":
        memory = psutil.virtual_memory()
        fast = {"float32"}
        if torch.ops.mkldnn._is_mkldnn_bf16_supported():
            fast.add("bfloat16")
        return DeviceFacts("cpu", memory.total, memory.available, frozenset(fast))
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    fast = {"float16", "float32"}
    if torch.cuda.get_device_capability(device) >= (8, 0):  # bfloat16 arrived with Ampere
        fast.add("bfloat16")
    return DeviceFacts(str(device), total_bytes, free_bytes, frozenset(fast))


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


@attrs.define
class _LoadProgress:
    """Says on standard error how far loading is, if it takes long enough to wonder."""

    name: str
    _said_s: float = attrs.field(factory=time.perf_counter)

    def __call__(self, done: int, total: int) -> None:
        now_s = time.perf_counter()
        if now_s - self._said_s > QUIET_LOAD_S:
            self._said_s = now_s
            sys.stderr.write(f"loading {self.name}: layer {done} of {total}\n")
