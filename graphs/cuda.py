"""The backend of CUDA graphs: what to do in which order. Needs no torch; the driver does.

The choices, each of which some engine learned the hard way:

- One memory pool for all graphs, and one side stream for all warm-ups and captures.
- The largest bucket first, so that the memory of the first graph serves all others.
- Warm-ups and captures run under the padding that replays use, with `reset` before each.
- One capture at a time in a process, with the garbage collector off (`graphs.guard`).
- Programs are held until the session closes: a kernel that is unloaded breaks its graph.
- Each graph is replayed once at `seal`, where a fault is still cheap.
- No graph is given up alone: its library workspaces may be those of others.
- After a failed capture the process runs eagerly. It says so, and does not try again.
"""

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
from graphs.device import CudaDriver, DeviceGraph, MemoryFigures
from graphs.errors import StaticsError
from graphs.guard import PROCESS_GUARD, CaptureGuard
from graphs.ledger import CaptureLedger, Phase, closed_program
from graphs.statics import Statics, StaticsRecord


@attrs.frozen
class CudaBackend:
    """Captures CUDA graphs.

    Attributes:
        driver: Makes the device calls.
        reserve_bytes: Memory that was set aside for graphs, by pool and driver together; a
            session that needs more says so in an event. None: unlimited.
        guard: What sessions of the process share.
    """

    driver: CudaDriver
    reserve_bytes: int | None = None
    guard: CaptureGuard = PROCESS_GUARD

    @property
    def name(self) -> str:
        """For messages and reports."""
        return "cuda"

    @property
    def caps(self) -> GraphCaps:
        """It captures."""
        return GraphCaps(captures=True, shares_pool=True, verifies=False)

    def session(self, statics: Statics, on_event: OnEvent = ignore_event) -> CudaSession:
        """Begin a session over these static buffers."""
        return CudaSession(self, statics, on_event)


