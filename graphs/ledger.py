"""`CaptureLedger`: what a session has captured, and what it may still do. Pure."""

from enum import Enum

from graphs.backend import GraphKey
from graphs.errors import SessionError


class Phase(Enum):
    """Where a session is in its life."""

    OPEN = "open"
    SEALED = "sealed"
    CLOSED = "closed"


class CaptureLedger:
    """The order that all backends keep, so that a CPU test shows what a device would refuse."""

    def __init__(self) -> None:
        self.phase = Phase.OPEN
        self.keys: list[GraphKey] = []

    def admit(self, key: GraphKey, warmups: int) -> None:
        """Allow a capture, or say why not."""
        if self.phase is not Phase.OPEN:
            raise SessionError(
                f"cannot capture {key}: the session is {self.phase.value}; capture everything "
                "before `seal`, and begin a new session for more."
            )
        if key.bucket < 1 or warmups < 1:
            raise SessionError(
                f"cannot capture {key} after {warmups} warm-ups: both the bucket and the warm-ups "
                "must be at least 1."
            )
        if key in self.keys:
            raise SessionError(f"{key} is captured already; replay what `capture` returned.")
        if self.keys and key.bucket > self.keys[-1].bucket:
            raise SessionError(
                f"cannot capture bucket {key.bucket} after bucket {self.keys[-1].bucket}: small "
                "graphs would leave holes in the pool that large ones cannot use; sort the keys "
                "with `capture_order`."
            )
        self.keys.append(key)

    def seal(self) -> None:
        """Allow `seal`, once."""
        if self.phase is not Phase.OPEN:
            raise SessionError(f"cannot seal a session that is {self.phase.value}.")
        self.phase = Phase.SEALED


def closed_program() -> None:
    """Stand in for every program of a closed session."""
    raise SessionError("cannot replay: the session is closed.")
