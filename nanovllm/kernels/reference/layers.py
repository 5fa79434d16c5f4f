"""Normalisation, rotary embedding, K/V store and activation in plain torch."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide by the root mean square over the last dimension, in float32."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add `x` to the residual in place, then normalise the sum."""
    residual.add_(x)
    return rms_norm(residual, weight, eps)


def norm_linear(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Normalise, then multiply."""
    return torch.nn.functional.linear(rms_norm(x, norm, eps), weight, bias)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half times the second half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def qkv_rope_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> torch.Tensor:
    """Normalise and turn queries and keys, store keys and values, return the queries."""
    num_kv_heads, head_dim = key_cache.shape[1:]
    heads = qkv.unflatten(-1, (-1, head_dim))
    num_heads = heads.shape[1] - 2 * num_kv_heads
    query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_norm is not None:
        query = rms_norm(query, q_norm, eps)
    if k_norm is not None:
        key = rms_norm(key, k_norm, eps)
    cos, sin = cos_sin[positions.long()].unsqueeze(1).chunk(2, dim=-1)
    _store(key_cache, slot_mapping, _rotate(key, cos, sin))
    _store(value_cache, slot_mapping, value)
    return _rotate(query, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn channel i and channel i + D / 2 by their angle, in float32."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def _store(cache: torch.Tensor, slot_mapping: torch.Tensor, rows: torch.Tensor) -> None:
    """Write each row to its slot; those of slot -1 nowhere.

    A row without a slot repeats the write of one that has one: the same values to the same place
    are no conflict, whichever comes last. Where no row has a slot, slot 0 keeps what it holds.
    """
    index = torch.arange(len(slot_mapping), device=slot_mapping.device)
    source = torch.where(slot_mapping >= 0, index, slot_mapping.argmax())
    slots = slot_mapping[source].long()  # -1 only where no row has a slot
    target = slots.clamp(min=0)
    is_live = (slots >= 0)[:, None, None]
    cache.index_put_((target,), torch.where(is_live, rows[source], cache[target]))
