"""torch's allocator on the GPU: what it holds, gave out and keeps in graphs' pools.

Read at windows' edges only, by the thread that opens and closes them: the statistics are the
host's own bookkeeping (no CUDA call), but they take time and a lock that allocations take too.
"""

import sys
from collections.abc import Mapping
from typing import Any, Literal

from telemetry.providers.base import (
    Probe,
    Probes,
    SensorUnavailableError,
    Tier,
    Verdict,
    all_unavailable,
)
from telemetry.records import Sensor, Value

_SOURCE = "torch.cuda.memory_stats"


def _sensor(
    name: str, unit: str, source: str = _SOURCE, kind: Literal["gauge", "counter"] = "gauge"
) -> Sensor:
    return Sensor(f"torch.{name}", unit, source, kind, scope="process", tier=Tier.EDGES.value)


SENSORS = (
    _sensor("allocated_bytes", "bytes"),
    _sensor("allocated_peak_bytes", "bytes", f"{_SOURCE}, since the last edge"),
    _sensor("reserved_bytes", "bytes"),
    _sensor("inactive_split_bytes", "bytes"),
    _sensor("requested_bytes", "bytes"),
    _sensor("graph_pools_bytes", "bytes", f"{_SOURCE}: reserved_bytes_by_private_pools"),
    _sensor("allocation_retries_count", "count", kind="counter"),
)


def open_torch_allocator(device: Mapping[str, Any]) -> Probes:
    """The allocator's sensors for the device that an engine describes."""
    if device.get("type") != "cuda":
        return all_unavailable(
            "torch", SENSORS, "the engine runs on the CPU, where torch keeps no such statistics"
        )
    # An engine on a GPU has loaded it; this library has no use for it otherwise.
    torch = sys.modules.get("torch")
    if torch is None:
        return all_unavailable("torch", SENSORS, "the engine does not use torch")
    index = device.get("index") or 0

    def read() -> tuple[Value, ...]:
        stats = torch.cuda.memory_stats_as_nested_dict(index)
        if not stats:
            raise SensorUnavailableError("torch has not set up CUDA in this process")
        values = allocator_values(stats)
        # So that the next edge tells the peak of what lies between.
        torch.cuda.reset_peak_memory_stats(index)
        return values

    return Probes(
        "torch",
        [Probe(SENSORS, Tier.EDGES, read)],
        classify=lambda error: (Verdict.OFF, f"{type(error).__name__}: {error}"),
        errors=(RuntimeError, KeyError),
    )


def allocator_values(stats: Mapping[str, Any]) -> tuple[Value, ...]:
    """The sensors' values, in order, of torch's nested statistics."""

    def current(name: str) -> int:
        return int(stats[name]["all"]["current"])

    pools = stats.get("reserved_bytes_by_private_pools")
    return (
        current("allocated_bytes"),
        int(stats["allocated_bytes"]["all"]["peak"]),
        current("reserved_bytes"),
        current("inactive_split_bytes"),
        current("requested_bytes"),
        None if pools is None else sum(int(p["all"]["current"]) for p in pools.values()),
        int(stats["num_alloc_retries"]),
    )
