"""What the dispatcher shows about one operation: does it stop a capture, and why. Needs torch.

Shared by the tape, which runs a program for real, and the audit, which runs it on fake tensors.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from graphs.findings import FindingKind

_HOST_READS = {
    torch.Tensor.tolist: "Tensor.tolist",
    torch.Tensor.numpy: "Tensor.numpy",
    torch.Tensor.__array__: "Tensor.__array__",
    torch.Tensor.cpu: "Tensor.cpu",
}
"""Methods that hand values to the host without an operation that a dispatch mode could see."""

_OWN_PACKAGES = ("torch", "graphs", "contextlib")
_INDEX_OPS = frozenset({"aten::index", "aten::index_put", "aten::index_put_"})
_LIFT_OPS = frozenset({"aten::lift_fresh", "aten::lift_fresh_copy"})
_EMPTY_OPS = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::empty_permuted",
        "aten::new_empty",
        "aten::new_empty_strided",
    }
)


class HostReads(TorchFunctionMode):
    """Calls `report` with the name of each method that reads a tensor behind the dispatcher."""

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__()
        self._report = report

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _HOST_READS:
            self._report(_HOST_READS[func])
        return func(*args, **(kwargs or {}))


def op_name(func: OpOverload) -> str:
    """Name an operation without its overload, as "aten::add"."""
    return func._schema.name


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested arguments or results."""
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def leaves_memory_unset(func: OpOverload) -> bool:
    """Whether the operation allocates and writes nothing."""
    return op_name(func) in _EMPTY_OPS


def complaints(
    func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[FindingKind]:
    """List what keeps this operation from being captured, judged by its schema and arguments."""
    name, tags = op_name(func), func.tags
    if torch.Tag.data_dependent_output in tags:
        yield FindingKind.HOST_SYNC
    if _has_dynamic_shape(func, args):
        yield FindingKind.DYNAMIC_SHAPE
    if torch.Tag.nondeterministic_seeded in tags and _dropout(func, args, kwargs) != 0.0:
        yield FindingKind.TORCH_RNG
    if name in _LIFT_OPS:
        yield FindingKind.HOST_CONSTANT
    if len({tensor.device.type for tensor in tensors_in((args, kwargs))}) > 1:
        yield FindingKind.MIXED_DEVICES


def devices_of(*trees: Any) -> frozenset[str]:
    """The types of devices that tensors in these lie on."""
    return frozenset(tensor.device.type for tensor in tensors_in(trees))


def caller() -> str:
    """The source line, outside torch and this library, that led to the current operation."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not _is_own(frame):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def line_of(error: BaseException) -> str:
    """The last source line, outside torch and this library, on the way to an error."""
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if not _is_own(frame):
            where = f"{Path(frame.f_code.co_filename).name}:{line}"
    return where


def _is_own(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _OWN_PACKAGES


def _has_dynamic_shape(func: OpOverload, args: tuple[Any, ...]) -> bool:
    if op_name(func) in _INDEX_OPS:
        # `index` is tagged as dynamic for the sake of masks; integer indices have fixed shapes.
        return any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(args[1]))
    return torch.Tag.dynamic_output_shape in func.tags


def _dropout(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float | None:
    """The `dropout_p` that an operation was called with; None if it takes none.

    Attention operations are tagged as random because of their dropout, which inference leaves 0.
    """
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p")
            return 0.0 if given is None else float(given)  # their default is 0
    return None
