"""Values that make the use of memory that holds nothing show. Needs torch."""

import torch


def spoil(tensor: torch.Tensor) -> None:
    """Overwrite with NaN, or integers that are no valid index."""
    tensor.fill_(_poison_of(tensor.dtype))


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """All memory behind a tensor, as a vector of its dtype."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    flat.set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))
    return flat


def _poison_of(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype is torch.bool:
        return True
    limits = torch.iinfo(dtype)
    return limits.max if limits.min == 0 else limits.min
