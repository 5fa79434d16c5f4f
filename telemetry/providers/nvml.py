"""The GPU's own figures, by NVML: memory, power, energy, clocks, temperature, throttling.

Only the files `nvml*.py` here touch `pynvml`. NVML is not CUDA: it may be called from any thread,
also while a graph is captured.
"""

import os

from telemetry.providers.base import Probes, all_unavailable
from telemetry.providers.nvml_device import NvmlDevice, device_facts, find_device
from telemetry.providers.nvml_errors import classify
from telemetry.providers.nvml_library import NvmlUnavailableError, initialize, load
from telemetry.providers.nvml_sensors import ALL, NvmlSensors


def open_nvml(uuid: str | None) -> Probes:
    """The sensors of the device with this UUID, as torch gives it.

    Where NVML can not be used the provider is open all the same, with the reason on each sensor.

    Args:
        uuid: Of the GPU or of the MIG slice; None to take the only GPU there is.
    """
    try:
        return _open(uuid)
    except NvmlUnavailableError as error:
        return all_unavailable("nvml", ALL, str(error))


def _open(uuid: str | None) -> Probes:
    pid = os.getpid()
    nvml = load(pid)
    try:
        device = find_device(nvml, uuid)
        facts = device_facts(nvml, device)
    except nvml.NVMLError as error:
        raise NvmlUnavailableError(classify(error)[1]) from error

    def present() -> NvmlDevice:
        return device

    def reopen() -> None:
        nonlocal device
        initialize(nvml)
        device = find_device(nvml, uuid)

    probes, unavailable = NvmlSensors(nvml, present, pid).probes()
    return Probes(
        "nvml",
        probes,
        unavailable=unavailable,
        classify=classify,
        errors=(nvml.NVMLError,),
        reopen=reopen,
        facts=facts,
    )
