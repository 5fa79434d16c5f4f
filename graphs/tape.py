"""The backend that proves, on a CPU, that programs are safe to replay. Needs torch.

A tape does to a program what a CUDA graph does: it runs the Python once and repeats only the
operations, and it shares the memory that programs create among all graphs of a session. Then it
does worse: before each replay it fills that shared memory with NaN and absurd integers, as if
another graph had used all of it. A program that survives this with the right results depends on
nothing but its static buffers. What cannot survive is reported as findings when captured.

It holds every intermediate tensor and takes a few times as long as running the program: it is for
verification, on models made small for it. It cannot show races between streams, what kernels do
inside, or the limits of launch grids. `graphs.verify` drives it over a schedule.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

import attrs
import torch

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
from graphs.errors import StaticsError
from graphs.findings import Finding, FindingKind
from graphs.ledger import CaptureLedger, Phase, closed_program
from graphs.poison import spoil, whole_storage
from graphs.recording import Recording, find_escapes, record
from graphs.statics import Statics, StaticsRecord


@attrs.frozen
class TapeBackend:
    """Records programs, and replays them over poisoned memory."""

    @property
    def name(self) -> str:
        """For messages and reports."""
        return "tape"

    @property
    def caps(self) -> GraphCaps:
        """It captures, and verifies what it captures."""
        return GraphCaps(captures=True, shares_pool=True, verifies=True)

    def session(self, statics: Statics, on_event: OnEvent = ignore_event) -> TapeSession:
        """Begin a session.

        Raises:
            StaticsError: If a buffer was made under `torch.inference_mode`: outside of it, where
                recording must happen to see all operations, such a tensor cannot be written.
        """
        return TapeSession(statics, on_event)


class TapeSession:
    """Recordings with one pool.

    Attributes:
        findings: What was found so far, each once.
    """

    def __init__(self, statics: Statics, on_event: OnEvent) -> None:
        self._statics = statics
        self._on_event = on_event
        self._ledger = CaptureLedger()
        self._record = StaticsRecord.of(statics)
        self._pool: list[torch.Tensor] = []
        self._graphs: list[TapeGraph] = []
        self._start_s = time.perf_counter()
        self.findings: tuple[Finding, ...] = ()
        for name, tensor in self._record.tensors.items():
            if tensor.is_inference():
                raise StaticsError(
                    f"static `{name}` was made under `torch.inference_mode`; make static buffers "
                    "under `torch.no_grad`."
                )

    def capture(
        self, key: GraphKey, program: Program, *, reset: Callable[[], None], warmups: int = 2
    ) -> TapeGraph:
        """Run the program `warmups` times, then once in search of escapes, then record it."""
        self._ledger.admit(key, warmups)
        tensors = tuple(self._record.tensors.values())
        start_s = time.perf_counter()
        with torch.no_grad():
            for _ in range(warmups):
                reset()
                program()
            reset()
            escapes = find_escapes(program, tensors)
            warm_s = time.perf_counter()
            reset()
            recording = record(program, tensors)
            reset()
        self._report((*escapes, *recording.findings), key)
        self._check_statics(key)
        self._pool += [whole_storage(tensor) for tensor in recording.created]
        info = CaptureInfo(
            key,
            warmup_ms=(warm_s - start_s) * 1e3,
            capture_ms=(time.perf_counter() - warm_s) * 1e3,
            pool_bytes=sum(tensor.untyped_storage().nbytes() for tensor in recording.created),
            num_nodes=len(recording.ops),
        )
        graph = TapeGraph(key, info, lambda: self._replay(key, recording))
        self._graphs.append(graph)
        self._on_event(Event(EventKind.CAPTURED, f"recorded {key}", {"info": info}))
        return graph

    def poison(self) -> None:
        """Overwrite all memory of the pool, as a replay of another graph might."""
        for memory in self._pool:
            spoil(memory)

    def seal(self) -> SessionInfo:
        """End the capturing."""
        self._ledger.seal()
        self._check_statics(None)
        captures = tuple(graph.info for graph in self._graphs)
        info = SessionInfo(
            captures,
            total_ms=(time.perf_counter() - self._start_s) * 1e3,
            pool_bytes=sum(one.pool_bytes for one in captures),
        )
        self._on_event(Event(EventKind.SEALED, f"{len(captures)} recordings", {"info": info}))
        return info

    def close(self) -> None:
        """Give up all recordings."""
        self._ledger.phase = Phase.CLOSED
        for graph in self._graphs:
            graph.run = closed_program
        self._graphs.clear()
        self._pool.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _replay(self, key: GraphKey, recording: Recording) -> None:
        self._check_statics(key)
        # Inference mode: what the program made under it could not be written otherwise.
        with torch.inference_mode():
            self.poison()
            for op in recording.ops:
                op.run()

    def _check_statics(self, key: GraphKey | None) -> None:
        changes = self._record.changes(self._statics)
        self._report((Finding(FindingKind.STATIC_MOVED, change) for change in changes), key)

    def _report(self, findings: Iterable[Finding], key: GraphKey | None) -> None:
        for found in findings:
            finding = attrs.evolve(found, key=key)
            if finding not in self.findings:
                self.findings = (*self.findings, finding)
                self._on_event(Event(EventKind.FINDING, str(finding), {"finding": finding}))


class TapeGraph:
    """A recorded program.

    Attributes:
        key: What it was recorded for.
        info: What it holds: `num_nodes` operations that do something, views left out.
        run: What a replay calls.
    """

    def __init__(self, key: GraphKey, info: CaptureInfo, run: Callable[[], None]) -> None:
        self.key = key
        self.info = info
        self.run = run

    def replay(self) -> None:
        """Poison the pool and repeat the operations."""
        self.run()
