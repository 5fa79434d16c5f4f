"""The calls of `graphs.cuda` that need a device, and nothing else. Needs torch with CUDA."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
from collections.abc import Iterator
from typing import Any

import attrs
import torch

from graphs.backend import Program
from graphs.device import MemoryFigures


class TorchCudaDriver:
    """One device, with one side stream.

    Args:
        device: A CUDA device.
        debug: Keep graphs so that their nodes can be counted, and have torch check at each replay,
            where it can, that no tensor outside the pool that a graph uses was given up. Slower.
    """

    def __init__(self, device: torch.device, *, debug: bool = False) -> None:
        self._device = device
        self._debug = debug
        self._stream = torch.cuda.Stream(device)
        self._options: dict[str, Any] = {"capture_error_mode": "thread_local"}
        if debug and "check_input_liveness" in inspect.signature(torch.cuda.graph).parameters:
            self._options["check_input_liveness"] = True

    def new_pool(self) -> object:
        """Name a memory pool; torch makes it with the first capture."""
        return torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def on_side_stream(self) -> Iterator[None]:
        """Work on the side stream, between what comes before and after on the current one."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def record(self, program: Program, pool: object) -> TorchGraph:
        """Capture a program on the side stream."""
        graph = torch.cuda.CUDAGraph(keep_graph=self._debug)
        handle: Any = pool
        with torch.cuda.graph(graph, pool=handle, stream=self._stream, **self._options):
            program()
        if not self._debug:
            return TorchGraph(graph, None)
        graph.instantiate()  # a kept graph would otherwise be instantiated by its first replay
        return TorchGraph(graph, _count_nodes(graph.raw_cuda_graph()))

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)

    def memory(self, pool: object) -> MemoryFigures:
        """Read the memory figures."""
        handle: Any = pool
        segments = torch.cuda.memory_snapshot(handle, include_traces=False)
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return MemoryFigures(
            pool_bytes=sum(segment["total_size"] for segment in segments),
            reserved_bytes=torch.cuda.memory_reserved(self._device),
            used_bytes=total_bytes - free_bytes,
        )


@attrs.frozen(eq=False)
class TorchGraph:
    """A graph of torch.

    Attributes:
        num_nodes: Operations in it, if it was captured for debugging.
    """

    _graph: torch.cuda.CUDAGraph
    num_nodes: int | None

    def replay(self) -> None:
        """Launch it on the current stream."""
        self._graph.replay()


def _count_nodes(raw_graph: int) -> int | None:
    """Ask the driver how many nodes a graph has; None if it does not say."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_size_t(0)
    status = driver.cuGraphGetNodes(ctypes.c_void_p(raw_graph), None, ctypes.byref(count))
    return count.value if status == 0 else None  # 0 is CUDA_SUCCESS
