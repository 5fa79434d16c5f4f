"""Work queues: what an executor asks of a device, in the order in which it is to happen.

Everything that is put on a queue runs in that order, some time later. Host memory that an upload
reads, or that a download writes, must be left alone until a ticket taken later has been waited for.
"""

from collections.abc import Callable
from typing import Protocol

import torch


class Ticket(Protocol):
    """A point in a queue."""

    def wait(self) -> None:
        """Return when everything up to this point has happened."""


class DeviceQueue(Protocol):
    """One device's work, in order."""

    def host_buffer(self, num_words: int) -> torch.Tensor:
        """Host memory that uploads and downloads are quick from and to: `[num_words]` int32."""

    def upload(self, host: torch.Tensor, device: torch.Tensor) -> None:
        """Copy from the host to the device."""

    def run(self, work: Callable[[], object]) -> None:
        """Do work that reads and writes device memory."""

    def download(self, device: torch.Tensor, host: torch.Tensor) -> Ticket:
        """Copy from the device to the host; the ticket says when it is there."""

    def close(self) -> None:
        """Wait for everything, and take no more."""

    def give_back(self) -> None:
        """Give memory that no tensor holds any more back to the device, for whoever is next."""


class _Done:
    """The ticket of what has happened already."""

    def wait(self) -> None:
        """Nothing to wait for."""


class ImmediateQueue:
    """Does everything at once: for a CPU."""

    def host_buffer(self, num_words: int) -> torch.Tensor:
        """See `DeviceQueue`."""
        return torch.zeros(num_words, dtype=torch.int32)

    def upload(self, host: torch.Tensor, device: torch.Tensor) -> None:
        """See `DeviceQueue`."""
        device.copy_(host)

    def run(self, work: Callable[[], object]) -> None:
        """See `DeviceQueue`."""
        work()

    def download(self, device: torch.Tensor, host: torch.Tensor) -> Ticket:
        """See `DeviceQueue`."""
        host.copy_(device)
        return _Done()

    def close(self) -> None:
        """See `DeviceQueue`."""

    def give_back(self) -> None:
        """See `DeviceQueue`."""
