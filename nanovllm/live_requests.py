"""`LiveRequests`: the scheduler's state and the requests that it works for, kept in agreement."""

import time
from collections.abc import Callable, Iterable

from nanovllm.core import EngineState, FinishReason, abort, expire
from nanovllm.request import Completion, Request

PAST_DEADLINE = "deadline"
"""The `stop_reason` of a request that was aborted because its deadline came."""


class LiveRequests:
    """Every request that has not ended, and the state that its sequences are in.

    Attributes:
        state: The scheduler's state.
        by_id: Requests by their id.
        by_seq_id: Requests and completions by the id of the sequence that computes them.
    """

    def __init__(self, state: EngineState, on_end: Callable[[Request], None]) -> None:
        """Start without a request; `on_end` is told of each one that ends, once."""
        self.state = state
        self.by_id: dict[str, Request] = {}
        self.by_seq_id: dict[int, tuple[Request, Completion]] = {}
        self._on_end = on_end

    def enter(self, state: EngineState, requests: Iterable[Request]) -> None:
        """Take in requests, and the state that their sequences were admitted to."""
        for request in requests:
            # In this order: what is cut off in between is found by its sequences, and ended.
            self.by_seq_id.update({c.seq_id: (request, c) for c in request.completions})
            self.by_id[request.request_id] = request
        self.state = state

    def abort(self, request: Request) -> bool:
        """End a request; False if it has ended."""
        if request.finished:
            return False
        for completion in request.completions:
            self.end(completion, FinishReason.ABORT)
        self.settle([request], time.perf_counter())
        return True

    def expire(self, now_s: float) -> list[Request]:
        """End the requests whose deadline has come; returns them."""
        self.state, seq_ids = expire(self.state, now_s)
        expired: dict[str, Request] = {}
        for seq_id in seq_ids:
            request, completion = self.by_seq_id[seq_id]
            expired[request.request_id] = request
            late = (
                f"its deadline, {request.deadline_s:g} s after its arrival, came after "
                f"{len(completion.token_ids)} tokens"
            )
            completion.end(FinishReason.ABORT, late, stop_reason=PAST_DEADLINE)
        self.settle(expired.values(), now_s)
        return list(expired.values())

    def end(self, completion: Completion, reason: FinishReason, error: str | None = None) -> None:
        """End a completion from outside the core, and free its blocks."""
        self.state = abort(self.state, completion.seq_id)
        completion.end(reason, error)

    def settle(self, requests: Iterable[Request], now_s: float) -> None:
        """Note what happened, and forget the requests that ended."""
        for request in requests:
            request.note_progress(now_s)
            if request.finished:
                if self.by_id.get(request.request_id) is request:
                    self._on_end(request)
                    del self.by_id[request.request_id]
                for completion in request.completions:
                    self.by_seq_id.pop(completion.seq_id, None)

    def recover(self) -> None:
        """Make state and requests agree again after something was cut off in the middle.

        What was being computed is ended, and so is what the two sides do not agree about: a
        completion that was cut off while it took in a token may lack that token's text or its
        log-probabilities, and a request of an `add` that was cut off has nobody who waits for it.
        """
        for seq in (*self.state.running, *self.state.waiting):
            _, completion = self.by_seq_id.get(seq.seq_id, (None, None))
            if (
                completion is None
                or completion.finish_reason is not None
                or seq.num_scheduled_tokens > 0
                or seq.num_completion_tokens != len(completion.token_ids)
            ):
                self.state = abort(self.state, seq.seq_id)
        live = {seq.seq_id for seq in (*self.state.running, *self.state.waiting)}
        for seq_id, (_, completion) in self.by_seq_id.items():
            if seq_id not in live:
                completion.end(FinishReason.ABORT)
        # Not all of them need be in both.
        requests = [*self.by_id.values(), *(request for request, _ in self.by_seq_id.values())]
        self.settle(requests, time.perf_counter())
