"""Exponentials, sums and softmax in float32, written so that LLVM makes vector code of them."""

from typing import Any

import numpy as np
from numba import njit

from nanovllm.runtime.native.options import OPTIONS
from nanovllm.runtime.native.values import float_of_bits, narrow


@njit(**OPTIONS)
def exp(x: Any) -> Any:
    """`e ** x` in float32 for x <= 88, to 2 units in the last place; 0 below -87.

    Written out so that LLVM vectorises loops over it: 2 ** n by the exponent's bits, times a
    polynomial for the rest (Cephes' `expf`: Moshier 1992, netlib).
    """
    x = max(x, np.float32(-87.33))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    rest = x - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
    tail = np.float32(1.9875691500e-4)
    tail = tail * rest + np.float32(1.3981999507e-3)
    tail = tail * rest + np.float32(8.3334519073e-3)
    tail = tail * rest + np.float32(4.1665795894e-2)
    tail = tail * rest + np.float32(1.6666665459e-1)
    tail = tail * rest + np.float32(5.0000001201e-1)
    power = float_of_bits(np.uint32((np.int32(n) + np.int32(127)) << np.int32(23)))
    return (tail * rest * rest + rest + np.float32(1)) * power


@njit(**OPTIONS)
def peak_of(values: Any, count: int) -> Any:
    """Largest of `values[:count]`, count >= 1; in eight that do not wait for each other."""
    a = b = c = d = e = f = g = h = values[0]
    whole = count // 8 * 8
    for i in range(0, whole, 8):
        a = max(a, values[i])
        b = max(b, values[i + 1])
        c = max(c, values[i + 2])
        d = max(d, values[i + 3])
        e = max(e, values[i + 4])
        f = max(f, values[i + 5])
        g = max(g, values[i + 6])
        h = max(h, values[i + 7])
    for i in range(whole, count):
        a = max(a, values[i])
    return max(a, b, c, d, e, f, g, h)


@njit(**OPTIONS)
def weigh(scores: Any, count: int, num_weights: int, scale: Any, weights: Any) -> tuple[Any, Any]:
    """`weights[:count] = e ** ((scores - peak) * scale)`, then zeros up to `num_weights`.

    `scores` float32, overwritten; `weights` in the type that tiles take. Returns peak and sum.
    """
    peak = peak_of(scores, count)
    for i in range(count):
        scores[i] = exp((scores[i] - peak) * scale)
    for i in range(count):
        weights[i] = narrow(scores[i], weights)
    for i in range(count, num_weights):
        weights[i] = narrow(np.float32(0), weights)
    return peak, total(scores, count)


@njit(**OPTIONS)
def total(values: Any, count: int) -> Any:
    """Sum of `values[:count]`, in eight sums that do not wait for each other."""
    a = b = c = d = e = f = g = h = np.float32(0)
    whole = count // 8 * 8
    for i in range(0, whole, 8):
        a += values[i]
        b += values[i + 1]
        c += values[i + 2]
        d += values[i + 3]
        e += values[i + 4]
        f += values[i + 5]
        g += values[i + 6]
        h += values[i + 7]
    for i in range(whole, count):
        a += values[i]
    return ((a + b) + (c + d)) + ((e + f) + (g + h))


@njit(**OPTIONS)
def inverse_rms(values: Any, eps: Any) -> Any:
    """One over the root mean square; summed like `total`. The length is a multiple of 8."""
    a = b = c = d = e = f = g = h = np.float32(0)
    for i in range(0, values.shape[0], 8):
        a += values[i] * values[i]
        b += values[i + 1] * values[i + 1]
        c += values[i + 2] * values[i + 2]
        d += values[i + 3] * values[i + 3]
        e += values[i + 4] * values[i + 4]
        f += values[i + 5] * values[i + 5]
        g += values[i + 6] * values[i + 6]
        h += values[i + 7] * values[i + 7]
    squares = ((a + b) + (c + d)) + ((e + f) + (g + h))
    return np.float32(1) / np.sqrt(squares / np.float32(values.shape[0]) + eps)
