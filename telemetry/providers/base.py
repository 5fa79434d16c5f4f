"""What a provider is, and the one way that its sensors are probed, read and given up."""

import enum
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import attrs

from telemetry.records import Facts, Sensor, Value

MIN_COST_CALLS, MAX_COST_CALLS = 8, 32
COST_BUDGET_NS = 20_000_000
SLOW_COST_US = 1_000
MANUAL_COST_US = 5_000
MAX_GAPS_IN_A_ROW = 5


class Tier(enum.Enum):
    """When a sensor is read."""

    FAST = "fast"  # each tick of the sampler
    SLOW = "slow"  # about each second
    EDGES = "edges"  # begin and end of windows, by the thread that opens and closes them
    MANUAL = "manual"  # when asked for


class Verdict(enum.Enum):
    """What a failed read means."""

    OFF = "off"  # not to be had here: the sensor is off for the run
    GAP = "gap"  # this once; off after `MAX_GAPS_IN_A_ROW`
    EMPTY = "empty"  # nothing to tell, which is no failure
    REOPEN = "reopen"  # the library lost its state: open it again, once
    LOST = "lost"  # the device is gone: nothing is read any more


class SensorUnavailableError(Exception):
    """A read found that its sensor can not be had, for the reason that the message gives."""


Read = Callable[[], tuple[Value, ...]]
Classify = Callable[[Exception], tuple[Verdict, str]]


class Provider(Protocol):
    """A source of figures, open from its construction until `close`."""

    @property
    def name(self) -> str:
        """First part of its sensors' names."""

    @property
    def lost(self) -> str | None:
        """Why the device is gone, if it is."""

    def facts(self) -> Facts:
        """What never changes: names, versions, limits."""

    def sensors(self) -> tuple[Sensor, ...]:
        """Every sensor with its present status, those that are not available included."""

    def names(self, tier: Tier) -> tuple[str, ...]:
        """Names of the tier's sensors, in the order of `read`."""

    def read(self, tier: Tier) -> tuple[Value, ...]:
        """Read a tier. Never raises for what is known to fail, and makes no CUDA call."""

    def close(self) -> None:
        """Let go of what it holds. May be called twice."""


@attrs.frozen
class Probe:
    """One call that gives the values of one or more sensors.

    Attributes:
        sensors: What it gives, in order.
        tier: When to read it, if its cost allows: above 1 ms a fast one becomes slow, and above
            5 ms either becomes manual. Those read at windows' edges stay there.
        read: The call; its result has one value per sensor.
    """

    sensors: tuple[Sensor, ...]
    tier: Tier
    read: Read


def tier_for(cost_us: float, wanted: Tier) -> Tier:
    """Where a sensor of this cost belongs."""
    if wanted not in (Tier.FAST, Tier.SLOW):
        return wanted
    if cost_us > MANUAL_COST_US:
        return Tier.MANUAL
    return Tier.SLOW if cost_us > SLOW_COST_US else wanted


def measure_cost_us(read: Read) -> float:
    """Median duration of a read in microseconds, over 32 calls; slow ones are called 8 times.

    The median, and of no fewer: on a busy machine a thread is put aside in some of them.
    """
    durations: list[int] = []
    while len(durations) < MIN_COST_CALLS or (
        len(durations) < MAX_COST_CALLS and sum(durations) < COST_BUDGET_NS
    ):
        begin = time.perf_counter_ns()
        read()
        durations.append(time.perf_counter_ns() - begin)
    return statistics.median(durations) / 1e3


