"""Which backends compute a step, and when each one can be used: the one table of it. Pure."""

from collections.abc import Mapping

import attrs

from nanovllm.errors import ConfigError


@attrs.frozen
class Backend:
    """One way to compute a step.

    Attributes:
        name: As in `attention_backend`.
        does: What it is, for a reader.
        device_type: "cpu" or "cuda", or None: any.
        dtypes: Types that it computes in.
        block_size: Tokens a K/V block where nothing else is asked for.
        block_size_multiple: Block sizes must be a multiple of this.
        uses_graphs: Its decode steps can be captured.
        captures_prompts: So can its steps with prompts, which have rows of any length.
    """

    name: str
    does: str
    device_type: str | None
    dtypes: frozenset[str]
    block_size: int
    block_size_multiple: int = 1
    uses_graphs: bool = False
    captures_prompts: bool = False


_HALF = frozenset({"bfloat16", "float16"})
_ALL = _HALF | {"float32"}

TABLE = (
    Backend(
        "native",
        "whole steps, compiled for this CPU",
        "cpu",
        frozenset({"float32", "bfloat16", "int8"}),
        16,
    ),
    # A block of 64 is what the decode kernel reads at once, and fine enough for prefix hits.
    Backend(
        "triton",
        "this package's Triton kernels",
        "cuda",
        _ALL,
        64,
        uses_graphs=True,
        captures_prompts=True,
    ),
    # The page size that the library accepts; see its `flash_attn_with_kvcache`.
    Backend("flash_attn", "the flash-attn package", "cuda", _HALF, 256, 256, uses_graphs=True),
    # The same kernels as they come with torch, from 2.12 on.
    Backend("varlen", "torch's varlen_attn", "cuda", _HALF, 256, 256, uses_graphs=True),
    Backend("torch", "plain torch, eagerly", None, _ALL, 16),
)
"""In the order in which they are tried."""

BACKENDS = tuple(backend.name for backend in TABLE)


def find_backend(name: str) -> Backend:
    """The one of that name, which must be in the table."""
    return next(backend for backend in TABLE if backend.name == name)


@attrs.frozen
class Choice:
    """A backend, and why it is this one, in a sentence."""

    backend: Backend
    why: str


def choose_backend(
    asked: str,
    *,
    device_type: str,
    dtype: str,
    block_size: int | None,
    obstacles: Mapping[str, str],
) -> Choice:
    """Choose a backend.

    Args:
        asked: A name, or "auto": the first one in the table that can be used.
        device_type: "cpu" or "cuda".
        dtype: The type of weights and K/V.
        block_size: Tokens a block, if that was asked for.
        obstacles: Backends that this machine or model rules out, and why.

    Raises:
        ConfigError: What was asked for can't be used.
    """
    why_not: dict[str, str] = {}
    usable: list[Backend] = []
    for backend in TABLE:
        refusal = _refusal(backend, device_type, dtype, block_size) or obstacles.get(backend.name)
        if refusal is None:
            usable.append(backend)
        else:
            why_not[backend.name] = refusal
    if not usable:  # torch computes in every type but int8
        able = next(backend.name for backend in TABLE if dtype in backend.dtypes)
        raise ConfigError(
            f"`dtype` is {dtype!r}, which only the {able} backend computes in, but "
            f"{why_not[able]}; use 'auto'."
        )
    if asked in why_not:
        raise ConfigError(
            f"`attention_backend` is {asked!r} but {why_not[asked]}; use "
            f"{', '.join(repr(name) for name in ('auto', *(b.name for b in usable)))}."
        )
    if asked != "auto":
        return Choice(find_backend(asked), "as asked")
    chosen = usable[0]
    passed_over = [
        f"the {backend.name} one can't be used, {why_not[backend.name]}"
        for backend in TABLE[: TABLE.index(chosen)]
        if backend.device_type == device_type
    ]
    return Choice(chosen, "; ".join(passed_over) or f"the fastest on this device, {chosen.does}")


def _refusal(backend: Backend, device_type: str, dtype: str, block_size: int | None) -> str | None:
    if backend.device_type not in (None, device_type):
        return "it is for CPUs" if backend.device_type == "cpu" else "it is for NVIDIA GPUs"
    if dtype not in backend.dtypes:
        *others, last = sorted(backend.dtypes)
        return f"it computes in {', '.join(others)} and {last}, not in {dtype}"
    if block_size is not None and block_size % backend.block_size_multiple:
        return (
            f"it needs a `kvcache_block_size` that is a multiple of "
            f"{backend.block_size_multiple}, not {block_size}"
        )
    return None
