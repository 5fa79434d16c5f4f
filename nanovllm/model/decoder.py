"""The decoder: token ids to hidden states to logits. One forward pass for every family."""

import attrs
import torch

from nanovllm.model.attention import AttentionMetadata, attend
from nanovllm.model.config import ModelConfig
from nanovllm.model.linear import Linear
from nanovllm.model.rope import cos_sin, rotate


@attrs.frozen(eq=False)
class Layer:
    """Weights of one decoder layer.

    Attributes:
        input_norm: `[E]`, before attention.
        qkv: `E -> (H + 2 K) D`: queries, keys and values in one product.
        query_norm: `[D]`, or None in families without q/k norm.
        key_norm: `[D]`, or None.
        output: `H D -> E`.
        post_norm: `[E]`, before the feed-forward part.
        gate_up: `E -> 2 I`: gate and up projection in one product.
        down: `I -> E`.
    """

    input_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@attrs.frozen(eq=False)
class Decoder:
    """A model ready to run.

    Attributes:
        config: Its shape.
        embedding: `[V, E]`.
        layers: `L` of them.
        final_norm: `[E]`.
        lm_head: `E -> V`.
        frequencies: `[D / 2]` float32, see `inverse_frequencies`.
    """

    config: ModelConfig
    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    final_norm: torch.Tensor
    lm_head: Linear
    frequencies: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor that it consists of; a tied embedding stands there twice."""
        linears: list[Linear] = [self.lm_head]
        others: list[torch.Tensor | None] = [self.embedding, self.final_norm, self.frequencies]
        for layer in self.layers:
            linears += [layer.qkv, layer.output, layer.gate_up, layer.down]
            others += [layer.input_norm, layer.query_norm, layer.key_norm, layer.post_norm]
        parts = [tensor for linear in linears for tensor in (linear.weight, linear.bias)]
        return [tensor for tensor in (*others, *parts) if tensor is not None]

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Compute hidden states, writing keys and values into the cache.

        Args:
            input_ids: `[T]` int64.
            positions: `[T]` int64.
            kv_cache: `[L, 2, num_slots, K, D]`, keys then values, written in place.
            metadata: What each position attends to.

        Returns:
            `[T, E]`, before the final norm.
        """
        config = self.config
        cos, sin = cos_sin(positions, self.frequencies, config.rope.attention_factor)
        hidden = torch.nn.functional.embedding(input_ids, self.embedding)
        for layer, cache in zip(self.layers, kv_cache, strict=True):
            normed = rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
            query, key, value = self._project(layer, normed, cos, sin)
            attended = attend(query, key, value, cache[0], cache[1], metadata)
            hidden = hidden + layer.output(attended.flatten(1))
            normed = rms_norm(hidden, layer.post_norm, config.rms_norm_eps)
            gate, up = layer.gate_up(normed).chunk(2, dim=-1)
            hidden = hidden + layer.down(torch.nn.functional.silu(gate) * up)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the given rows only: `[R, E] -> [R, V]`."""
        return self.lm_head(rms_norm(hidden, self.final_norm, self.config.rms_norm_eps))

    def _project(
        self, layer: Layer, normed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries `[T, H, D]`, keys and values `[T, K, D]`, turned by their positions."""
        config = self.config
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        heads = layer.qkv(normed).view(len(normed), -1, config.head_dim)
        query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query = rms_norm(query, layer.query_norm, config.rms_norm_eps)
            key = rms_norm(key, layer.key_norm, config.rms_norm_eps)
        return rotate(query, cos, sin), rotate(key, cos, sin), value


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide by the root mean square over the last dimension, in float32; `x` stays as it is."""
    wide = x.float()  # in float32 this is `x` itself, so nothing below may work in place
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)
