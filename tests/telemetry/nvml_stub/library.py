"""Builds the stub of NVML, and points the real `pynvml` at it."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pynvml

from telemetry.providers import nvml_library

SOURCE = Path(__file__).parent / "stub.c"
SONAME = "libnvidia-ml.so.1"

GIB = 1 << 30

# A GPU that answers everything.
HEALTHY = {
    "total": 80 * GIB,
    "used": 40 * GIB,
    "reserved": GIB,
    "gpu_utilization": 97,
    "memory_utilization": 55,
    "power": 500_000,
    "energy": 1_000_000,
    "power_limit": 700_000,
    "sm_clock": 1980,
    "memory_clock": 3201,
    "max_sm_clock": 1980,
    "max_memory_clock": 3201,
    "temperature": 61,
    "reasons": 4,
    "persistence": 1,
    "ecc_corrected": 2,
    "ecc_uncorrected": 0,
    "remapped_corrected": 1,
    "remapped_uncorrected": 2,
    "field.186": 512_000,
    "field.186.uint": 1,
    "field.83": 2_000_000,
    "field.82": 70,
    "field.82.uint": 1,
    "field.74": 1_000,
    "field.76": 0,
    "field.269": 0,
    "field.270": 0,
    "field.271": 0,
}


def compiler():
    """The C compiler's name, or None."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def build(folder, *, old_driver=False):
    """Compile the stub; gives its path."""
    path = Path(folder) / SONAME
    options = ["-DOLD_DRIVER"] if old_driver else []
    subprocess.run(
        [
            *(compiler(), "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"),
            *(f"-Wl,-soname,{SONAME}", "-o", str(path), str(SOURCE), "-lpthread"),
            *options,
        ],
        check=True,
        timeout=120,
    )
    return path


class Stub:
    """The scripted driver."""

    def __init__(self, path):
        self.path = path
        self.lib = ctypes.CDLL(str(path))
        u64 = ctypes.c_ulonglong
        self.lib.stub_set.argtypes = [ctypes.c_int, ctypes.c_char_p, u64]
        self.lib.stub_process.argtypes = [ctypes.c_int, ctypes.c_uint, u64]
        self.lib.stub_fail.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_long]

    def set(self, device=0, **values):
        self.update(values, device)

    def update(self, values, device=0):
        for key, value in values.items():
            if value is None:
                self.lib.stub_unset(device, key.encode())
            else:
                self.lib.stub_set(device, key.encode(), value)

    def fail(self, function, code, *, after=0, times=-1):
        """Let a function fail, `times` times (-1: from then on), after some calls that succeed."""
        self.lib.stub_fail(function.encode(), code, after, times)

    def sleep(self, function, us):
        self.lib.stub_sleep(function.encode(), us)

    def calls(self, function):
        return self.lib.stub_calls(function.encode())

    def process(self, pid, used, device=0):
        self.lib.stub_process(device, pid, used)

    def uuid(self, device, uuid):
        self.lib.stub_uuid(device, uuid.encode())

    def gpus(self, count):
        self.lib.stub_gpus(count)

    @property
    def users(self):
        return self.lib.stub_users()


def plug_in(path):
    """Have `pynvml` use the library at `path`, with nothing scripted; None to unplug it."""
    nvml_library.forget()
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()
    pynvml._nvmlLib_refcount = 0
    if path is None:
        return None
    stub = Stub(path)
    stub.lib.stub_reset()
    pynvml.nvmlLib = stub.lib
    return stub
