"""The backend without graphs: a replay calls the program. For CPUs, and wherever graphs fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import attrs

from graphs.backend import (
    CaptureInfo,
    Event,
    EventKind,
    GraphCaps,
    GraphKey,
    OnEvent,
    Program,
    SessionInfo,
    ignore_event,
)
from graphs.ledger import CaptureLedger, Phase, closed_program
from graphs.statics import Statics


@attrs.frozen
class EagerBackend:
    """Calls programs as they are."""

    @property
    def name(self) -> str:
        """For messages and reports."""
        return "eager"

    @property
    def caps(self) -> GraphCaps:
        """It captures nothing."""
        return GraphCaps(captures=False, shares_pool=False, verifies=False)

    def session(self, statics: Statics, on_event: OnEvent = ignore_event) -> EagerSession:
        """Begin a session."""
        del statics  # nothing is baked in, so nothing can move
        return EagerSession(on_event)


class EagerSession:
    """Keeps the order of a capture session, so that other backends find nothing new."""

    def __init__(self, on_event: OnEvent) -> None:
        self._on_event = on_event
        self._ledger = CaptureLedger()
        self._steps: list[EagerStep] = []

    def capture(
        self, key: GraphKey, program: Program, *, reset: Callable[[], None], warmups: int = 2
    ) -> EagerStep:
        """Warm the program up and wrap it."""
        self._ledger.admit(key, warmups)
        start_s = time.perf_counter()
        for _ in range(warmups):
            reset()
            program()
        reset()
        info = CaptureInfo(key, warmup_ms=(time.perf_counter() - start_s) * 1e3, captured=False)
        step = EagerStep(key, info, program)
        self._steps.append(step)
        self._on_event(Event(EventKind.CAPTURED, f"warmed up {key}", {"info": info}))
        return step

    def seal(self) -> SessionInfo:
        """End the warming up."""
        self._ledger.seal()
        captures = tuple(step.info for step in self._steps)
        info = SessionInfo(captures, total_ms=sum(one.warmup_ms for one in captures))
        self._on_event(Event(EventKind.SEALED, f"{len(captures)} programs", {"info": info}))
        return info

    def close(self) -> None:
        """Give up the programs."""
        self._ledger.phase = Phase.CLOSED
        for step in self._steps:
            step.program = closed_program
        self._steps.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class EagerStep:
    """A program by the name of a graph.

    Attributes:
        key: What it is for.
        info: What its warm-up cost.
        program: What a replay calls.
    """

    def __init__(self, key: GraphKey, info: CaptureInfo, program: Program) -> None:
        self.key = key
        self.info = info
        self.program = program

    def replay(self) -> None:
        """Run the program."""
        self.program()
