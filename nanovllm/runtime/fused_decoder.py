"""The decoder as a sequence of fused operators: what captured steps and GPU prefills run.

The same model as `model.decoder`, with everything between the matrix products in the operators of
`nanovllm.kernels`: per layer one for q/k norm, rope and the K/V store, attention, two for norms
with the residual sum, one for the activation.
"""

from collections.abc import Callable

import attrs
import torch

from nanovllm.kernels import ops
from nanovllm.kernels.rope_table import rope_table
from nanovllm.model.decoder import Decoder

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From queries `[T, H, D]` and a layer's caches `[num_slots, K, D]` to `[T, H, D]`."""


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
        decoder, eps = self.decoder, self.decoder.config.rms_norm_eps
        # The norm before each layer's attention, and the one after the last layer.
        norms = [layer.input_norm for layer in decoder.layers] + [decoder.final_norm]
        residual = torch.nn.functional.embedding(input_ids, decoder.embedding)
        normed: torch.Tensor = ops.rms_norm(residual, norms[0], eps)
        for layer, cache, next_norm in zip(decoder.layers, self.kv_cache, norms[1:], strict=True):
            query = ops.qkv_rope_store(
                layer.qkv(normed),
                positions,
                slot_mapping,
                self.cos_sin,
                layer.query_norm,
                layer.key_norm,
                eps,
                cache[0],
                cache[1],
            )
            attended = attend(query, cache[0], cache[1]).flatten(1)
            normed = ops.add_rms_norm(layer.output(attended), residual, layer.post_norm, eps)
            inner = ops.silu_mul(layer.gate_up(normed))
            normed = ops.add_rms_norm(layer.down(inner), residual, next_norm, eps)
        return normed
