"""`operator`: a torch operator that calls on a GPU do not go through.

What is recorded, audited or traced has to be an operator of torch's. But torch takes 100 us to call
one that is written in Python (2.11, an Xeon beside an H200), and a prefill that is not captured
makes some 140 calls. So tensors on a GPU go to the kernel's function directly.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch


class Operator:
    """See `operator`."""

    def __init__(
        self, reference: Callable[..., Any], kernels: str, mutates_args: tuple[str, ...]
    ) -> None:
        functools.update_wrapper(self, reference)
        self._name = reference.__name__
        self.torch_operator = torch.library.custom_op(
            f"nanovllm::{self._name}", reference, mutates_args=mutates_args, device_types="cpu"
        )
        self.register_fake = self.torch_operator.register_fake
        self._kernels = kernels
        self.torch_operator.register_kernel("cuda")(self._call_kernel)

    def __call__(self, first: torch.Tensor, *others: Any) -> Any:
        """Compute."""
        if first.is_cuda:
            return self._kernel(first, *others)
        return self.torch_operator(first, *others)

    def _call_kernel(self, *args: Any) -> Any:
        return self._kernel(*args)

    @functools.cached_property
    def _kernel(self) -> Callable[..., Any]:
        # Delayed: only calls on a GPU need Triton.
        module = importlib.import_module(f"nanovllm.kernels.triton.{self._kernels}")
        kernel: Callable[..., Any] = getattr(module, self._name)
        return kernel


def operator(
    kernels: str, *, mutates_args: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Operator]:
    """Make an operator of the reference implementation that is decorated.

    Args:
        kernels: The module of `nanovllm.kernels.triton` that has a function of the same name.
        mutates_args: Arguments that are updated in place.
    """
    return lambda reference: Operator(reference, kernels, mutates_args)
