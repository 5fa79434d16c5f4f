"""Kernels that begin while the one before them ends: programmatic dependent launch, from sm_90 on.

A kernel that is launched so may be resident before its predecessor has ended. Two rules keep that
right, and `tests/kernels/test_overlap.py` reads them off the machine code of every kernel:

- Before `wait_for_previous` a program reads nothing but weights, and writes nothing.
- Every program that reads or writes waits. So a kernel ends after its predecessor has, and what is
  written is there for all kernels after it, not only for the next one.

What is gained is a launch that costs nothing, and weights that are on their way while the kernel
before still computes. Where the device can't (`OVERLAPS` False), a launch waits as always.
"""

import functools

import torch
import triton
import triton.language as tl
from triton import knobs

HOPPER = 90
"""The first architecture with it."""


@triton.jit
def let_next_begin(OVERLAPS: tl.constexpr):
    """The next kernel may become resident as soon as all programs of this one are."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr):
    """Go on when all kernels before have ended, and what they wrote can be read."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def begin(OVERLAPS: tl.constexpr):
    """Both: of a kernel that needs the results of others first of all."""
    let_next_begin(OVERLAPS)
    wait_for_previous(OVERLAPS)


def current_arch() -> int:
    """The architecture of the current device, 90 for compute capability 9.0; 0: no device."""
    if knobs.runtime.interpret:
        return 0
    return _arch_of(torch.cuda.current_device())


@functools.cache
def _arch_of(device: int) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
