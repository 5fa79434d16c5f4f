"""Records a run: the engine's steps, and what its device and process do meanwhile."""

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import attrs

from telemetry.errors import TelemetryError
from telemetry.feed import LiveSink
from telemetry.providers.base import Tier
from telemetry.records import ObserverEffect, Overhead, Value
from telemetry.run import Run
from telemetry.session import AT_EDGES, Engine, Session
from telemetry.sinks.jsonl import JsonlFile, JsonlMemory, Sink, read_lines

if TYPE_CHECKING:
    from telemetry.report.model import Report

Mode = Literal["off", "edges", "live"]
MODES = ("off", "edges", "live")
MIN_PERIOD_S = 0.01

# The innermost open window of this thread or task: (its recorder, its id).
_around: ContextVar[tuple["Recorder", int] | None] = ContextVar("telemetry_window", default=None)


class Recorder:
    """Records what an engine does from `start` to `close`; a context manager that does both.

    Modes: "off" does nothing at all. "edges" records every step, and reads sensors at the begin and
    end of windows only. "live" has a thread sample them besides. In each, the step hook is one
    append to a ring; a second thread writes what the rings hold, about each second.

    Args:
        engine: Such as `nanovllm.LLM` or `nanovllm.AsyncLLM`.
        path: File to write, JSON Lines; one that is there is replaced. None to keep the run in
            memory, bounded: the oldest steps and samples make room, and are counted.
        mode: "off", "edges" or "live".
        period_s: Time between two samples in mode "live", in seconds.
        max_memory_bytes: Bound on a run that is kept in memory.
        sinks: Who else gets the steps and, in mode "live", the samples, about each second and from
            a thread of the recorder's: such as `telemetry.sinks.prometheus.Metrics`.

    Raises:
        TelemetryError: An argument is not usable.
    """

    def __init__(
        self,
        engine: Engine,
        path: str | os.PathLike[str] | None = None,
        *,
        mode: Mode = "live",
        period_s: float = 0.1,
        max_memory_bytes: int = 64 << 20,
        sinks: Sequence[LiveSink] = (),
    ) -> None:
        _check(path, mode, period_s)
        self._engine = engine
        self._path = None if path is None else Path(path).expanduser()
        self._mode = mode
        self._period_s = float(period_s)
        self._max_memory_bytes = max_memory_bytes
        self._sinks = tuple(sinks)
        self._pid = os.getpid()
        self._session: Session | None = None
        self._is_closed = False

    @property
    def mode(self) -> Mode:
        """One of "off", "edges" and "live"."""
        return self._mode

    @property
    def device_lost_at(self) -> int | None:
        """When the device was found gone, in nanoseconds of `time.perf_counter_ns`; else None."""
        return None if self._session is None else self._session.device_lost_at

    def start(self) -> None:
        """Begin to record. A recorder records once."""
        if self._mode == "off" or self._session is not None or self._is_closed:
            return
        sink: Sink = (
            JsonlMemory(self._max_memory_bytes) if self._path is None else JsonlFile(self._path)
        )
        self._session = Session(
            self._engine,
            sink,
            is_live=self._mode == "live",
            period_s=self._period_s,
            live_sinks=self._sinks,
        )

    def close(self) -> None:
        """Record no more, and complete the run. May be called twice.

        Raises:
            TelemetryError: The run could not be written in full, such as to a full disk.
        """
        if self._is_closed or self._is_forked():
            return
        self._is_closed = True
        if self._session is not None:
            self._session.close()
            self._session.raise_failure()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        # What went wrong in the block matters more than what goes wrong here.
        with contextlib.suppress(TelemetryError):
            self.close()

    @contextlib.contextmanager
    def window(self, name: str) -> Iterator[None]:
        """A named stretch of the run; windows nest. Sensors are read at its begin and end."""
        session = self._session
        if session is None or self._is_closed or self._is_forked():
            yield
            return
        around = _around.get()
        parent = around[1] if around is not None and around[0] is self else 0
        window_id = session.begin_window(str(name), parent)
        _around.set((self, window_id))
        try:
            yield
        finally:
            # Set, not reset: a generator may be finished in another context than its own.
            _around.set(around)
            session.end_window(window_id)

    def pause(self) -> None:
        """Neither hook steps nor sample until `resume`."""
        if self._is_recording():
            assert self._session is not None
            self._session.pause()

    def resume(self) -> None:
        """Go on after `pause`."""
        if self._is_recording():
            assert self._session is not None
            self._session.resume()

    def read_sensors(self) -> Mapping[str, Value]:
        """Read every sensor now, those that are too slow for a schedule included.

        Raises:
            TelemetryError: Nothing is being recorded.
            DeviceLostError: The device is gone.
        """
        session = self._require()
        if self._is_closed:
            raise TelemetryError("The recorder is closed; read its sensors before.")
        values = session.read((*AT_EDGES, Tier.MANUAL))
        session.raise_lost()
        return values

    def run(self) -> Run:
        """The run so far, or all of it after `close`."""
        session = self._require()
        if not self._is_closed:
            session.writer.drain()
            session.writer.write_overhead()
        session.raise_failure()
        return read_lines(session.sink.lines(), name=str(self._path or "the run in memory"))

    def report(self) -> "Report":
        """What the run says, ready to be shown: `to_html`, `to_terminal` and others."""
        from telemetry.report.model import build_report

        return build_report(self.run())

    def overhead(self) -> Overhead:
        """What recording itself has cost so far."""
        return self._require().writer.overhead()

    def record_observer_effect(self, effect: ObserverEffect) -> None:
        """Write into the run what measuring changed; see `telemetry.observer`."""
        self._require().writer.write({"type": "observer_effect", **attrs.asdict(effect)})

    def _require(self) -> "Session":
        if self._session is None:
            why = "its mode is 'off'" if self._mode == "off" else "it was not started"
            raise TelemetryError(f"The recorder has recorded nothing: {why}.")
        if self._is_forked():
            raise TelemetryError("The recorder belongs to the process that this one was forked of.")
        return self._session

    def _is_recording(self) -> bool:
        return self._session is not None and not self._is_closed and not self._is_forked()

    def _is_forked(self) -> bool:
        # A child has neither our threads nor a right to our file.
        return os.getpid() != self._pid


def _check(path: str | os.PathLike[str] | None, mode: str, period_s: float) -> None:
    if mode not in MODES:
        raise TelemetryError(f"`mode` is {mode!r}; use one of {', '.join(map(repr, MODES))}.")
    if not (MIN_PERIOD_S <= period_s < math.inf):
        raise TelemetryError(
            f"`period_s` is {period_s!r}; give a time from {MIN_PERIOD_S} s: sampling faster "
            "disturbs what it measures."
        )
    if path is not None and not Path(path).expanduser().parent.is_dir():
        raise TelemetryError(
            f"`path` is {os.fspath(path)!r}, but there is no folder {str(Path(path).parent)!r}; "
            "make it first."
        )
