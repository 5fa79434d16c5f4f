"""What the CUDA backend asks of a device. `graphs.cuda_driver` asks torch; tests write it down."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import attrs

from graphs.backend import Program


@attrs.frozen
class MemoryFigures:
    """Device memory at one moment.

    Attributes:
        pool_bytes: Of the graphs' pool.
        reserved_bytes: Of torch's allocator, pools included.
        used_bytes: Of the whole device, whoever uses it; None where that is not known.
    """

    pool_bytes: int
    reserved_bytes: int
    used_bytes: int | None

    def driver_bytes_since(self, earlier: MemoryFigures) -> int | None:
        """Compute the growth that the allocator does not account for: that of the driver.

        Never negative: where the device shares memory with the host, figures also fall.
        """
        if self.used_bytes is None or earlier.used_bytes is None:
            return None
        grown = self.used_bytes - earlier.used_bytes
        return max(0, grown - (self.reserved_bytes - earlier.reserved_bytes))


class DeviceGraph(Protocol):
    """One captured graph."""

    @property
    def num_nodes(self) -> int | None:
        """Operations in it, where they can be counted."""
        ...

    def replay(self) -> None:
        """Launch it on the current stream."""
        ...


class CudaDriver(Protocol):
    """The calls that need a device (`graphs.cuda_driver.TorchCudaDriver`)."""

    def new_pool(self) -> object:
        """Name a memory pool for graphs to share."""
        ...

    def on_side_stream(self) -> AbstractContextManager[None]:
        """Work on the one side stream, after what was enqueued before and before what follows."""
        ...

    def record(self, program: Program, pool: object) -> DeviceGraph:
        """Capture a program on the side stream."""
        ...

    def synchronize(self) -> None:
        """Wait for the device."""
        ...

    def memory(self, pool: object) -> MemoryFigures:
        """Read the memory figures."""
        ...
