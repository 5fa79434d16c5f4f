"""The decoder as a sequence of fused operators: what captured steps and GPU prefills run.

The same model as `model.decoder`, with everything between the matrix products in the operators of
`nanovllm.kernels`: per layer one for q/k norm, rope and the K/V store, attention, two for norms
with the residual sum, one for the activation. Of few rows even the products are operators, and
have the rest in them.
"""

from collections.abc import Callable

import attrs
import torch

from nanovllm.kernels import ops
from nanovllm.kernels.geometry import num_few_rows
from nanovllm.kernels.rope_table import rope_table
from nanovllm.model.decoder import Decoder, Layer

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From queries `[T, H, D]` and a layer's caches `[num_slots, K, D]` to `[T, H, D]`."""

Attention = Callable[[Layer, torch.Tensor, torch.Tensor], torch.Tensor]
"""From a layer, its caches and the product `[T, (H + 2 K) D]` to `[T, H D]`."""


@attrs.frozen(eq=False)
class FusedDecoder:
    """A decoder with its K/V cache.

    Attributes:
        decoder: The weights.
        kv_cache: `[L, 2, num_slots, K, D]`, keys then values.
        cos_sin: `[num_positions, D]` float32, see `rope_table`.
    """

    decoder: Decoder
    kv_cache: torch.Tensor
    cos_sin: torch.Tensor

    @classmethod
    def create(
        cls, decoder: Decoder, kv_cache: torch.Tensor, *, max_model_len: int
    ) -> "FusedDecoder":
        """Make the table of cosines that every step reads."""
        factor = decoder.config.rope.attention_factor
        return cls(decoder, kv_cache, rope_table(decoder.frequencies, factor, max_model_len))

    def hidden(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """Compute normalised hidden states, writing keys and values into the cache.

        Args:
            input_ids: `[T]` int32 or int64, within the vocabulary.
            positions: `[T]` int32.
            slot_mapping: `[T]` int32, -1: keys and values of this position go nowhere.
            attend: Attention of this step.

        Returns:
            `[T, E]`, after the final norm.
        """
        decoder = self.decoder
        residual = torch.nn.functional.embedding(input_ids, decoder.embedding)
        most = num_few_rows(decoder.config.hidden_size, decoder.embedding.element_size())
        run = self._few_rows if len(residual) <= most else self._many_rows

        def attention(layer: Layer, cache: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
            query = ops.qkv_rope_store(
                qkv,
                positions,
                slot_mapping,
                self.cos_sin,
                layer.query_norm,
                layer.key_norm,
                decoder.config.rms_norm_eps,
                cache[0],
                cache[1],
            )
            return attend(query, cache[0], cache[1]).flatten(1)

        return run(residual, attention)

    def _few_rows(self, residual: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Four products a layer, each with the norm before it or the sum after it."""
        decoder, eps = self.decoder, self.decoder.config.rms_norm_eps
        for layer, cache in zip(decoder.layers, self.kv_cache, strict=True):
            weight, bias = layer.qkv.weight, layer.qkv.bias
            qkv = ops.norm_linear(residual, layer.input_norm, eps, weight, bias)
            attended = attention(layer, cache, qkv)
            ops.linear_add(attended, layer.output.weight, layer.output.bias, residual)
            weight, bias = layer.gate_up.weight, layer.gate_up.bias
            inner = ops.norm_gate_up(residual, layer.post_norm, eps, weight, bias)
            ops.linear_add(inner, layer.down.weight, layer.down.bias, residual)
        normed: torch.Tensor = ops.rms_norm(residual, decoder.final_norm, eps)
        return normed

    def _many_rows(self, residual: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Products as the library does them."""
        decoder, eps = self.decoder, self.decoder.config.rms_norm_eps
        # The norm before each layer's attention, and the one after the last layer.
        norms = [layer.input_norm for layer in decoder.layers] + [decoder.final_norm]
        normed: torch.Tensor = ops.rms_norm(residual, norms[0], eps)
        for layer, cache, next_norm in zip(decoder.layers, self.kv_cache, norms[1:], strict=True):
            attended = attention(layer, cache, layer.qkv(normed))
            normed = ops.add_rms_norm(layer.output(attended), residual, layer.post_norm, eps)
            inner = ops.silu_mul(layer.gate_up(normed))
            normed = ops.add_rms_norm(layer.down(inner), residual, next_norm, eps)
        return normed
