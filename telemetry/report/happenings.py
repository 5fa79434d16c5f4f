"""What happened in a run besides plain decoding: what a slow moment may be explained by."""

from collections.abc import Iterator, Sequence

import attrs

from telemetry.report.analysis import Analysis
from telemetry.report.format import human
from telemetry.report.sensors import readings

# Bits of NVML's clocks event reasons that mean "slower than it could be".
THROTTLES = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
REASON_BITS = "nvml.clock_event_reasons_bits"

_EVENT_LABELS = {
    "gc": "garbage collection",
    "pause": "recording paused",
    "resume": "recording resumed",
    "device_lost": "device lost",
    "sensor_off": "sensor switched off",
    "sink_off": "sink switched off",
    "late": "sampler late",
    "dropped": "records dropped",
}


@attrs.frozen
class Happening:
    """Something with a begin and an end, in seconds from the begin of the run.

    Attributes:
        start_s: Begin.
        end_s: End; equal to the begin where it has no length.
        kind: "prefill", "preempt", "miss", "throttle", or the kind of an event.
        label: For people.
    """

    start_s: float
    end_s: float
    kind: str
    label: str


def happenings(analysis: Analysis) -> list[Happening]:
    """Everything that happened, in order of begin."""
    found = [*_in_steps(analysis), *_events(analysis), *_throttled(analysis)]
    return sorted(found, key=lambda h: h.start_s)


def _in_steps(analysis: Analysis) -> Iterator[Happening]:
    steps = analysis.run.steps
    for i in range(len(steps)):
        if not (steps.num_prefill_tokens[i] or steps.num_preempted[i] or steps.fallback[i]):
            continue
        start_s, end_s = float(analysis.starts_s[i]), float(analysis.ends_s[i])
        if steps.num_prefill_tokens[i]:
            label = f"prefill of {steps.num_prefill_tokens[i]:,} tokens"
            yield Happening(start_s, end_s, "prefill", label)
        if steps.num_preempted[i]:
            label = f"{steps.num_preempted[i]} preempted"
            yield Happening(start_s, end_s, "preempt", label)
        if steps.fallback[i] is not None:
            yield Happening(start_s, end_s, "miss", f"not replayed: {steps.fallback[i]}")


def _events(analysis: Analysis) -> Iterator[Happening]:
    zero = analysis.run.info.start_mono_ns
    for event in analysis.run.events:
        start_s = (event.t_ns - zero) / 1e9
        length_s = event.data.get("duration_ns", 0) / 1e9
        label = _EVENT_LABELS.get(event.kind, event.kind)
        if length_s:
            label += f", {human(length_s, 's')}"
        if "reason" in event.data:
            label += f": {event.data['reason']}"
        yield Happening(start_s, start_s + length_s, event.kind, label)


def _throttled(analysis: Analysis) -> Iterator[Happening]:
    """Stretches of like throttles; a sample speaks for the time since the one before it."""
    found = readings(analysis.run, REASON_BITS)
    if found is None:
        return
    begin_s = before_s = found.times_s[0]
    before: Sequence[str] = ()
    for at_s, bits in zip(found.times_s, found.values, strict=True):
        names = throttles(int(bits))
        if names != before:
            if before:
                yield Happening(begin_s, before_s, "throttle", f"throttled: {', '.join(before)}")
            begin_s, before = before_s, names
        before_s = at_s
    if before:
        yield Happening(begin_s, before_s, "throttle", f"throttled: {', '.join(before)}")


def throttles(bits: int) -> Sequence[str]:
    """The names of the throttles that are set."""
    return [name for bit, name in THROTTLES.items() if bits & bit]
