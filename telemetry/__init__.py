"""Leaf library: GPU and host sensors, a recorder, a memory ledger and reports.

It measures any engine that describes itself and calls a hook after each step, and does not know
that `nanovllm` exists:

    with Recorder(llm, path="run.jsonl") as recorder:
        with recorder.window("warm decode"):
            llm.generate(prompts)
    recorder.report().to_html("run.html")

An app that is scraped by Prometheus gets `/metrics` from the same recorder:

    with serve(port=9100) as metrics, Recorder(llm, sinks=[metrics]):  # telemetry.sinks.prometheus
        ...

`import telemetry` loads neither torch nor pynvml.
"""

from telemetry.errors import (
    DeviceLostError,
    RunFileError,
    SchemaVersionError,
    TelemetryError,
)
from telemetry.observer import measure_observer_effect
from telemetry.recorder import Recorder
from telemetry.run import Run
from telemetry.sinks.jsonl import read_run

__all__ = [
    "DeviceLostError",
    "Recorder",
    "Run",
    "RunFileError",
    "SchemaVersionError",
    "TelemetryError",
    "measure_observer_effect",
    "read_run",
]
