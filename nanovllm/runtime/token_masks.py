"""Bitmasks of tokens, as grammars give them, applied to logits."""

import math

import numpy as np
import numpy.typing as npt
import torch

_BYTES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")

_LIMITS = np.where(_BYTES == 1, np.float32(np.inf), np.float32(-np.inf))
"""`[256, 8]`: for each byte of a mask, what the logits of its eight tokens are at most."""

_CHUNK_BYTES = 1024
"""Bytes of a mask that are looked at in one go: their limits stay in a core's own cache."""


def keep_allowed(logits: torch.Tensor, allowed: npt.NDArray[np.int32]) -> None:
    """Make all tokens impossible that are not in a bitmask.

    A row that is broken, as it holds NaN or +inf or nothing but -inf, stays as it is and thus
    recognisable.

    Args:
        logits: `[V]` float32, changed in place.
        allowed: `[W]` int32: bit `i` of word `j` stands for the token `32 * j + i`. Tokens past its
            end are not allowed, and bits past `V` mean nothing.

    Raises:
        ValueError: Nothing that the model finds possible is allowed.
    """
    # As bytes with the lowest tokens first, also on machines that keep the high byte first.
    mask = allowed.astype("<i4", copy=False).view(np.uint8)
    if logits.device.type == "cpu":
        # The same steps as below, in numpy, which takes them sooner than torch and in one thread.
        row = logits.numpy()
        if math.isfinite(row.max()):
            row[8 * len(mask) :] = -np.inf
            for first in range(0, len(mask), _CHUNK_BYTES):
                limits = _limits(mask[first : first + _CHUNK_BYTES])
                part = row[8 * first : 8 * first + len(limits)]
                np.minimum(part, limits[: len(part)], out=part)
            _check(float(row.max()))
    elif math.isfinite(logits.max()):
        logits[8 * len(mask) :] = -math.inf
        masked = logits[: 8 * len(mask)]
        limits_there = torch.from_numpy(_limits(mask)[: len(masked)]).to(logits.device)
        masked.copy_(torch.minimum(masked, limits_there))
        _check(float(logits.max()))


def _limits(mask: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """What the logits of a mask's tokens are at most: +inf where one is allowed, else -inf."""
    # `take` is twenty times as fast as an index here.
    limits: npt.NDArray[np.float32] = _LIMITS.take(mask, axis=0).reshape(-1)
    return limits


def _check(peak: float) -> None:
    if peak == -math.inf:
        raise ValueError("the structure asked for allows no token that the model has here")