class CudaSession:
    """Graphs with one pool.

    Other threads must leave the device alone from the event `CAPTURING`, sent before the first
    capture, until `SEALED` or `STOPPED`.
    """

    def __init__(self, backend: CudaBackend, statics: Statics, on_event: OnEvent) -> None:
        self._backend = backend
        self._driver = backend.driver
        self._guard = backend.guard
        self._statics = statics
        self._record = StaticsRecord.of(statics)
        self._on_event = on_event
        self._ledger = CaptureLedger()
        self._pool = self._driver.new_pool()
        self._steps: list[CudaStep] = []
        self._is_capturing = False
        self._has_told = False  # that it is degraded
        self._start_s = 0.0
        self._first_memory = MemoryFigures(0, 0, None)

    @property
    def degraded_reason(self) -> str | None:
        """Why every program runs eagerly; None if graphs are replayed."""
        return self._guard.failure

    def capture(
        self, key: GraphKey, program: Program, *, reset: Callable[[], None], warmups: int = 2
    ) -> CudaStep:
        """Warm a program up and capture it; an error in its warm-up is the program's own."""
        self._ledger.admit(key, warmups)
        try:
            self._begin_capturing()
            with self._driver.on_side_stream():
                start_s = time.perf_counter()
                for _ in range(warmups):
                    reset()
                    program()
                reset()
                self._driver.synchronize()  # so that the time is that of the work
                step = CudaStep(CaptureInfo(key, (time.perf_counter() - start_s) * 1e3), program)
                step.reset_inputs = reset
                self._steps.append(step)
                if self._guard.failure is None:
                    self._record_graph(step)
        except BaseException:
            self._stop_capturing(f"an error ended the capture of {key}")
            raise
        if self._guard.failure is not None:
            self._degrade()
        did = "captured" if step.info.captured else "warmed up"
        self._on_event(Event(EventKind.CAPTURED, f"{did} {key}", {"info": step.info}))
        return step

    def seal(self) -> SessionInfo:
        """End the capturing: replay each graph once on padding, and look at what it all took.

        Raises:
            StaticsError: If a static buffer was replaced since the session began.
        """
        self._ledger.seal()
        try:
            self._begin_capturing()  # in case nothing was captured
            if changes := self._record.changes(self._statics):
                raise StaticsError("; ".join(changes) + ".")
            if self._guard.failure is None:
                self._replay_all_once()
            if self._guard.failure is not None:
                self._degrade()
            info = self._session_info()
        except BaseException:
            self._stop_capturing("an error kept the session from being sealed")
            raise
        self._release_guard()
        self._on_event(Event(EventKind.SEALED, f"{len(self._steps)} graphs", {"info": info}))
        self._check_reserve(info)
        return info

    def close(self) -> None:
        """Wait for the device, then give up all graphs together. May be called twice."""
        if self._ledger.phase is Phase.CLOSED:
            return
        self._ledger.phase = Phase.CLOSED
        self._stop_capturing("the session was closed before `seal`")
        try:
            self._driver.synchronize()  # a graph must not go while it runs
        finally:
            for step in self._steps:
                step.run = step.program = step.reset_inputs = closed_program
                step.graph = None
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

    def _begin_capturing(self) -> None:
        if self._is_capturing:
            return
        self._guard.acquire()
        self._is_capturing = True
        self._on_event(Event(EventKind.CAPTURING, "other threads must leave the device alone"))
        self._driver.synchronize()
        self._start_s = time.perf_counter()
        self._first_memory = self._driver.memory(self._pool)

    def _stop_capturing(self, why: str) -> None:
        """End the capturing before its time, if it goes on."""
        if self._is_capturing:
            self._release_guard()
            self._on_event(Event(EventKind.STOPPED, why))

    def _release_guard(self) -> None:
        self._is_capturing = False
        self._guard.release()

    def _record_graph(self, step: CudaStep) -> None:
        """Capture one warm program; on failure note the reason, which is final."""
        before = self._driver.memory(self._pool)
        start_s = time.perf_counter()
        try:
            step.graph = self._driver.record(step.program, self._pool)
        except RuntimeError as error:  # what torch raises for whatever the device refuses
            self._guard.failure = f"capturing {step.key} failed: {error}"
            return
        except BaseException as error:
            self._guard.failure = f"capturing {step.key} was interrupted: {error!r}"
            raise
        after = self._driver.memory(self._pool)
        step.run = step.graph.replay
        step.info = attrs.evolve(
            step.info,
            capture_ms=(time.perf_counter() - start_s) * 1e3,
            pool_bytes=max(0, after.pool_bytes - before.pool_bytes),
            driver_bytes=after.driver_bytes_since(before),
            num_nodes=step.graph.num_nodes,
            captured=True,
        )

    def _replay_all_once(self) -> None:
        try:
            with self._driver.on_side_stream():
                for step in self._steps:
                    step.reset_inputs()
                    step.run()
                    step.reset_inputs()
            self._driver.synchronize()
        except RuntimeError as error:
            self._guard.failure = f"the first replay failed: {error}"

    def _degrade(self) -> None:
        """Let every step call its program. Graphs that exist are kept: see `close`."""
        for step in self._steps:
            step.run = step.program
            step.info = attrs.evolve(step.info, captured=False)
        if not self._has_told:
            self._has_told = True
            reason = self._guard.failure
            message = f"no CUDA graphs in this process: {reason}"
            self._on_event(Event(EventKind.DEGRADED, message, {"reason": reason}))

    def _session_info(self) -> SessionInfo:
        memory = self._driver.memory(self._pool)
        return SessionInfo(
            tuple(step.info for step in self._steps),
            total_ms=(time.perf_counter() - self._start_s) * 1e3,
            pool_bytes=memory.pool_bytes,
            driver_bytes=memory.driver_bytes_since(self._first_memory),
            degraded_reason=self._guard.failure,
        )

    def _check_reserve(self, info: SessionInfo) -> None:
        reserve, used = self._backend.reserve_bytes, info.pool_bytes + (info.driver_bytes or 0)
        if reserve is not None and used > reserve:
            message = f"graphs took {used} bytes, but {reserve} were set aside for them"
            data = {"used_bytes": used, "reserve_bytes": reserve}
            self._on_event(Event(EventKind.OVER_BUDGET, message, data))


class CudaStep:
    """A captured program.

    Attributes:
        info: What the capture cost.
        program: What was captured.
        reset_inputs: Puts the inputs into the state of a step without live rows.
        graph: What is replayed; None if there is none.
        run: What a replay calls: the graph, or the program where graphs failed.
    """

    def __init__(self, info: CaptureInfo, program: Program) -> None:
        self.info = attrs.evolve(info, captured=False)
        self.program = program
        self.reset_inputs: Callable[[], None] = closed_program
        self.graph: DeviceGraph | None = None
        self.run: Callable[[], None] = program

    @property
    def key(self) -> GraphKey:
        """What it was captured for."""
        return self.info.key

    def replay(self) -> None:
        """Enqueue the step."""
        self.run()
