"""`EngineThread`: one thread that steps an engine while there is work, and sleeps otherwise.

Callers hand it small jobs (queue a request, abort one) through an inbox and never wait for a step.
After each step it gives every subscriber what is new for it; a subscriber that does not look for a
while finds it merged.
"""

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from nanovllm.engine import Engine
from nanovllm.errors import NanoVLLMError
from nanovllm.outputs import TokenDelta
from nanovllm.request import Request

Result = TypeVar("Result")

Subscriber = Callable[[list[TokenDelta], bool], None]
"""Called in the engine's thread with new deltas, and whether the request has ended."""

_CLOSED = "The engine is closed; make a new one."


class EngineThread:
    """The only thread that touches its engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: deque[tuple[Callable[[Engine], Any], Future[Any]]] = deque()
        self._lock = threading.Lock()  # held for moments only: to put into the inbox, or to close
        self._something_to_do = threading.Event()
        self._subscribers: dict[str, tuple[Request, Subscriber]] = {}
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="nanovllm-engine", daemon=True)
        self._thread.start()
        # A thread that is in native code when the interpreter goes away takes the process with it.
        atexit.register(self.close)

    def call(self, job: Callable[[Engine], Result]) -> "Future[Result]":
        """Run a job in the engine's thread, between two steps."""
        future: Future[Result] = Future()
        with self._lock:
            if self._is_closing:
                future.set_exception(NanoVLLMError(_CLOSED))
                return future
            self._inbox.append((job, future))
        self._something_to_do.set()
        return future

    def subscribe(self, request: Request, subscriber: Subscriber) -> None:
        """Tell what is new in a request, until it ends. Only in the engine's thread."""
        self._subscribers[request.request_id] = (request, subscriber)

    def stop(self) -> None:
        """Let the thread end every request and then itself, without waiting for it."""
        with self._lock:
            self._is_closing = True
        self._something_to_do.set()

    def close(self) -> None:
        """End every request, then the thread; may be called twice, and from any other thread."""
        self.stop()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            self._serve()
        finally:  # also after a `SystemExit` of a hook, or nobody would ever be answered
            self.stop()
            self._engine.close()
            self._deliver()
            while self._inbox:
                _, future = self._inbox.popleft()
                if future.set_running_or_notify_cancel():
                    future.set_exception(NanoVLLMError(_CLOSED))
            atexit.unregister(self.close)

    def _serve(self) -> None:
        while not self._is_closing:
            # Cleared before looking: what comes in meanwhile is seen now or wakes the next wait.
            self._something_to_do.clear()
            while self._inbox:
                self._do(*self._inbox.popleft())
            if self._engine.has_unfinished_requests():
                try:
                    self._engine.step()
                except Exception:
                    # What `on_step` raises has no caller to go to; the engine itself is whole.
                    logging.getLogger("nanovllm").exception("the `on_step` hook failed")
            # Looked at before delivering: another thread that asks for the state may take in the
            # last step meanwhile, and what it brought is then delivered in another round.
            is_idle = not self._engine.has_unfinished_requests()
            self._deliver()
            # Closing is looked at again: its signal may have come just before it was cleared.
            if is_idle and not self._inbox and not self._is_closing:
                self._something_to_do.wait()

    def _do(self, job: Callable[[Engine], Any], future: "Future[Any]") -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(job(self._engine))
        except Exception as error:  # noqa: BLE001  # it is the caller's, whatever it is
            future.set_exception(error)

    def _deliver(self) -> None:
        for request_id, (request, subscriber) in list(self._subscribers.items()):
            has_ended = request.finished  # before: else its last deltas might come after its end
            deltas = self._engine.take_deltas(request)
            if has_ended:
                del self._subscribers[request_id]
            if deltas or has_ended:
                subscriber(deltas, has_ended)
