"""Hands the steps and samples of a run on to an app's own sinks while it goes on."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from telemetry.records import Value

NUM_STEPS = 8  # handed on at once: a sink holds the interpreter meanwhile


class LiveSink(Protocol):
    """Takes in a run as it happens, such as `telemetry.sinks.prometheus.Metrics`.

    It is called by the recorder's writer thread, about each second and one call at a time; never by
    the engine's or the sampler's.
    """

    def on_steps(self, steps: Sequence[Any]) -> None:
        """Take in step records of the engine, in order, at least one."""

    def on_sample(self, values: Mapping[str, Value], *, duration_s: float) -> None:
        """Take in readings of sensors by name, and how long reading them took."""


class Feed:
    """Queues what the writer drains, and hands it on a few at a time.

    A sink that raises gets nothing more: an app's mistake must cost neither the recording nor the
    engine.

    Args:
        sinks: Who gets what was recorded.

    Attributes:
        failures: Class and error of each sink that was dropped since somebody took them out.
    """

    def __init__(self, sinks: Sequence[LiveSink]) -> None:
        self.failures: list[tuple[str, str]] = []
        self._sinks = list(sinks)
        self._steps: deque[Any] = deque()
        self._samples: deque[tuple[Mapping[str, Value], float]] = deque()

    def add_steps(self, steps: Sequence[Any]) -> None:
        """Queue steps."""
        if self._sinks:
            self._steps.extend(steps)

    def add_sample(self, names: Sequence[str], values: Sequence[Value], duration_ns: int) -> None:
        """Queue what one read of a provider gave."""
        if self._sinks:
            self._samples.append((dict(zip(names, values, strict=True)), duration_ns / 1e9))

    def hand_on(self) -> bool:
        """Give the sinks the next few; whether more is waiting."""
        steps = [self._steps.popleft() for _ in range(min(NUM_STEPS, len(self._steps)))]
        sample = self._samples.popleft() if self._samples else None
        for sink in tuple(self._sinks):
            try:
                if steps:
                    sink.on_steps(steps)
                if sample is not None:
                    sink.on_sample(sample[0], duration_s=sample[1])
            except Exception as error:  # noqa: BLE001 - whatever it is, it is told in the run
                self._sinks.remove(sink)
                self.failures.append((type(sink).__name__, f"{type(error).__name__}: {error}"))
        return bool(self._steps or self._samples)
