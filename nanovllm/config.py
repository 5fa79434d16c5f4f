"""What was asked, what is there, and what will run, as values.

EngineConfig  +  ModelFacts  +  DeviceFacts  --nanovllm.resolve-->  ResolvedConfig
"""

import inspect
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any, TypeVar

import attrs

from nanovllm.backends import BACKENDS
from nanovllm.core.state import SchedulerLimits
from nanovllm.errors import ConfigError

DTYPE_NAMES = ("float32", "bfloat16", "float16", "int8")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


_COUNT_OR_NONE = (lambda v: v is None or _is_count(v), "an integer >= 1, or None")
_FLAG = (lambda v: isinstance(v, bool), "True or False")
_TEXT = (lambda v: isinstance(v, str) and v != "", "a name")

_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "tokenizer": (
        lambda v: v is None or isinstance(v, str | PathLike),
        "a folder, a hub id, or None",
    ),
    "device": _TEXT,
    "dtype": (lambda v: v == "auto" or v in DTYPE_NAMES, f"'auto' or one of {DTYPE_NAMES}"),
    "max_model_len": _COUNT_OR_NONE,
    "max_num_seqs": _COUNT_OR_NONE,
    "max_num_batched_tokens": _COUNT_OR_NONE,
    "max_prefill_chunk": _COUNT_OR_NONE,
    "kvcache_block_size": _COUNT_OR_NONE,
    "num_kvcache_blocks": _COUNT_OR_NONE,
    "kv_cache_bytes": _COUNT_OR_NONE,
    "gpu_memory_utilization": (_is_share, "a share of the GPU's memory, over 0 and at most 1"),
    "enforce_eager": _FLAG,
    "graph_batch_sizes": (
        lambda v: v is None or (isinstance(v, tuple) and bool(v) and all(map(_is_count, v))),
        "batch sizes >= 1, or None",
    ),
    "graph_prompt_sizes": (
        lambda v: v is None or (isinstance(v, tuple) and all(map(_is_count, v))),
        "numbers of positions >= 1, or None",
    ),
    "enable_prefix_caching": _FLAG,
    "attention_backend": (lambda v: v in ("auto", *BACKENDS), f"'auto' or one of {BACKENDS}"),
    "tensor_parallel_size": (lambda v: _is_count(v) and v == 1, "1: one device per engine"),
    "seed": (lambda v: isinstance(v, int) and not isinstance(v, bool), "an integer"),
    "skip_tokenizer_init": _FLAG,
    "max_queued_requests": _COUNT_OR_NONE,
    "freeze_gc": _FLAG,
}
"""What must hold of each option, and the same in words."""


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@attrs.frozen(kw_only=True)
class EngineConfig:
    """What the user asked for. Immutable; each option is checked by itself on construction.

    Attributes:
        tokenizer: Another place to take the tokenizer from.
        device: "auto", "cpu", "cuda" or "cuda:1".
        dtype: Type of weights and K/V. "auto": the checkpoint's, where the device is good at it.
            "int8" rounds the weights of any checkpoint, and keeps K/V in bfloat16.
        max_model_len: Most tokens of one request, prompt and completion together.
        max_num_seqs: Most requests that hold K/V at a time.
        max_num_batched_tokens: Most positions that one step computes.
        max_prefill_chunk: Most prompt positions in a step that also decodes: the bound on how
            long a new prompt delays the tokens of the others.
        kvcache_block_size: Tokens a K/V block.
        num_kvcache_blocks: Blocks in the K/V cache. Default: what the memory allows.
        kv_cache_bytes: The same in bytes.
        gpu_memory_utilization: Share of the GPU's memory that the engine may use in all.
        enforce_eager: Capture no CUDA graphs.
        graph_batch_sizes: Decode batch sizes to capture CUDA graphs for; the largest batch that
            there can be is always among them. Default: `graphs.plan_buckets`.
        graph_prompt_sizes: Numbers of positions to capture CUDA graphs for of steps with prompts,
            which are padded to the next size; larger steps run eagerly. Empty: all do. Default: 9
            sizes up to 512.
        enable_prefix_caching: Reuse the K/V of prompts that start alike.
        attention_backend: "auto", or a name in `nanovllm.backends.TABLE`.
        tensor_parallel_size: 1.
        seed: Seed from which requests without one of their own get theirs.
        skip_tokenizer_init: Load no tokenizer: prompts are token ids, outputs have no text.
        max_queued_requests: Most requests that wait for their first step; what comes beyond is
            refused with `QueueFullError`. Default: any number.
        freeze_gc: Once the engine is made, take what lives by then out of the sight of Python's
            garbage collector (`gc.freeze`), so that collections in mid-answer stay short; closing
            the engine undoes it. Both hold for the whole process.
    """

    tokenizer: str | PathLike[str] | None = None
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_prefill_chunk: int | None = None
    kvcache_block_size: int | None = None
    num_kvcache_blocks: int | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    graph_batch_sizes: tuple[int, ...] | None = attrs.field(default=None, converter=_as_tuple)
    graph_prompt_sizes: tuple[int, ...] | None = attrs.field(default=None, converter=_as_tuple)
    enable_prefix_caching: bool = True
    attention_backend: str = "auto"
    tensor_parallel_size: int = 1
    seed: int = 0
    skip_tokenizer_init: bool = False
    max_queued_requests: int | None = None
    freeze_gc: bool = False

    def __attrs_post_init__(self) -> None:
        for name, (holds, allowed) in _RULES.items():
            value = getattr(self, name)
            if not holds(value):
                raise ConfigError(f"`{name}` is {value!r} but must be {allowed}.")
        if self.num_kvcache_blocks is not None and self.kv_cache_bytes is not None:
            raise ConfigError(
                f"`num_kvcache_blocks` is {self.num_kvcache_blocks} and `kv_cache_bytes` is "
                f"{self.kv_cache_bytes}; give one of them."
            )


