"""`Staging`: the host's side of the copies to and from a device, one slot for each step in flight.

A copy reads the host's memory some time after it was asked for. So steps take turns with slots,
and a slot is written again only when the step that used it is known to have ended.
"""

from collections import deque

import attrs
import numpy as np
import torch

from graphs import StagingRing, StepBuffer, StepLayout
from nanovllm.core.batch import Int32Array
from nanovllm.runtime.device_queue import DeviceQueue, Ticket


@attrs.frozen(eq=False)
class Slot:
    """Host memory of one step.

    Attributes:
        index: Which slot it is.
        decode: Inputs of a step of decodes, packed by `StepBuffer.pack`.
        decode_words: The memory behind it.
        mixed: Inputs of any other step, `[num_mixed_words]` int32.
        mixed_words: The memory behind it.
        tokens: `[R]` int32, the step's tokens once they are back.
        token_words: The memory behind it.
    """

    index: int
    decode: StepBuffer
    decode_words: torch.Tensor
    mixed: Int32Array
    mixed_words: torch.Tensor
    tokens: Int32Array
    token_words: torch.Tensor


class Staging:
    """Hands out slots in turn."""

    def __init__(
        self,
        queue: DeviceQueue,
        layout: StepLayout,
        *,
        num_mixed_words: int,
        max_in_flight: int,
    ) -> None:
        self._queue = queue
        self._max_in_flight = max_in_flight
        self._ring = StagingRing(max_in_flight)
        self._slots = [
            _make_slot(index, queue, layout, num_mixed_words) for index in range(self._ring.depth)
        ]
        self._in_flight: deque[tuple[int, Ticket]] = deque()

    def begin(self) -> Slot:
        """The slot for the next step. Waits if too many are in flight."""
        if len(self._in_flight) == self._ring.max_in_flight:
            # Nobody asked for the oldest one's result: an error or an interrupt made it worthless.
            self.land(self._in_flight[0][1])
        return self._slots[self._ring.begin_fill()]

    def cancel(self, slot: Slot) -> None:
        """Take back a slot that nothing was enqueued from."""
        self._ring.cancel(slot.index)

    def fly(self, slot: Slot, ticket: Ticket) -> None:
        """The step of this slot is enqueued; the ticket says when its tokens are back."""
        self._ring.submit(slot.index)
        self._in_flight.append((slot.index, ticket))

    def land(self, ticket: Ticket) -> None:
        """Wait for a step, and take back its slot and those of the steps before it."""
        ticket.wait()
        if all(ticket is not other for _, other in self._in_flight):
            return  # taken back when a later step landed
        while self._in_flight:
            index, landed = self._in_flight.popleft()
            self._ring.release(index)
            if landed is ticket:
                return

    def start_over(self, nothing: torch.Tensor) -> None:
        """Wait for the device, and have all slots free, whatever was cut off where.

        Args:
            nothing: `[0]` int32 on the device.
        """
        self._queue.download(nothing, self._slots[0].token_words[:0]).wait()
        self._in_flight.clear()
        self._ring = StagingRing(self._max_in_flight)


def _make_slot(index: int, queue: DeviceQueue, layout: StepLayout, num_mixed_words: int) -> Slot:
    decode_words = queue.host_buffer(layout.num_words())
    mixed_words = queue.host_buffer(num_mixed_words)
    token_words = queue.host_buffer(layout.max_num_rows)
    return Slot(
        index=index,
        decode=StepBuffer(layout, _array(decode_words)),
        decode_words=decode_words,
        mixed=_array(mixed_words),
        mixed_words=mixed_words,
        tokens=_array(token_words),
        token_words=token_words,
    )


def _array(words: torch.Tensor) -> Int32Array:
    array: Int32Array = words.numpy()
    assert array.dtype == np.int32
    return array
