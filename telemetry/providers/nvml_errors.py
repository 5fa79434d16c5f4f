"""What each error of NVML means for a run: one table, by the codes of nvml.h."""

from typing import Any

from telemetry.providers.base import Verdict

_TABLE = {
    1: (Verdict.REOPEN, "NVML was shut down by other code in this process"),
    2: (Verdict.OFF, "NVML refused the arguments (InvalidArgument)"),
    3: (Verdict.OFF, "not supported by this device or driver (NotSupported)"),
    4: (
        Verdict.OFF,
        "no permission (NoPermission): in a container, grant it the capability; profiling needs "
        "NVreg_RestrictProfilingToAdminUsers=0",
    ),
    6: (Verdict.EMPTY, "nothing found (NotFound)"),
    9: (Verdict.OFF, "the NVIDIA driver is not loaded (DriverNotLoaded)"),
    10: (Verdict.GAP, "the driver did not answer in time (Timeout)"),
    12: (
        Verdict.OFF,
        "libnvidia-ml was not found (LibraryNotFound): there is no NVIDIA driver here",
    ),
    13: (Verdict.OFF, "this driver has no such function (FunctionNotFound)"),
    15: (Verdict.LOST, "the GPU has fallen off the bus (GpuIsLost)"),
    16: (Verdict.LOST, "the GPU needs a reset (ResetRequired)"),
    18: (
        Verdict.OFF,
        "the driver in the kernel and its library differ in version (LibRmVersionMismatch): "
        "reboot or reload the driver",
    ),
    19: (Verdict.GAP, "the device was in use (InUse)"),
    21: (Verdict.EMPTY, "no data (NoData)"),
    25: (Verdict.OFF, "this driver knows another layout (ArgumentVersionMismatch)"),
    999: (Verdict.GAP, "the driver failed for a reason of its own (Unknown)"),
}

# After these, an older symbol of the same purpose is worth a try.
FALL_BACK = frozenset((3, 13, 25))


def code_of(error: Any) -> int:
    """The code that a `pynvml.NVMLError` carries."""
    return int(error.value)


def classify(error: Exception) -> tuple[Verdict, str]:
    """What an error of a read means, and the reason to show."""
    code = code_of(error)
    # A code that is not in the table is treated as one that may pass.
    return _TABLE.get(code, (Verdict.GAP, f"NVML error {code} ({error})"))