Init = TypeVar("Init", bound=Callable[..., None])


def documents_options(init: Init) -> Init:
    """Add what `EngineConfig` says of each option to the docstring of what takes them."""
    if init.__doc__ and EngineConfig.__doc__:  # not so under `python -OO`
        _, _, options = inspect.cleandoc(EngineConfig.__doc__).partition("Attributes:\n")
        init.__doc__ = f"{inspect.cleandoc(init.__doc__)}\n\nOptions:\n{options}"
    return init


@attrs.frozen
class ModelFacts:
    """What the model says.

    Attributes:
        max_position_embeddings: Positions that it was trained for.
        sliding_window: Positions that a token attends to; None: all.
        kv_values_per_token: Numbers that the K/V of one position consist of.
        dtype: The checkpoint's type, None if it names none.
        eos_token_ids: Ids that end a text.
    """

    max_position_embeddings: int
    sliding_window: int | None
    kv_values_per_token: int
    dtype: str | None
    eos_token_ids: frozenset[int]


@attrs.frozen
class DeviceFacts:
    """What the device says, once the weights are on it.

    Attributes:
        device: "cpu" or "cuda:0".
        total_bytes: Memory of the device.
        free_bytes: What nobody uses of it.
        fast_dtypes: Types that the device multiplies at full speed.
        obstacles: Backends that this machine or the model rules out, and why.
        activation_bytes: What the biggest step takes beside weights and K/V, as measured.
    """

    device: str
    total_bytes: int
    free_bytes: int
    fast_dtypes: frozenset[str]
    obstacles: Mapping[str, str] = attrs.field(factory=dict)
    activation_bytes: int = 0

    @property
    def is_cpu(self) -> bool:
        """Whether it is the CPU."""
        return self.device == "cpu"


@attrs.frozen(kw_only=True)
class ResolvedConfig:
    """What runs: all that was left open is decided, and `notes` says in words what and why."""

    device: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_chunk: int | None
    kvcache_block_size: int
    num_kvcache_blocks: int
    kv_cache_bytes: int
    attention_backend: str
    graph_batch_sizes: tuple[int, ...]
    graph_prompt_sizes: tuple[int, ...]
    enable_prefix_caching: bool
    eos_token_ids: frozenset[int]
    seed: int
    max_queued_requests: int | None
    freeze_gc: bool
    notes: tuple[str, ...]

    @property
    def limits(self) -> SchedulerLimits:
        """What the scheduler is bound by."""
        return SchedulerLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            max_prefill_chunk=self.max_prefill_chunk,
            eos_token_ids=self.eos_token_ids,
        )
