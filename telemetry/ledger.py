"""Where a device's memory is: rows from what is known, and a residual that makes them sum up.

Pure. A row without a figure says why. The residual is what no row accounts for, and is always
shown: a ledger that sums up by leaving things out would be of no use when memory runs out.
"""

from collections.abc import Mapping
from typing import Any

import attrs

from telemetry.records import Facts, Ledger, LedgerRow, Value


@attrs.frozen
class MemoryFacts:
    """What a ledger is made from.

    Attributes:
        device: "type" of the device, as the engine describes it.
        memory: "weights_bytes" and "kv_cache_bytes", as the engine counts them.
        graphs: "captures", each with "bucket", "pool_bytes" and "driver_bytes", and "counts": what
            a bucket counts, if not "rows".
        values: Sensor's name -> value; `torch.allocated_peak_bytes` of the whole run.
        reasons: Sensor's name -> why it has no value.
        touched_blocks: The share of the K/V blocks that were written at some time, from 0 to 1;
            None if not known.
    """

    device: Facts
    memory: Facts
    graphs: Facts = attrs.field(factory=dict)
    values: Mapping[str, Value] = attrs.field(factory=dict)
    reasons: Mapping[str, str] = attrs.field(factory=dict)
    touched_blocks: float | None = None


def build_ledger(t_ns: int, facts: MemoryFacts) -> Ledger:
    """The ledger of the device that the engine runs on; its rows sum to the total exactly."""
    builder = _Builder(facts)
    if facts.device.get("type") == "cpu":
        total, source = _cpu(builder)
    else:
        total, source = _gpu(builder)
    builder.residual(total)
    return Ledger(t_ns, str(facts.device.get("type")), total, source, tuple(builder.rows))


def _gpu(build: "_Builder") -> tuple[int | None, str]:
    build.sensor("driver_reserved", "Reserved by the driver", "nvml.memory_reserved_bytes")
    weights, kv_cache = build.engine_rows()
    graph_pools, graph_driver = build.graph_rows()
    named = (weights or 0) + (kv_cache or 0) + graph_pools
    reserved = build.value("torch.reserved_bytes")
    peak = build.value("torch.allocated_peak_bytes")
    activations = slack = None
    if reserved is not None and peak is not None:
        activations = max(0, min(peak, reserved) - named)
        slack = max(0, reserved - named - activations)
    why = build.reason("torch.reserved_bytes")
    build.row(
        "activations_peak",
        "Activations, at their peak",
        activations,
        "peak that torch's allocator gave out, less weights, K/V and graphs",
        why,
        estimate=True,
    )
    build.row(
        "allocator_slack",
        "Kept by the allocator, not given out",
        slack,
        "what torch's allocator holds, less the rows above",
        why,
    )
    own = build.value("nvml.process_memory_bytes")
    held = named if reserved is None else reserved
    build.row(
        "context",
        "CUDA context and libraries",
        None if own is None else max(0, own - held - graph_driver),
        "what the driver counts for this process, less "
        + (
            "weights, K/V and graphs: activations are in it" if reserved is None else "torch's part"
        ),
        build.reason("nvml.process_memory_bytes"),
        estimate=reserved is None,
    )
    build.sensor("other_processes", "Other processes", "nvml.other_processes_memory_bytes")
    build.sensor("free", "Free", "nvml.memory_free_bytes")
    total = build.value("nvml.memory_total_bytes")
    if total is None:
        return None, build.reason("nvml.memory_total_bytes")
    return total, "NVML: memory_total"


def _cpu(build: "_Builder") -> tuple[int | None, str]:
    rss = build.value("host.rss_bytes")
    shared = build.value("host.shared_bytes") or 0
    weights, kv_cache = build.engine_rows(resident=build.facts.touched_blocks)
    other_own = None if rss is None else rss - (weights or 0) - (kv_cache or 0)
    why = build.reason("host.rss_bytes")
    if other_own is not None and other_own < 0:
        # The rows above count memory that was set aside and never written. None of them can be
        # told from the rest, so that the process is one row.
        build.rows.clear()
        build.row("process", "This process", rss, "resident memory")
        for name, label in (
            ("weights", "Weights"),
            ("kv_cache", "K/V cache"),
            ("python_and_libraries", "Python and libraries"),
        ):
            why = "in the row of the process: not all of it is resident"
            build.row(name, label, None, "", why, is_elsewhere=True)
    else:
        build.row(
            "python_and_libraries",
            "Python and libraries, activations",
            other_own,
            "resident memory of the process, less weights and K/V",
            why,
        )
    used = build.value("host.memory_used_bytes")
    limit = build.value("host.memory_limit_bytes")
    # Mapped files count as resident with us and as reclaimable with the machine.
    others = free = None
    if used is not None and limit is not None and rss is not None:
        others = max(0, used - (rss - shared))
        free = max(0, limit - used - shared)
    why = build.reason("host.memory_used_bytes")
    build.row(
        "other_processes",
        "Other processes, the system",
        others,
        "memory in use, less the resident memory of this process that is not of files",
        why,
        estimate=True,
    )
    build.row(
        "free",
        "Free or reclaimable",
        free,
        "limit less memory in use, less files that this process maps",
        why,
        estimate=True,
    )
    if limit is None:
        return None, build.reason("host.memory_limit_bytes")
    return limit, "control group's limit, or the machine's memory"


