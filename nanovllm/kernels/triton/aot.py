"""Compiles launches for devices that need not be there, and reads what they will take of them."""

import re
import subprocess
import tempfile
from typing import Any

import attrs
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from nanovllm.kernels.triton.launch import Launch

_WARP_SIZE = 32


@attrs.frozen
class Resources:
    """What one compiled kernel takes of a multiprocessor.

    Attributes:
        num_registers: Per thread.
        stack_bytes: Per thread, in device memory: registers that were spilled. 0 is wanted.
        shared_bytes: Shared memory per program.
    """

    num_registers: int
    stack_bytes: int
    shared_bytes: int


def compile_for(launch: Launch, arch: int) -> Any:
    """Compile a launch for a compute capability, such as 90, as launching it there would.

    What Triton specialises on (types, alignment, multiples of 16) is derived from the arguments by
    Triton itself; only the device is not asked.

    Returns:
        Triton's compiled kernel; its `asm` holds every stage down to the machine code.
    """
    function, target = launch.kernel.function, GPUTarget("cuda", arch, _WARP_SIZE)
    backend = make_backend(target)
    bind = create_function_from_signature(function.signature, function.params, backend)
    arguments = launch.kernel.options(launch.arguments, arch)
    bound, specialization, options = bind(**arguments)
    parsed, signature, constants, attributes = function._pack_args(
        backend, arguments, bound, specialization, options
    )
    source = ASTSource(function, signature, constants, attributes)
    return triton.compile(source, target=target, options=parsed.__dict__)


def resources(compiled: Any) -> Resources:
    """Read what a compiled kernel takes from its machine code, by the tool that Triton carries."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = knobs.nvidia.cuobjdump.path
        usage = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    numbers = {key: int(number) for key, number in re.findall(r"(\w+):(\d+)", usage)}
    return Resources(
        num_registers=numbers["REG"],
        stack_bytes=numbers["STACK"] + numbers["LOCAL"],
        shared_bytes=compiled.metadata.shared,
    )
