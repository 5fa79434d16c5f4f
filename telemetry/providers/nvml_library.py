"""Loads NVML through `pynvml`, once per process."""

import atexit
import contextlib
import functools
import os
from typing import Any

from telemetry.providers.base import SensorUnavailableError
from telemetry.providers.nvml_errors import classify


class NvmlUnavailableError(SensorUnavailableError):
    """NVML can not be used here, for the reason that the message gives."""


def load(pid: int) -> Any:
    """The `pynvml` module, initialized.

    It is initialized once per process and shut down when the process ends: initializing over and
    over is slow, and has hung drivers. NVML counts its users, so that this neither takes it from
    others in the process nor keeps it open for them.

    Args:
        pid: This process: what a forked child inherits is not usable in it.

    Raises:
        NvmlUnavailableError: With the reason.
    """
    pynvml = _load(pid)
    try:
        pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError_Uninitialized:
        initialize(pynvml)  # other code shut it down more often than it opened it
    except pynvml.NVMLError as error:
        raise NvmlUnavailableError(classify(error)[1]) from error
    return pynvml


@functools.cache
def _load(pid: int) -> Any:
    pynvml = _import()
    initialize(pynvml)
    atexit.register(_shut_down, pynvml, pid)
    return pynvml


def forget() -> None:
    """Have the next `load` start afresh, for tests that swap the library beneath."""
    _load.cache_clear()


def initialize(pynvml: Any) -> None:
    """Count this process in as a user of NVML.

    Raises:
        NvmlUnavailableError: With the reason.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NvmlUnavailableError(classify(error)[1]) from error


def _import() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise NvmlUnavailableError(
            f"the package nvidia-ml-py can not be imported ({error})"
        ) from error
    # An unrelated package `pynvml` installs a module of the same name without these.
    if "_nvmlGetFunctionPointer" not in vars(pynvml) or "nvmlMemory_v2" not in vars(pynvml):
        raise NvmlUnavailableError(
            "the module pynvml is not the one of nvidia-ml-py, or too old: "
            "uninstall the package pynvml and install nvidia-ml-py"
        )
    return pynvml


def _shut_down(pynvml: Any, pid: int) -> None:
    if os.getpid() != pid:
        return
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()