class _Builder:
    """Collects rows."""

    def __init__(self, facts: MemoryFacts) -> None:
        self.facts = facts
        self.rows: list[LedgerRow] = []
        self._in_residual: list[str] = []

    def value(self, sensor: str) -> int | None:
        value = self.facts.values.get(sensor)
        return None if value is None else int(value)

    def reason(self, sensor: str) -> str:
        return self.facts.reasons.get(sensor, f"{sensor} has no value")

    def row(
        self,
        name: str,
        label: str,
        num_bytes: int | None,
        source: str,
        reason: str | None = None,
        *,
        estimate: bool = False,
        is_elsewhere: bool = False,
    ) -> None:
        missing = reason if num_bytes is None else None
        if num_bytes is None and not is_elsewhere:
            self._in_residual.append(label)
        self.rows.append(
            LedgerRow(name, label, num_bytes, source, missing, estimate and num_bytes is not None)
        )

    def sensor(self, name: str, label: str, sensor: str) -> None:
        self.row(name, label, self.value(sensor), sensor, self.reason(sensor))

    def engine_rows(self, resident: float | None = None) -> tuple[int | None, int | None]:
        """Rows of what the engine counts itself; `resident` is the share of K/V that has memory."""
        memory = self.facts.memory
        untold = "the engine does not tell"
        weights, kv_cache = memory.get("weights_bytes"), memory.get("kv_cache_bytes")
        self.row("weights", "Weights", weights, "as the engine counts them", untold)
        if resident == 0 and kv_cache is not None:
            why = "no step ended with a block in use: what was written is in the row below"
            self.row("kv_cache", "K/V cache", None, "", why, is_elsewhere=True)
            return weights, None
        source = "as the engine counts it"
        if resident is not None and kv_cache is not None:
            kv_cache = round(kv_cache * resident)
            source = "the share of its blocks that held something at once, while recording"
        self.row("kv_cache", "K/V cache", kv_cache, source, untold, estimate=resident is not None)
        return weights, kv_cache

    def graph_rows(self) -> tuple[int, int]:
        """Rows of the captured graphs by bucket; bytes in pools, and bytes outside of torch."""
        captures = self.facts.graphs.get("captures") or ()
        pools: dict[tuple[Any, str], int] = {}
        for capture in captures:
            bucket = capture.get("bucket"), str(capture.get("counts", "rows"))
            pools[bucket] = pools.get(bucket, 0) + int(capture.get("pool_bytes") or 0)
        parts = [capture.get("driver_bytes") for capture in captures]
        is_known = all(part is not None for part in parts)
        driver = sum(map(int, parts)) if is_known else 0
        for (bucket, counts), num_bytes in pools.items():
            self.row(
                f"graph_pool_{bucket}" + ("" if counts == "rows" else f"_{counts}"),
                f"Graphs of {bucket} {counts}",
                num_bytes,
                "growth of the shared pool at its capture",
            )
        if pools:
            self.row(
                "graph_driver",
                "Graphs, the driver's part",
                driver if is_known else None,
                "growth of the driver's count at the captures, less torch's",
                "the captures did not measure it: it stays in the row of the context",
                is_elsewhere=self.value("nvml.process_memory_bytes") is not None,
            )
        return sum(pools.values()), driver

    def residual(self, total: int | None) -> None:
        known = sum(row.num_bytes for row in self.rows if row.num_bytes is not None)
        source = "the total less all rows above"
        if self._in_residual:
            source += f"; it holds: {', '.join(self._in_residual)}"
        self.row(
            "residual",
            "Not accounted for",
            None if total is None else total - known,
            source,
            "the total is unknown",
        )
