"""The process and its machine: memory, processor time, faults, switches, pauses, energy.

A provider like any other: a machine without a GPU gets a full report from it.
"""

import contextlib
import os
import sys
import threading
import time

import psutil

from telemetry.providers.base import Probe, Probes, Tier, Verdict
from telemetry.providers.gc_watch import GcWatch
from telemetry.providers.host_memory import find_memory_limit
from telemetry.providers.rapl import Rapl
from telemetry.records import Sensor, Value


def open_host(gc_watch: GcWatch) -> Probes:
    """The sensors of this process and of its machine.

    Args:
        gc_watch: Counts the garbage collector's pauses; stays the caller's to close.
    """
    process = psutil.Process()
    statm = Statm()
    limit = find_memory_limit()
    rapl = Rapl()
    probes = [
        statm.probe(process),
        Probe(
            (_sensor("cpu_ns", "ns", "time.process_time_ns", "counter"),),
            Tier.FAST,
            lambda: (time.process_time_ns(),),
        ),
        Probe(
            (
                _sensor("gc_pause_ns", "ns", "gc.callbacks", "counter"),
                _sensor("gc_collections_count", "count", "gc.callbacks", "counter"),
            ),
            Tier.FAST,
            lambda: (gc_watch.pause_ns, gc_watch.num_collections),
        ),
        _usage_probe(process),
        Probe(
            (_sensor("threads_count", "count", "psutil.Process().num_threads"),),
            Tier.SLOW,
            lambda: (process.num_threads(),),
        ),
        Probe(
            (
                Sensor(
                    "host.available_bytes",
                    "bytes",
                    "psutil.virtual_memory().available",
                    scope="machine",
                ),
            ),
            Tier.SLOW,
            lambda: (psutil.virtual_memory().available,),
        ),
        Probe(
            (
                Sensor("host.memory_used_bytes", "bytes", limit.used_source, scope=limit.scope),
                Sensor("host.memory_limit_bytes", "bytes", limit.source, scope=limit.scope),
            ),
            Tier.SLOW,
            lambda: (limit.read_used(), limit.limit_bytes),
        ),
        Probe(
            (
                Sensor(
                    "host.energy_uj",
                    "uJ",
                    "RAPL: processor packages, all programs together",
                    "counter",
                    scope="machine",
                ),
            ),
            Tier.SLOW,
            rapl.read,
        ),
    ]
    return Probes(
        "host",
        probes,
        classify=lambda error: (Verdict.GAP, f"{type(error).__name__}: {error}"),
        errors=(OSError, psutil.Error),
        facts=_facts(),
        on_close=statm.close,
    )


def _sensor(name: str, unit: str, source: str, kind: str = "gauge") -> Sensor:
    return Sensor(
        f"host.{name}", unit, source, "counter" if kind == "counter" else "gauge", scope="process"
    )


class Statm:
    """The process's memory by `/proc/self/statm`, or by psutil where there is none.

    The file is opened once and read at offset 0 each time: 1.5 us, where psutil takes 60.

    Args:
        path: The file.
    """

    def __init__(self, path: str = "/proc/self/statm") -> None:
        self._fd: int | None = None
        with contextlib.suppress(OSError):
            self._fd = os.open(path, os.O_RDONLY)

    def probe(self, process: psutil.Process) -> Probe:
        """Resident memory, and the part of it that is files and shared memory."""
        fd = self._fd
        if fd is None:
            source = "psutil.Process().memory_info()"

            def read() -> tuple[Value, ...]:
                return process.memory_info().rss, None

        else:
            source = "/proc/self/statm"
            page = os.sysconf("SC_PAGE_SIZE")

            def read() -> tuple[Value, ...]:
                fields = os.pread(fd, 128, 0).split()
                return int(fields[1]) * page, int(fields[2]) * page

        names = ("rss_bytes", "shared_bytes")
        return Probe(tuple(_sensor(n, "bytes", source) for n in names), Tier.FAST, read)

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def _usage_probe(process: psutil.Process) -> Probe:
    """Page faults and switches of the processor to other threads."""
    names = (
        "minor_faults_count",
        "major_faults_count",
        "voluntary_switches_count",
        "involuntary_switches_count",
    )
    if sys.platform == "win32":
        source = "psutil.Process().num_ctx_switches"

        def read() -> tuple[Value, ...]:
            switches = process.num_ctx_switches()
            return None, None, switches.voluntary, switches.involuntary
    else:
        import resource

        source = "getrusage(RUSAGE_SELF)"

        def read() -> tuple[Value, ...]:
            usage = resource.getrusage(resource.RUSAGE_SELF)
            return usage.ru_minflt, usage.ru_majflt, usage.ru_nvcsw, usage.ru_nivcsw

    return Probe(
        tuple(_sensor(name, "count", source, "counter") for name in names), Tier.SLOW, read
    )


def _facts() -> dict[str, object]:
    return {
        "pid": os.getpid(),
        "python": sys.version.split()[0],
        "platform": sys.platform,
        "num_cpus": os.cpu_count(),
        "num_threads_at_start": threading.active_count(),
    }
