"""A run as a trace for https://ui.perfetto.dev or chrome://tracing: Chrome's trace event JSON.

Steps and their parts are slices on one track, requests are asynchronous spans, sensors and queue
lengths are counters, and what happened once is an instant. Times are in microseconds of the clock
that `torch.profiler` writes too (Unix time), so that both traces lie over each other.
"""

import json
import os
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import attrs

from telemetry.run import Run

MAX_EVENTS = 1_000_000  # the viewers get slow beyond it

_PID = 1
_STEPS, _PARTS = 1, 2
_PART_NAMES = ("schedule", "execute", "postprocess")

TraceEvent = dict[str, Any]


@attrs.frozen
class Written:
    """What became of a trace: how many events it has, and how many were cut off at the cap."""

    num_events: int
    num_cut: int


def write_trace(run: Run, path: str | os.PathLike[str], *, max_events: int = MAX_EVENTS) -> Written:
    """Write a run as a trace; beyond `max_events` the rest is cut, counted and said in the trace.

    What is rare comes first, so that a cut costs steps at the end of the run and nothing else.
    """
    every = chain(
        _names(), _windows(run), _instants(run), _requests(run), _sensors(run), _steps(run)
    )
    num_events, num_cut = 0, 0
    with Path(path).open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for event in islice(every, max_events):
            file.write(",\n" if num_events else "")
            json.dump(event, file, separators=(",", ":"))
            num_events += 1
        num_cut = sum(1 for _ in every)
        other = {"run_id": run.info.run_id, "num_events_cut": num_cut}
        file.write(f'\n],"otherData":{json.dumps(other)}}}\n')
    return Written(num_events, num_cut)


def _event(run: Run, phase: str, name: str, t_ns: int, **more: Any) -> TraceEvent:
    since_start = t_ns - run.info.start_mono_ns
    # Integers first: a float holds no microseconds of Unix time and nanoseconds besides.
    ts = (run.info.start_wall_ns + since_start) / 1e3
    return {"ph": phase, "name": name, "ts": ts, "pid": _PID, **more}


def _names() -> Iterator[TraceEvent]:
    yield {"ph": "M", "name": "process_name", "pid": _PID, "args": {"name": "engine"}}
    for tid, name in ((_STEPS, "steps"), (_PARTS, "parts of steps")):
        yield {"ph": "M", "name": "thread_name", "pid": _PID, "tid": tid, "args": {"name": name}}


def _windows(run: Run) -> Iterator[TraceEvent]:
    for window in run.windows:
        end = run.last_ns if window.t1_ns is None else window.t1_ns
        key = {"cat": "window", "id": f"window {window.id}"}
        yield _event(run, "b", window.name, window.t0_ns, **key)
        yield _event(run, "e", window.name, end, **key)


def _instants(run: Run) -> Iterator[TraceEvent]:
    for event in run.events:
        args = {"args": dict(event.data)}
        duration_ns = event.data.get("duration_ns")
        if duration_ns:
            key = {"cat": event.kind, "id": f"{event.kind} {event.t_ns}"}
            yield _event(run, "b", event.kind, event.t_ns, **key, **args)
            yield _event(run, "e", event.kind, event.t_ns + duration_ns, **key)
        else:
            yield _event(run, "i", event.kind, event.t_ns, s="p", tid=_STEPS, **args)


def _requests(run: Run) -> Iterator[TraceEvent]:
    for request in run.requests:
        key = {"cat": "request", "id": request.request_id}
        args = {
            "prompt tokens": request.num_prompt_tokens,
            "prefix-hit tokens": request.num_prefix_hit_tokens,
            "generated tokens": request.num_generated_tokens,
            "preemptions": request.num_preemptions,
            "finish reason": request.finish_reason,
        }
        name = f"request {request.request_id}"
        yield _event(run, "b", name, request.arrival_ns, **key, args=args)
        if request.first_scheduled_ns is not None:
            yield _event(run, "n", "first step", request.first_scheduled_ns, **key)
        if request.first_token_ns is not None:
            yield _event(run, "n", "first token", request.first_token_ns, **key)
        yield _event(run, "e", name, request.finished_ns, **key)


def _sensors(run: Run) -> Iterator[TraceEvent]:
    for sensor in run.sensors:
        if sensor.kind != "gauge":
            continue
        series = run.get(sensor.name)
        for t_ns, value in zip(series.t_ns, series.values, strict=True):
            if value is not None:
                yield _event(run, "C", sensor.name, t_ns, args={sensor.unit: value})


def _steps(run: Run) -> Iterator[TraceEvent]:
    steps = run.steps
    for i in range(len(steps)):
        start, end = steps.t0_ns[i], steps.t1_ns[i]
        prefill = steps.num_prefill_tokens[i]
        kind = (
            "mixed"
            if prefill and steps.num_decode_tokens[i]
            else "prefill"
            if prefill
            else "decode"
        )
        args = {
            "index": steps.index[i],
            "rows": steps.num_rows[i],
            "decode tokens": steps.num_decode_tokens[i],
            "prefill tokens": prefill,
            "mode": steps.mode[i],
            "bucket": steps.bucket[i],
            "fallback": steps.fallback[i],
        }
        at = {"tid": _STEPS, "dur": (end - start) / 1e3}
        yield _event(run, "X", kind, start, **at, args=args)
        part_start = start
        for name, column in zip(
            _PART_NAMES, (steps.schedule_ns, steps.execute_ns, steps.postprocess_ns), strict=True
        ):
            if column[i]:
                yield _event(run, "X", name, part_start, tid=_PARTS, dur=column[i] / 1e3)
            part_start += column[i]
        queues = {"in the step": steps.num_rows[i], "waiting": steps.num_waiting[i]}
        yield _event(run, "C", "sequences", end, args=queues)
        blocks = {"used": steps.num_used_blocks[i], "free": steps.num_free_blocks[i]}
        yield _event(run, "C", "K/V blocks", end, args=blocks)
