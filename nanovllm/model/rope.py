"""Rotary position embedding: its published variants as one frequency per pair of channels."""

import math
from collections.abc import Mapping
from typing import Any

import attrs
import torch

from nanovllm.errors import WeightsError

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "factors")
"""What `rope_type` may be. "factors" divides each frequency by a tensor that the file carries."""


@attrs.frozen
class RopeConfig:
    """How positions turn into angles.

    Attributes:
        rope_type: One of `ROPE_TYPES`.
        theta: Base of the frequencies.
        head_dim: Channels of a head; two share a frequency.
        factor: How many times longer the context was made.
        original_max_positions: Positions before it was made longer.
        low_freq_factor: llama3: wavelengths above original / this are stretched by `factor`.
        high_freq_factor: llama3: wavelengths below original / this stay as they are.
        beta_fast: yarn: pairs that turn more often than this over the original context stay.
        beta_slow: yarn: pairs that turn less often than this are stretched by `factor`.
        truncate: yarn: round the borders of the ramp to whole pairs.
        attention_factor: Multiplies cosine and sine, and so the logits of attention twice.
    """

    rope_type: str
    theta: float
    head_dim: int
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


def read_rope_config(
    config: Mapping[str, Any], *, head_dim: int, max_position_embeddings: int, source: str
) -> RopeConfig:
    """Read `rope_parameters`, or the older `rope_scaling` and `rope_theta`.

    Raises:
        WeightsError: A variant that is not supported, or one of its numbers is missing.
    """
    given: dict[str, Any] = dict(config.get("rope_scaling") or {})
    given.update(config.get("rope_parameters") or {})
    rope_type = given.get("rope_type") or given.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        known = ", ".join(ROPE_TYPES[:-1])
        raise WeightsError(f"{source}: rope type {rope_type!r} is not supported; {known} are.")
    partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise WeightsError(f"{source}: partial rotary embedding ({partial}) is not supported.")
    theta = given.get("rope_theta") or config.get("rope_theta") or 10000.0

    def number(name: str, default: float | None = None) -> float:
        value = given.get(name)
        value = default if value is None else value
        if value is None:
            raise WeightsError(f"{source}: rope type {rope_type!r} needs `{name}`.")
        return float(value)

    base = RopeConfig(rope_type=rope_type, theta=float(theta), head_dim=head_dim)
    if rope_type in ("default", "factors"):
        return base
    if rope_type == "linear":
        return attrs.evolve(base, factor=number("factor"))
    original = int(number("original_max_position_embeddings", max_position_embeddings))
    if rope_type == "llama3":
        return attrs.evolve(
            base,
            factor=number("factor"),
            original_max_positions=original,
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
        )
    factor = number("factor", max_position_embeddings / original)
    return attrs.evolve(
        base,
        factor=factor,
        original_max_positions=original,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        truncate=bool(given.get("truncate", True)),
        attention_factor=_yarn_attention_factor(given, factor),
    )


def inverse_frequencies(rope: RopeConfig, factors: torch.Tensor | None = None) -> torch.Tensor:
    """Angle that each pair of channels turns per position, `[D / 2]` float32.

    `factors` is the tensor that "factors" divides by, `[D / 2]`.
    """
    exponents = torch.arange(0, rope.head_dim, 2, dtype=torch.int64).float() / rope.head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(rope, plain)
    if rope.rope_type == "yarn":
        return _yarn(rope, plain)
    if rope.rope_type == "factors":
        if factors is None:
            raise WeightsError("Rope type 'factors' needs the tensor `rope_freqs.weight`.")
        return plain / factors.float()
    return plain


def cos_sin(
    positions: torch.Tensor, frequencies: torch.Tensor, attention_factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine at each position: two of `[T, 1, D / 2]` float32, to broadcast over heads."""
    angles = positions.float()[:, None, None] * frequencies
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn channel i and channel i + D / 2 of `x` `[T, heads, D]` by their angle."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Stretch slow pairs, keep fast ones, blend in between. Source: Llama 3.1's reference code."""
    turns = rope.original_max_positions * plain / (2 * math.pi)  # over the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """NTK-by-parts interpolation. Source: Peng et al. 2023, arXiv 2309.00071, section 3.2."""

    def pair_that_turns(num_turns: float) -> float:
        """Index, not rounded, of the pair that turns so often over the original context."""
        wavelength = rope.original_max_positions / (num_turns * 2 * math.pi)
        return rope.head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.head_dim - 1)
    width = high - low if high != low else 0.001  # a ramp of no width would divide by zero
    pairs = torch.arange(rope.head_dim // 2, dtype=torch.float32)
    stretched = ((pairs - low) / width).clamp(0.0, 1.0)
    return stretched * plain / rope.factor + (1 - stretched) * plain


def _yarn_attention_factor(given: Mapping[str, Any], factor: float) -> float:
    """Temperature of attention: 0.1 ln(factor) + 1 (equation 22 there), unless given."""

    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    mscale, mscale_all_dim = given.get("mscale"), given.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)
