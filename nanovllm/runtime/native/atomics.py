"""Atomic reads and writes of int64 by address, and how to wait: what threads meet on."""

import sys
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I64 = ir.IntType(64)
_HAS_SCHED_YIELD = sys.platform != "win32"
_IS_X86 = llvm.get_default_triple().startswith(("x86_64", "i686"))


def _pointer(b: Any, address: Any) -> Any:
    return b.inttoptr(address, _I64.as_pointer())


@intrinsic
def fetch_add(_typing: Any, address: Any, amount: Any) -> Any:
    """Add, and return what was there before. Orders all memory around it."""

    def codegen(_context: Any, b: Any, _signature: Any, arguments: Any) -> Any:
        return b.atomic_rmw("add", _pointer(b, arguments[0]), arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def load(_typing: Any, address: Any) -> Any:
    """Read; what the writer wrote before its `store` is seen after this."""

    def codegen(_context: Any, b: Any, _signature: Any, arguments: Any) -> Any:
        return b.load_atomic(_pointer(b, arguments[0]), ordering="seq_cst", align=8)

    return types.int64(types.int64), codegen


@intrinsic
def store(_typing: Any, address: Any, value: Any) -> Any:
    """Write; see `load`."""

    def codegen(context: Any, b: Any, _signature: Any, arguments: Any) -> Any:
        b.store_atomic(arguments[1], _pointer(b, arguments[0]), ordering="seq_cst", align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def pause(_typing: Any) -> Any:
    """Tell the CPU that this is a waiting loop: it saves power and frees the sister thread."""

    def codegen(context: Any, b: Any, _signature: Any, _arguments: Any) -> Any:
        if _IS_X86:
            signature = ir.FunctionType(ir.VoidType(), [])
            name = "llvm.x86.sse2.pause"
            b.call(cgutils.get_or_insert_function(b.module, signature, name), [])
        return context.get_dummy_value()

    return types.void(), codegen


def emit_fetch(b: Any, address: Any) -> None:
    """Ask for a cache line that is read soon. An address past the end does no harm."""
    pointer, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
    signature = ir.FunctionType(ir.VoidType(), [pointer, i32, i32, i32])
    prefetch = cgutils.get_or_insert_function(b.module, signature, "llvm.prefetch.p0i8")
    # For reading, kept in the outer caches, data.
    b.call(prefetch, [b.inttoptr(address, pointer), i32(0), i32(2), i32(1)])


@intrinsic
def fetch(_typing: Any, address: Any) -> Any:
    """The same, for compiled code."""

    def codegen(context: Any, b: Any, _signature: Any, arguments: Any) -> Any:
        emit_fetch(b, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def give_way(_typing: Any) -> Any:
    """Let the system run another thread on this core, if one is ready."""

    def codegen(context: Any, b: Any, _signature: Any, _arguments: Any) -> Any:
        if _HAS_SCHED_YIELD:
            signature = ir.FunctionType(ir.IntType(32), [])
            b.call(cgutils.get_or_insert_function(b.module, signature, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), codegen
