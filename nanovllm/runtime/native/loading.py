"""Loading a decoder straight into panels: each weight is in memory once, as the step reads it."""

from collections.abc import Callable

import torch

from nanovllm.model.checkpoint import Checkpoint
from nanovllm.model.config import ModelConfig
from nanovllm.model.decoder import Decoder
from nanovllm.model.linear import Linear
from nanovllm.model.weights import load_decoder
from nanovllm.runtime.native.arena import Arena
from nanovllm.runtime.native.panels import PanelLinear

INT8_GROUPS = (64, 32)
"""Values that share a scale in int8, the first that fits: 4 bytes for each are 6 % more to read."""


def load_in_panels(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    int8: bool = False,
    arena: Arena | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Decoder:
    """Load every weight for `NativeProgram`; see `load_decoder`.

    Args:
        checkpoint: Where the tensors are.
        config: The model's shape.
        dtype: Type of the weights, float32 or bfloat16; with `int8`, of biases and norms.
        int8: Round the matrices to int8.
        arena: Where the matrices' memory comes from.
        progress: See `load_decoder`.

    Returns:
        A decoder whose matrices, the embedding too, are panels: it does not run in torch.
    """
    group = int8_group(config) if int8 else 0
    arena = arena or Arena()

    def make_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> PanelLinear:
        return PanelLinear(weight, bias, int8_group=group, arena=arena)

    def make_embedding(embedding: torch.Tensor, tied: Linear | None) -> torch.Tensor:
        return (make_linear(embedding, None) if tied is None else tied).weight

    return load_decoder(
        checkpoint,
        config,
        dtype=dtype,
        device=torch.device("cpu"),
        make_linear=make_linear,
        make_embedding=make_embedding,
        progress=progress,
    )


def int8_group(config: ModelConfig) -> int:
    """Values that share a scale; a head is a whole number of groups."""
    lengths = (config.hidden_size, config.intermediate_size, config.head_dim)
    return next(group for group in INT8_GROUPS if all(length % group == 0 for length in lengths))
