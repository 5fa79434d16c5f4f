"""The figures that NVML gives: which call reads each, its unit and what may stand in for it."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import attrs

from telemetry.providers.base import Probe, SensorUnavailableError, Tier
from telemetry.providers.nvml_device import NvmlDevice
from telemetry.providers.nvml_errors import FALL_BACK, classify, code_of
from telemetry.records import Sensor, Value

# Attributes of a field's value, by the type that it says it has.
_FIELD_VALUES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")

MAX_PID = 2**31 - 1


def _sensor(
    name: str,
    unit: str,
    source: str,
    kind: Literal["gauge", "counter"] = "gauge",
    tier: Tier = Tier.FAST,
) -> Sensor:
    return Sensor(f"nvml.{name}", unit, source, kind, tier=tier.value)


MEMORY = tuple(
    _sensor(f"memory_{part}_bytes", "bytes", "nvmlDeviceGetMemoryInfo_v2")
    for part in ("used", "free", "reserved", "total")
)
UTILIZATION = tuple(
    _sensor(f"{part}_utilization_percent", "%", "nvmlDeviceGetUtilizationRates")
    for part in ("gpu", "memory")
)
POWER = _sensor("power_mw", "mW", "field 186, power now")
ENERGY = _sensor("energy_mj", "mJ", "field 83, energy since the driver was loaded", "counter")
SM_CLOCK = _sensor("sm_clock_mhz", "MHz", "nvmlDeviceGetClockInfo(SM)")
REASONS = _sensor("clock_event_reasons_bits", "bits", "nvmlDeviceGetCurrentClocksEventReasons")
TEMPERATURE = _sensor("temperature_c", "C", "nvmlDeviceGetTemperatureV", tier=Tier.SLOW)
MEMORY_TEMPERATURE = _sensor("memory_temperature_c", "C", "field 82", tier=Tier.SLOW)
MEMORY_CLOCK = _sensor("memory_clock_mhz", "MHz", "nvmlDeviceGetClockInfo(memory)", tier=Tier.SLOW)
THROTTLED = {
    74: _sensor("throttled_by_power_cap_ns", "ns", "field 74", "counter", Tier.SLOW),
    76: _sensor("throttled_by_sync_boost_ns", "ns", "field 76", "counter", Tier.SLOW),
    269: _sensor("throttled_by_thermal_sw_ns", "ns", "field 269", "counter", Tier.SLOW),
    270: _sensor("throttled_by_thermal_hw_ns", "ns", "field 270", "counter", Tier.SLOW),
    271: _sensor("throttled_by_power_brake_ns", "ns", "field 271", "counter", Tier.SLOW),
}
PROCESSES = tuple(
    attrs.evolve(
        _sensor(
            f"{whose}_memory_bytes",
            "bytes",
            "nvmlDeviceGetComputeRunningProcesses",
            tier=Tier.EDGES,
        ),
        scope=scope,
    )
    for whose, scope in (("process", "process"), ("other_processes", "device"))
)
ECC = tuple(
    _sensor(
        f"ecc_{kind}_count",
        "count",
        "nvmlDeviceGetMemoryErrorCounter, since load",
        "counter",
        Tier.EDGES,
    )
    for kind in ("corrected", "uncorrected")
)
REMAPPED_ROWS = _sensor(
    "remapped_rows_count", "count", "nvmlDeviceGetRemappedRows", "counter", Tier.EDGES
)

FIELDS = {186: POWER, 83: ENERGY, 82: MEMORY_TEMPERATURE, **THROTTLED}
FAST_FIELDS = (186, 83)

ALL = (
    *MEMORY,
    *UTILIZATION,
    POWER,
    ENERGY,
    SM_CLOCK,
    REASONS,
    TEMPERATURE,
    MEMORY_TEMPERATURE,
    MEMORY_CLOCK,
    *THROTTLED.values(),
    *PROCESSES,
    *ECC,
    REMAPPED_ROWS,
)


class NvmlSensors:
    """Builds the probes of one device.

    Args:
        nvml: The `pynvml` module.
        device: Gives the device's handles as they are now; they change when NVML is reopened.
        pid: Whose memory is this process's.
    """

    def __init__(self, nvml: Any, device: Callable[[], NvmlDevice], pid: int) -> None:
        self._nvml = nvml
        self._device = device
        self._pid = pid

    def probes(self) -> tuple[list[Probe], list[Sensor]]:
        """Every probe, and the sensors for which there is no call on this driver."""
        nvml = self._nvml
        field_probes, unavailable = self._fields()
        fast = [
            self._memory(),
            self._of_gpu(UTILIZATION, self._utilization),
            *field_probes,
            self._of_gpu((SM_CLOCK,), lambda gpu: nvml.nvmlDeviceGetClockInfo(gpu, 1)),
            self._either(
                (REASONS, nvml.nvmlDeviceGetCurrentClocksEventReasons),
                (
                    attrs.evolve(REASONS, source="nvmlDeviceGetCurrentClocksThrottleReasons"),
                    nvml.nvmlDeviceGetCurrentClocksThrottleReasons,
                ),
            ),
        ]
        slow = [
            self._either(
                (TEMPERATURE, lambda gpu: nvml.nvmlDeviceGetTemperatureV(gpu, 0)),
                (
                    attrs.evolve(TEMPERATURE, source="nvmlDeviceGetTemperature"),
                    lambda gpu: nvml.nvmlDeviceGetTemperature(gpu, 0),
                ),
                tier=Tier.SLOW,
            ),
            self._of_gpu(
                (MEMORY_CLOCK,), lambda gpu: nvml.nvmlDeviceGetClockInfo(gpu, 2), tier=Tier.SLOW
            ),
        ]
        edges = [
            self._processes(),
            *(self._ecc(sensor, kind) for kind, sensor in enumerate(ECC)),
            self._of_gpu(
                (REMAPPED_ROWS,),
                # Corrected and uncorrected ones; the other two parts are flags.
                lambda gpu: sum(nvml.nvmlDeviceGetRemappedRows(gpu)[:2]),
                tier=Tier.EDGES,
            ),
        ]
        return [*fast, *slow, *edges], unavailable

    def _scope(self) -> str:
        return "whole GPU" if self._device().is_slice else "device"

    def _of_gpu(
        self, sensors: Sequence[Sensor], read: Callable[[Any], Any], tier: Tier = Tier.FAST
    ) -> Probe:
        """A probe of the whole GPU; `read` gives a value, or a tuple of one for each sensor."""
        device = self._device
        scoped = tuple(attrs.evolve(sensor, scope=self._scope()) for sensor in sensors)
        if len(scoped) > 1:
            return Probe(scoped, tier, lambda: tuple(read(device().gpu)))
        return Probe(scoped, tier, lambda: (read(device().gpu),))

    def _either(
        self, *candidates: tuple[Sensor, Callable[[Any], Any]], tier: Tier = Tier.FAST
    ) -> Probe:
        """The first candidate that this driver has; the first of all if it has none."""
        for sensor, read in candidates:
            try:
                read(self._device().gpu)
            except self._nvml.NVMLError as error:
                if code_of(error) in FALL_BACK:
                    continue
            return self._of_gpu((sensor,), read, tier)
        sensor, read = candidates[0]
        return self._of_gpu((sensor,), read, tier)

    def _utilization(self, gpu: Any) -> tuple[Value, ...]:
        rates = self._nvml.nvmlDeviceGetUtilizationRates(gpu)
        return rates.gpu, rates.memory

    def _ecc(self, sensor: Sensor, kind: int) -> Probe:
        nvml = self._nvml
        return self._of_gpu(
            (sensor,),
            # 0: since the driver was loaded; 2: of the device's memory.
            lambda gpu: nvml.nvmlDeviceGetMemoryErrorCounter(gpu, kind, 0, 2),
            tier=Tier.EDGES,
        )

    def _memory(self) -> Probe:
        nvml, device = self._nvml, self._device
        scope = "MIG slice" if device().is_slice else "device"
        sensors = tuple(attrs.evolve(sensor, scope=scope) for sensor in MEMORY)

        def read() -> tuple[Value, ...]:
            m = nvml.nvmlDeviceGetMemoryInfo(device().memory, nvml.nvmlMemory_v2)
            return m.used, m.free, m.reserved, m.total

        def read_v1() -> tuple[Value, ...]:
            m = nvml.nvmlDeviceGetMemoryInfo(device().memory)
            return m.used, m.free, None, m.total

        try:
            read()
        except nvml.NVMLError as error:
            if code_of(error) in FALL_BACK:
                source = "nvmlDeviceGetMemoryInfo, which counts the driver's reserve as used"
                old = tuple(attrs.evolve(sensor, source=source) for sensor in sensors)
                return Probe(old, Tier.FAST, read_v1)
        return Probe(sensors, Tier.FAST, read)

    def _processes(self) -> Probe:
        nvml, device = self._nvml, self._device
        # By version: the function without one raises an error of another kind on older drivers.
        listing = nvml.nvmlDeviceGetComputeRunningProcesses_v3
        try:
            listing(device().memory)
        except nvml.NVMLError as error:
            if code_of(error) in FALL_BACK:
                listing = nvml.nvmlDeviceGetComputeRunningProcesses_v2
        return Probe(
            PROCESSES, Tier.EDGES, lambda: memory_by_process(listing(device().memory), self._pid)
        )

    def _fields(self) -> tuple[list[Probe], list[Sensor]]:
        """Probes of field values: one call for the fast ones and one for the slow ones."""
        scope = 0
        usable, failures = self._usable_fields(scope)
        if 186 not in usable:
            # Grace Hopper and its like answer for the module only.
            of_module, _ = self._usable_fields(1)
            scope = 1 if 186 in of_module else 0
        sensors = {
            field: attrs.evolve(sensor, scope=self._scope()) for field, sensor in FIELDS.items()
        }
        if scope == 1:
            usable = [186, *usable]
            sensors[186] = attrs.evolve(sensors[186], source="field 186, power now of the module")
        probes = []
        for tier, is_fast in ((Tier.FAST, True), (Tier.SLOW, False)):
            fields = [field for field in usable if (field in FAST_FIELDS) == is_fast]
            if fields:
                probes.append(
                    Probe(
                        tuple(sensors[field] for field in fields),
                        tier,
                        self._read_fields(fields, scope),
                    )
                )
        nvml = self._nvml
        instead = {
            186: (nvml.nvmlDeviceGetPowerUsage, "nvmlDeviceGetPowerUsage, mean of about 1 s"),
            83: (
                nvml.nvmlDeviceGetTotalEnergyConsumption,
                "nvmlDeviceGetTotalEnergyConsumption",
            ),
        }
        unavailable = []
        for field, sensor in FIELDS.items():
            if field in usable:
                continue
            if field in instead:
                read, source = instead[field]
                probes.append(self._of_gpu((attrs.evolve(sensor, source=source),), read))
            else:
                unavailable.append(attrs.evolve(sensors[field], reason=failures[field]))
        return probes, unavailable

    def _usable_fields(self, power_scope: int) -> tuple[list[int], dict[int, str]]:
        """Fields that this driver answers, and why not the others."""
        nvml = self._nvml
        wanted = [(field, power_scope if field == 186 else 0) for field in FIELDS]
        try:
            values = nvml.nvmlDeviceGetFieldValues(self._device().gpu, wanted)
        except nvml.NVMLError as error:
            return [], dict.fromkeys(FIELDS, classify(error)[1])
        codes = {value.fieldId: value.nvmlReturn for value in values}
        usable = [field for field in FIELDS if codes[field] == 0]
        return usable, {
            field: classify(nvml.NVMLError(code))[1] for field, code in codes.items() if code
        }

    def _read_fields(
        self, fields: Sequence[int], power_scope: int
    ) -> Callable[[], tuple[Value, ...]]:
        nvml, device = self._nvml, self._device
        wanted = [(field, power_scope if field == 186 else 0) for field in fields]

        def read() -> tuple[Value, ...]:
            values = nvml.nvmlDeviceGetFieldValues(device().gpu, wanted)
            # The call succeeds even where fields fail: each carries a code of its own.
            codes = [value.nvmlReturn for value in values]
            if all(codes) or 15 in codes:
                raise nvml.NVMLError(15 if 15 in codes else codes[0])
            return tuple(
                None if value.nvmlReturn else getattr(value.value, _FIELD_VALUES[value.valueType])
                for value in values
            )

        return read


def memory_by_process(processes: Sequence[Any], own_pid: int) -> tuple[int, int]:
    """Bytes of this process and of all others, by the driver's list.

    Raises:
        SensorUnavailableError: The list can not be believed, or does not name this process.
    """
    own, others = None, 0
    for process in processes:
        if not 0 < process.pid <= MAX_PID:
            raise SensorUnavailableError(
                f"the driver's list of processes is scrambled: it names the pid {process.pid}"
            )
        if process.usedGpuMemory is None:
            raise SensorUnavailableError("this driver does not tell memory by process")
        if process.pid == own_pid:
            own = process.usedGpuMemory
        else:
            others += process.usedGpuMemory
    if own is None:
        raise SensorUnavailableError(
            "this process is not in the driver's list: it holds no memory there, or its pid "
            "differs in the container"
        )
    return own, others
