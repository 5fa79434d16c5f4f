"""`StagingRing`: who owns each slot of a ring of pinned host buffers. Pure: it moves no bytes.

A copy from pinned memory reads the host's bytes some time after it was enqueued. A host that
refills a slot before then changes a step that is already on its way. So each slot goes round

    FREE --begin_fill--> FILLING --submit--> SUBMITTED --release--> FREE
                            '----cancel---> FREE

The owner of the buffers records an event after the copy of each slot, and calls `release` only once
that event has come. There are more slots than may be in flight, so the slot to fill next is always
free: the host waits before `submit`, if at all, with the next step packed.
"""

from enum import Enum

from graphs.errors import RingError


class SlotState(Enum):
    """Who may touch a slot's bytes."""

    FREE = "free"  # nobody does
    FILLING = "filling"  # the host writes
    SUBMITTED = "submitted"  # the device may read


class StagingRing:
    """Slots handed out in turn, and taken back in the order they were submitted.

    Attributes:
        depth: Number of slots.
        max_in_flight: Most slots that may be submitted at once; less than `depth`.
    """

    def __init__(self, max_in_flight: int, *, depth: int | None = None) -> None:
        """Start with every slot free.

        Args:
            max_in_flight: Most steps that may be on their way to the device at once, at least 1.
            depth: Slots; by default one more than `max_in_flight`, which is also the least.
        """
        if max_in_flight < 1:
            raise ValueError(f"`max_in_flight` is {max_in_flight}; it must be at least 1.")
        self.max_in_flight = max_in_flight
        self.depth = max_in_flight + 1 if depth is None else depth
        if self.depth <= max_in_flight:
            raise ValueError(
                f"`depth` is {self.depth}, but {max_in_flight} slots may be in flight while one "
                f"more is filled; give at least {max_in_flight + 1}."
            )
        self._states = [SlotState.FREE] * self.depth
        self._next = 0
        self._oldest = 0
        self._num_in_flight = 0

    @property
    def states(self) -> tuple[SlotState, ...]:
        """Of each slot."""
        return tuple(self._states)

    @property
    def num_in_flight(self) -> int:
        """Slots that were submitted and not released."""
        return self._num_in_flight

    @property
    def oldest_in_flight(self) -> int | None:
        """The slot to release next, or None if none is in flight."""
        return self._oldest if self._num_in_flight else None

    def begin_fill(self) -> int:
        """Give the next slot to the host, and return its index.

        Raises:
            RingError: If another slot is being filled.
        """
        slot = self._next
        if self._states[slot] is SlotState.FILLING:
            raise RingError(f"slot {slot} is being filled; `submit` or `cancel` it first.")
        # Fewer slots may be in flight than there are, and they are the ones before this.
        assert self._states[slot] is SlotState.FREE, self._states
        self._states[slot] = SlotState.FILLING
        return slot

    def submit(self, slot: int) -> None:
        """Give a filled slot to the device: its copy is enqueued, or about to be."""
        self._expect(slot, SlotState.FILLING, "submit")
        if self._num_in_flight == self.max_in_flight:
            raise RingError(
                f"{self.max_in_flight} slots are in flight, the most this ring allows; `release` "
                f"slot {self._oldest} first."
            )
        self._states[slot] = SlotState.SUBMITTED
        self._num_in_flight += 1
        self._next = (slot + 1) % self.depth

    def cancel(self, slot: int) -> None:
        """Take back a slot whose filling failed. It is the next to be filled again."""
        self._expect(slot, SlotState.FILLING, "cancel")
        self._states[slot] = SlotState.FREE

    def release(self, slot: int) -> None:
        """Take back the oldest submitted slot, once its copy is known to have finished."""
        self._expect(slot, SlotState.SUBMITTED, "release")
        if slot != self._oldest:
            raise RingError(
                f"slot {slot} was submitted after slot {self._oldest}, and copies finish in order; "
                f"`release` slot {self._oldest} first."
            )
        self._states[slot] = SlotState.FREE
        self._num_in_flight -= 1
        self._oldest = (slot + 1) % self.depth

    def _expect(self, slot: int, state: SlotState, verb: str) -> None:
        if not 0 <= slot < self.depth:
            raise RingError(f"there is no slot {slot}; this ring has slots 0 to {self.depth - 1}.")
        if self._states[slot] is not state:
            raise RingError(
                f"cannot {verb} slot {slot}, which is {self._states[slot].value}; it must be "
                f"{state.value}."
            )
