"""`Launch`: one kernel, its grid and its arguments, as a value to be run or compiled ahead."""

from collections.abc import Mapping
from typing import Any

import attrs

from nanovllm.kernels.triton.overlap import HOPPER, current_arch


class Kernel:
    """A Triton function with every variant of it that was launched.

    The variants are held so that no module is unloaded while a captured graph has kernels of it.

    Attributes:
        function: The function, as `triton.jit` made it.
        fuses: Products and sums may become one instruction that rounds once. Not where the result
            should round as torch's separate operations do, or come out alike in two kernels.
    """

    def __init__(self, function: Any, *, fuses: bool = False) -> None:
        self.function = function
        self.fuses = fuses
        self._variants: dict[int, Any] = {}

    @property
    def name(self) -> str:
        """The name that profilers show."""
        return str(self.function.__name__)

    @property
    def num_variants(self) -> int:
        """How many were launched so far. It must not rise while a step is captured."""
        return len(self._variants)

    def options(self, arguments: Mapping[str, Any], arch: int) -> dict[str, Any]:
        """The arguments of a launch with the options that all launches have on an architecture."""
        given = {**arguments, "enable_fp_fusion": self.fuses, "OVERLAPS": arch >= HOPPER}
        if arch >= HOPPER:
            given["launch_pdl"] = True  # nothing that Triton's interpreter knows
        return given

    def run(self, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
        """Launch on the current stream, compiling first where it is the first of its kind."""
        compiled = self.function[grid](**self.options(arguments, current_arch()))
        if compiled is not None:  # the interpreter compiles nothing
            self._variants[id(compiled)] = compiled


@attrs.frozen(eq=False)
class Launch:
    """One launch of one kernel.

    Attributes:
        kernel: What to launch.
        grid: How many programs, in up to three dimensions.
        arguments: By the names of the kernel's parameters, with `num_warps` and `num_stages`.
    """

    kernel: Kernel
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]

    def run(self) -> None:
        """Launch on the current stream; nothing happens where the grid is empty."""
        if all(self.grid):
            self.kernel.run(self.grid, self.arguments)


def run(launches: tuple[Launch, ...]) -> None:
    """Launch one after the other."""
    for launch in launches:
        launch.run()
