"""Finds the device that the engine runs on among those that NVML knows, by its UUID.

The environment (`CUDA_VISIBLE_DEVICES`, `CUDA_DEVICE_ORDER`) is never parsed: indices of CUDA and
of NVML differ, and both may be given as prefixes of UUIDs. The UUID is the one name that both use.
"""

from collections.abc import Iterator
from typing import Any

import attrs

from telemetry.providers.nvml_errors import code_of
from telemetry.providers.nvml_library import NvmlUnavailableError


@attrs.frozen
class NvmlDevice:
    """The handles to read from.

    Attributes:
        memory: Handle for memory and processes: the MIG slice where there is one.
        gpu: Handle of the whole GPU, for power, energy, clocks and temperature.
        is_slice: Whether these differ.
        uuid: As NVML writes it.
    """

    memory: Any
    gpu: Any
    is_slice: bool
    uuid: str


def find_device(nvml: Any, uuid: str | None) -> NvmlDevice:
    """The device with the UUID that torch gives, with or without its prefix.

    Without a UUID, the machine's only GPU.

    Raises:
        NvmlUnavailableError: There is none, or no telling which.
    """
    whole = [NvmlDevice(h, h, False, nvml.nvmlDeviceGetUUID(h)) for h in _gpus(nvml)]
    if not whole:
        raise NvmlUnavailableError("NVML lists no GPU")
    if uuid is None:
        if len(whole) > 1:
            raise NvmlUnavailableError(
                f"the engine names no UUID, and NVML lists {len(whole)} GPUs"
            )
        return whole[0]
    slices = (child for device in whole for child in _slices(nvml, device.gpu))
    for devices in (whole, slices):
        for device in devices:
            if _matches(device.uuid, uuid):
                return device
    listed = ", ".join(device.uuid for device in whole)
    raise NvmlUnavailableError(f"NVML lists no device with the UUID {uuid}; it lists {listed}")


def _matches(listed: str, wanted: str) -> bool:
    # torch leaves out the prefix "GPU-" or "MIG-" and may differ in case.
    return listed.lower().endswith(wanted.lower())


def _gpus(nvml: Any) -> Iterator[Any]:
    """Handles of the whole GPUs; one that has fallen off the bus is passed over."""
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            yield nvml.nvmlDeviceGetHandleByIndex(index)
        except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_NoPermission):
            continue


def _slices(nvml: Any, gpu: Any) -> Iterator[NvmlDevice]:
    """The MIG slices of a GPU; none where it has none or is not divided."""
    try:
        if nvml.nvmlDeviceGetMigMode(gpu)[0] == 0:
            return
        count = nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
        return
    for index in range(count):
        try:
            child = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
        except nvml.NVMLError_NotFound:
            continue  # not every slot need be in use
        yield NvmlDevice(child, gpu, True, nvml.nvmlDeviceGetUUID(child))


def device_facts(nvml: Any, device: NvmlDevice) -> dict[str, Any]:
    """Name, versions and limits; what the device does not tell is left out."""
    facts: dict[str, Any] = {"uuid": device.uuid, "is_mig_slice": device.is_slice}
    reads = {
        "name": lambda: nvml.nvmlDeviceGetName(device.gpu),
        "driver_version": nvml.nvmlSystemGetDriverVersion,
        "cuda_version": lambda: _cuda_version(nvml.nvmlSystemGetCudaDriverVersion_v2()),
        "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(device.gpu) / 1e3,
        "max_sm_clock_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(device.gpu, nvml.NVML_CLOCK_SM),
        "max_memory_clock_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(
            device.gpu, nvml.NVML_CLOCK_MEM
        ),
        "persistence_mode": lambda: bool(nvml.nvmlDeviceGetPersistenceMode(device.gpu)),
    }
    for name, read in reads.items():
        try:
            facts[name] = read()
        except nvml.NVMLError as error:
            if code_of(error) == nvml.NVML_ERROR_GPU_IS_LOST:
                raise
    return facts


def _cuda_version(number: int) -> str:
    # 13010 is 13.1.
    return f"{number // 1000}.{number % 1000 // 10}"
