"""Paged attention in plain torch: the reference for every other backend, correct on any device.

Positions live in slots that may be scattered over the cache in any order. Per step the slots of
each sequence are looked up once; every layer then gathers its keys and values through them.
"""

import attrs
import torch


@attrs.frozen(eq=False)
class PrefillRow:
    """One sequence that computes several positions, after `start` that are cached.

    Attributes:
        first: Packed index of its first computed position.
        end: One past the packed index of its last.
        slots: `[context]` int64, slot of every position, computed ones included. None: nothing
            was cached before, so the keys and values of this step are all there are.
        mask: `[end - first, context]` bool, what each computed position may attend to.
            None with `slots` None: each attends to those before it.
    """

    first: int
    end: int
    slots: torch.Tensor | None
    mask: torch.Tensor | None


@attrs.frozen(eq=False)
class AttentionMetadata:
    """Which keys each position of a step attends to.

    Attributes:
        slot_mapping: `[T]` int64, slot that each position's key and value go to.
        num_decodes: The first positions are decodes of one position each, `S_d`.
        decode_slots: `[S_d, W]` int64, slots of each decode's context, padded to the widest with
            the slot of its own first position: finite values that the mask hides.
        decode_mask: `[S_d, 1, 1, W]` bool, which of them count.
        prefills: The other sequences.
    """

    slot_mapping: torch.Tensor
    num_decodes: int
    decode_slots: torch.Tensor
    decode_mask: torch.Tensor
    prefills: tuple[PrefillRow, ...]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
) -> torch.Tensor:
    """Store this step's keys and values, then attend over each sequence's own.

    Args:
        query: `[T, H, D]`.
        key: `[T, K, D]`.
        value: `[T, K, D]`.
        key_cache: `[num_slots, K, D]`, written in place.
        value_cache: `[num_slots, K, D]`, written in place.
        metadata: The step's.

    Returns:
        `[T, H, D]`.
    """
    key_cache[metadata.slot_mapping] = key
    value_cache[metadata.slot_mapping] = value
    outputs = []
    if metadata.num_decodes:
        outputs.append(_attend_decodes(query, key_cache, value_cache, metadata))
    for row in metadata.prefills:
        if row.slots is None:
            keys, values = key[row.first : row.end], value[row.first : row.end]
        else:
            keys, values = key_cache[row.slots], value_cache[row.slots]
        attended = torch.nn.functional.scaled_dot_product_attention(
            query[None, row.first : row.end].transpose(1, 2),
            keys[None].transpose(1, 2),
            values[None].transpose(1, 2),
            attn_mask=row.mask,
            is_causal=row.mask is None,
            enable_gqa=True,
        )
        outputs.append(attended.transpose(1, 2)[0])
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def _attend_decodes(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
) -> torch.Tensor:
    """Attend for all decodes at once, over keys padded to the widest: `[S_d, H, D]`."""
    num_decodes, slots = metadata.num_decodes, metadata.decode_slots
    num_kv_heads, head_dim = key_cache.shape[-2:]
    grouped = query[:num_decodes].view(num_decodes, num_kv_heads, -1, head_dim)
    keys = key_cache[slots].permute(0, 2, 3, 1)  # [S_d, K, D, W]
    values = value_cache[slots].transpose(1, 2)  # [S_d, K, W, D]
    scores = torch.matmul(grouped, keys).float() * head_dim**-0.5
    weights = scores.masked_fill(~metadata.decode_mask, float("-inf")).softmax(dim=-1)
    return torch.matmul(weights.to(values.dtype), values).view(num_decodes, -1, head_dim)
