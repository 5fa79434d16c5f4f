"""`EngineLock`: one caller at a time, and whole again whatever interrupts it."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nanovllm.core import EngineState
from nanovllm.live_requests import LiveRequests
from nanovllm.request import Request


class EngineLock:
    """Holds an engine's requests for one caller at a time.

    Attributes:
        at_rest: The state as of the last time that it was let go: a value, safe to keep.
    """

    def __init__(self, live: LiveRequests, recover: Callable[[], None]) -> None:
        """Hold nothing yet; `recover` makes the engine whole after it was cut off anywhere."""
        self.at_rest: EngineState = live.state
        self._live = live
        self._make_whole = recover
        self._lock = threading.Lock()
        self._was_interrupted = False
        self._dropped: deque[Request] = deque()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the engine, alone. What finalizers asked for meanwhile is done at the end."""
        try:
            with self._lock:
                if self._was_interrupted:
                    self._recover()
                try:
                    yield
                except Exception:
                    raise
                except BaseException:  # such as KeyboardInterrupt, at any point
                    self._was_interrupted = True
                    self._recover()
                    raise
                finally:
                    self.at_rest = self._live.state
        finally:
            self._abort_dropped()

    def abort_soon(self, request: Request) -> None:
        """End a request now, or as soon as whoever holds the engine lets go of it.

        For finalizers, which may run in any thread at any point, also in the middle of a step of
        this very thread: it neither waits nor raises.
        """
        self._dropped.append(request)
        self._abort_dropped()

    def _abort_dropped(self) -> None:
        # Whoever does not get the lock leaves the rest to its holder, who looks after letting go.
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                if self._was_interrupted:
                    self._recover()
                if self._dropped:  # else another thread was quicker
                    # Taken off the list only when done, so that an interrupt does not lose it.
                    self._live.abort(self._dropped[0])
                    self._dropped.popleft()
            except BaseException:
                self._was_interrupted = True
                raise
            finally:
                self.at_rest = self._live.state
                self._lock.release()

    def _recover(self) -> None:
        self._make_whole()
        self._was_interrupted = False
