"""Decoders of any shape without a checkpoint: random weights, or none at all on the meta device."""

import math
import zlib
from collections.abc import Mapping
from typing import Any

import attrs
import torch

from nanovllm.model.config import ModelConfig
from nanovllm.model.decoder import Decoder
from nanovllm.model.linear import PlainLinear
from nanovllm.model.weights import ROPE_FACTORS, expected_shapes, load_decoder

_CPU = torch.device("cpu")

SMALL_NUM_LAYERS = 2
SMALL_WIDTH = 256
SMALL_VOCAB_SIZE = 512


@attrs.frozen
class RandomCheckpoint:
    """A `Checkpoint` whose tensors are drawn when they are asked for, the same ones every time.

    Attributes:
        model: Whose shapes they have.
        device: "meta" gives tensors without values or memory.
    """

    model: ModelConfig
    device: torch.device = _CPU

    @property
    def source(self) -> str:
        """For messages."""
        return f"random weights of a {self.model.architecture}"

    @property
    def config(self) -> Mapping[str, Any]:
        """Empty: `model` is what there is."""
        return {}

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """Empty."""
        return {}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Those that the model needs."""
        return expected_shapes(self.model)

    def tensor(self, name: str) -> torch.Tensor:
        """Draw one: scaled so that activations keep their size, norms about 1."""
        shape = self.shapes()[name]
        if self.device.type != "cpu":
            return torch.empty(shape, device=self.device)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        drawn = torch.randn(shape, generator=generator)
        if name == ROPE_FACTORS:
            return 1 + drawn.abs()  # frequencies are divided by it
        if len(shape) == 1:
            return 0.2 * drawn + (1 if name.endswith("norm.weight") else 0)
        return drawn / math.sqrt(shape[1])


def small_config(model: ModelConfig) -> ModelConfig:
    """The same family with the same heads, norms, biases and rope, and little to multiply.

    What a step does depends on those and not on widths, so a narrow model of two layers shows as
    much as the whole one.
    """
    return attrs.evolve(
        model,
        num_layers=min(model.num_layers, SMALL_NUM_LAYERS),
        hidden_size=min(model.hidden_size, SMALL_WIDTH),
        intermediate_size=min(model.intermediate_size, SMALL_WIDTH),
        vocab_size=min(model.vocab_size, SMALL_VOCAB_SIZE),
    )


def random_decoder(
    model: ModelConfig,
    *,
    device: torch.device = _CPU,
    dtype: torch.dtype = torch.float32,
) -> Decoder:
    """A decoder of this shape with `RandomCheckpoint`'s weights."""
    checkpoint = RandomCheckpoint(model, device)
    return load_decoder(checkpoint, model, dtype=dtype, device=device, make_linear=PlainLinear)
