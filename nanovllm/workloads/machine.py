"""What a number was measured on: a number without its machine is not a number."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil

SOURCE = Path(__file__).resolve().parents[2]
"""The folder that this package lies in: a checkout, or an environment's packages."""

PACKAGES = ("nanovllm", "torch", "numba", "numpy", "triton", "flash-attn", "transformers")


def machine_facts() -> dict[str, Any]:
    """The machine and the versions, without loading any of them."""
    return {
        "cpu": cpu_name(),
        "num_cpus": psutil.cpu_count(),
        "num_usable_cpus": num_usable_cpus(),
        "cpu_max_mhz": _max_mhz(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "commit": source_commit(),
        **{name: version for name in PACKAGES if (version := installed_version(name))},
    }


def gpu_facts(uuid: str | None) -> dict[str, Any]:
    """Driver, clocks and limits of a GPU; empty where there is none, or no driver to ask.

    Args:
        uuid: As torch tells it, with or without "GPU-" in front. None: the first GPU.
    """
    try:
        import pynvml  # delayed: only where somebody has a GPU to measure

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001  # no module, no driver, no permission: nothing to tell
        return {}
    try:
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
        mine = [h for h in handles if uuid is None or _uuid(pynvml, h).endswith(uuid.lower())]
        return _facts_of(pynvml, mine[0]) if mine else {}
    finally:
        pynvml.nvmlShutdown()


def cpu_name() -> str:
    """The processor's name, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []  # not Linux
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def num_usable_cpus() -> int:
    """CPUs that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux has it
        return psutil.cpu_count() or 1


def installed_version(package: str) -> str | None:
    """Version of a package, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def source_commit() -> str | None:
    """Commit of the checkout that this package runs from, "+" if it was changed since."""
    if not (SOURCE / ".git").exists():
        return None  # installed from a wheel

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(SOURCE), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        is_changed = git("--no-optional-locks", "status", "--porcelain", "--untracked-files=no")
        return commit + ("+" if is_changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _max_mhz() -> float | None:
    try:
        frequency = psutil.cpu_freq()
    except (OSError, NotImplementedError):
        return None
    return frequency.max or None if frequency else None  # 0: a virtual machine does not tell


def _uuid(pynvml: Any, handle: Any) -> str:
    return str(pynvml.nvmlDeviceGetUUID(handle)).lower()


def _facts_of(pynvml: Any, handle: Any) -> dict[str, Any]:
    questions = {
        "gpu": lambda: pynvml.nvmlDeviceGetName(handle),
        "driver": pynvml.nvmlSystemGetDriverVersion,
        "max_sm_mhz": lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "max_memory_mhz": lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_MEM),
        "power_limit_w": lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
        "persistence": lambda: bool(pynvml.nvmlDeviceGetPersistenceMode(handle)),
        "mig": lambda: bool(pynvml.nvmlDeviceGetMigMode(handle)[0]),
    }
    facts = {}
    for name, ask in questions.items():
        try:
            facts[name] = ask()
        except pynvml.NVMLError:
            continue  # not every GPU answers everything
    return facts
