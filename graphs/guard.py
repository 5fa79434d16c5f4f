"""`CaptureGuard`: one capture at a time in a process, in quiet, and none after one has failed.

While a stream is captured, work that other threads give to the device can spoil the capture, and
so can a garbage collection that frees device memory at the wrong moment. A capture that failed
leaks its memory pool until the process ends, and trying again leaks another.
"""

import gc
import threading

from graphs.errors import SessionError


class CaptureGuard:
    """What all sessions of a process share.

    Attributes:
        failure: Why a capture failed, which ends capturing in this process; None so far.
    """

    def __init__(self) -> None:
        self.failure: str | None = None
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._gc_was_on = False

    @property
    def is_held(self) -> bool:
        """Whether a session is capturing now."""
        return self._lock.locked()

    def acquire(self) -> None:
        """Wait until no other session captures, collect garbage, and stop collecting."""
        if self._owner == threading.get_ident():
            raise SessionError(
                "another session of this thread is still capturing; `seal` or `close` it first."
            )
        self._lock.acquire()
        self._owner = threading.get_ident()
        self._gc_was_on = gc.isenabled()
        gc.collect()
        gc.disable()

    def release(self) -> None:
        """Collect garbage again if it was collected before, and let others capture."""
        if self._gc_was_on:
            gc.enable()
        self._owner = None
        self._lock.release()


PROCESS_GUARD = CaptureGuard()
"""Every session's guard, unless a test brings its own: the device does not care who captures."""