class _Slot:
    """A probe with its status."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.tier = probe.tier
        self.cost_us: float | None = None
        self.reason: str | None = None
        self.num_gaps = 0
        self.num_gaps_in_a_row = 0
        self.missing: tuple[Value, ...] = (None,) * len(probe.sensors)


class Probes:
    """A provider made of probes.

    Args:
        name: First part of its sensors' names.
        probes: What to read; each is read a few times here to learn whether it works and what it
            costs.
        unavailable: Sensors that are known not to be had, each with its reason.
        classify: What an error of a read means, with the reason to show.
        errors: The types of error that `classify` knows; any other is a bug and is raised.
        reopen: Brings the library back after it lost its state.
        facts: What never changes.
        on_close: Lets go of what the probes hold.
    """

    def __init__(
        self,
        name: str,
        probes: Sequence[Probe],
        *,
        unavailable: Sequence[Sensor] = (),
        classify: Classify,
        errors: tuple[type[Exception], ...],
        reopen: Callable[[], None] | None = None,
        facts: Facts | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._name = name
        self._unavailable = tuple(unavailable)
        self._classify = classify
        self._errors: tuple[type[Exception], ...] = (*errors, SensorUnavailableError)
        self._reopen = reopen
        self._facts = dict(facts or {})
        self._on_close = on_close
        self._lost: str | None = None
        self._pid = os.getpid()
        self._slots = [_Slot(probe) for probe in probes]
        for slot in self._slots:
            self._open(slot)
        # Fixed from here on: a sensor that goes off leaves None in its place.
        self._by_tier = {
            tier: tuple(slot for slot in self._slots if slot.tier is tier) for tier in Tier
        }

    @property
    def name(self) -> str:
        """First part of its sensors' names."""
        return self._name

    @property
    def lost(self) -> str | None:
        """Why the device is gone, if it is."""
        return self._lost

    def facts(self) -> Facts:
        """What never changes: names, versions, limits."""
        return self._facts

    def sensors(self) -> tuple[Sensor, ...]:
        """Every sensor with its present status."""
        return (
            *(
                attrs.evolve(
                    sensor,
                    tier=slot.tier.value,
                    cost_us=slot.cost_us,
                    reason=slot.reason,
                    num_gaps=slot.num_gaps,
                )
                for slot in self._slots
                for sensor in slot.probe.sensors
            ),
            *self._unavailable,
        )

    def names(self, tier: Tier) -> tuple[str, ...]:
        """Names of the tier's sensors, in the order of `read`."""
        return tuple(s.name for slot in self._by_tier[tier] for s in slot.probe.sensors)

    def read(self, tier: Tier) -> tuple[Value, ...]:
        """Read a tier; None for what fails."""
        values: list[Value] = []
        # A forked child shares the parent's handles, which are of no use to it.
        is_own = os.getpid() == self._pid
        for slot in self._by_tier[tier]:
            if slot.reason is None and self._lost is None and is_own:
                values += self._read(slot)
            else:
                values += slot.missing
        return tuple(values)

    def close(self) -> None:
        """Let go of what the probes hold."""
        if self._on_close is not None and os.getpid() == self._pid:
            self._on_close()
        self._on_close = None

    def _open(self, slot: _Slot) -> None:
        for _ in range(MAX_GAPS_IN_A_ROW):
            self._read(slot)
            if slot.num_gaps_in_a_row == 0 or slot.reason is not None:
                break
        if slot.reason is None and self._lost is None:
            slot.cost_us = measure_cost_us(lambda: self._read(slot))
            slot.tier = tier_for(slot.cost_us, slot.tier)

    def _read(self, slot: _Slot) -> tuple[Value, ...]:
        try:
            values = slot.probe.read()
        except self._errors as error:
            return self._after(slot, error)
        slot.num_gaps_in_a_row = 0
        return values

    def _after(self, slot: _Slot, error: Exception, *, again: bool = True) -> tuple[Value, ...]:
        """What to give instead of the values, and what becomes of the sensor."""
        verdict, reason = self._judge(error)
        if verdict is Verdict.REOPEN and again and self._reopen is not None:
            # Once in a run: a library that is shut down over and over is somebody's wish.
            reopen, self._reopen = self._reopen, None
            try:
                reopen()
                return slot.probe.read()
            except self._errors as second:
                return self._after(slot, second, again=False)
        match verdict:
            case Verdict.EMPTY:
                slot.num_gaps_in_a_row = 0
            case Verdict.GAP:
                slot.num_gaps += 1
                slot.num_gaps_in_a_row += 1
                if slot.num_gaps_in_a_row >= MAX_GAPS_IN_A_ROW:
                    slot.reason = f"{reason}, {MAX_GAPS_IN_A_ROW} times in a row"
            case Verdict.LOST:
                self._lost = reason
            case Verdict.OFF | Verdict.REOPEN:
                slot.num_gaps += 1
                slot.reason = reason
        return slot.missing

    def _judge(self, error: Exception) -> tuple[Verdict, str]:
        if isinstance(error, SensorUnavailableError):
            return Verdict.OFF, str(error)
        return self._classify(error)


def all_unavailable(name: str, sensors: Sequence[Sensor], reason: str) -> Probes:
    """A provider that has nothing to read, and says why for each of its sensors."""
    return Probes(
        name,
        (),
        unavailable=[attrs.evolve(sensor, reason=reason) for sensor in sensors],
        classify=lambda error: (Verdict.OFF, str(error)),
        errors=(),
    )


def read_all(provider: Provider, tiers: Sequence[Tier]) -> Mapping[str, Value]:
    """Sensors' names -> values, of several tiers."""
    values: dict[str, Value] = {}
    for tier in tiers:
        values |= zip(provider.names(tier), provider.read(tier), strict=True)
    return values
