"""`memory_flat`: a stretch of a test in which the engine must not take more memory."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from nanovllm.llm import LLM

MIB = 2**20

TOLERANCE_BYTES = {"cpu": 8 * MIB, "cuda": 2 * MIB}
"""How much more is still flat. On a CPU the resident memory of a whole Python process is seen, in
which lists of results come and go; a CUDA driver hands out memory in pieces of 2 MiB."""


class MemoryFlat:
    """Checks that memory does not grow.

    def test_steady(llm, memory_flat):
        llm.generate(prompt)                # the first call may allocate
        with memory_flat():
            for _ in range(20):
                llm.generate(prompt)
    """

    def __init__(self, llm: LLM) -> None:
        device = llm.describe()["device"]
        self._tolerance_bytes = TOLERANCE_BYTES[device["type"]]
        self._what, self._read_bytes = _reader(device)

    @contextmanager
    def __call__(self, tolerance_bytes: int | None = None) -> Iterator[None]:
        """Fail if more than that is in use at the end of the block than at its begin.

        Args:
            tolerance_bytes: Default: 8 MiB on a CPU, 2 MiB on a GPU.
        """
        allowed = self._tolerance_bytes if tolerance_bytes is None else tolerance_bytes
        gc.collect()  # what is garbage already does not count
        before_bytes = self._read_bytes()
        yield
        gc.collect()
        grown = self._read_bytes() - before_bytes
        if grown > allowed:
            raise AssertionError(
                f"memory grew by {grown / MIB:.1f} MiB ({self._what}, {before_bytes / MIB:.1f} "
                f"MiB before); {allowed / MIB:.1f} MiB are allowed."
            )


def _reader(device: dict[str, Any]) -> tuple[str, Callable[[], int]]:
    if device["type"] == "cpu":
        return "resident memory of the process", lambda: int(psutil.Process().memory_info().rss)

    def used_on_device() -> int:
        import torch  # delayed; whoever has an engine has loaded it

        # The driver's own count, so that memory outside of torch, as graphs take, is in it.
        free_bytes, total_bytes = torch.cuda.mem_get_info(device["index"])
        return int(total_bytes - free_bytes)

    return "used on the device, by everybody", used_on_device
