"""`record`: run a program once, and note every operation so that it can be run again. Needs torch.

A recording is a CPU's stand-in for a captured graph. Replaying it runs no Python of the program,
on the very tensors of the first run: what was a Python number then stays that number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from graphs.errors import CaptureError
from graphs.findings import Finding, FindingKind
from graphs.inspection import (
    HostReads,
    caller,
    complaints,
    leaves_memory_unset,
    op_name,
    tensors_in,
)
from graphs.statics import storage_id


@attrs.frozen(eq=False)
class RecordedOp:
    """One operation, and where its results go.

    Attributes:
        func: What to call.
        args: Aliases of the arguments as they were at the call.
        kwargs: Likewise.
        targets: For each result, in flattened order, the memory it was given in the first run;
            None for a result that lies in the memory of an argument.
    """

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    targets: tuple[torch.Tensor | None, ...]

    def run(self) -> None:
        """Run it again, into the same memory."""
        results = tree_leaves(self.func(*self.args, **self.kwargs))
        for target, result in zip(self.targets, results, strict=True):
            if target is None:
                continue
            if target.shape != result.shape:
                raise CaptureError(
                    f"{self.func} made {list(target.shape)} when recorded and "
                    f"{list(result.shape)} when replayed: a captured shape cannot change."
                )
            target.copy_(result)


@attrs.frozen(eq=False)
class Recording:
    """A program as the operations of one run.

    Attributes:
        ops: In order. Views are left out: their memory is that of what they view.
        created: One tensor for each memory that the program created.
        findings: What would go wrong on a device.
    """

    ops: tuple[RecordedOp, ...]
    created: tuple[torch.Tensor, ...]
    findings: tuple[Finding, ...]


def record(program: Callable[[], object], statics: Iterable[torch.Tensor]) -> Recording:
    """Run `program` under a recorder.

    Args:
        program: A step. What it returns is looked at only to complain about tensors in it.
        statics: Every tensor that it may use and has not made itself.
    """
    recorder = _Recorder(statics)
    with torch.no_grad(), HostReads(recorder.report_host_read), recorder:
        result = program()
    for tensor in tensors_in(result):
        if storage_id(tensor) in recorder.created:
            recorder.report(FindingKind.ESCAPED_TENSOR, f"a returned {_describe(tensor)}", "")
    return Recording(
        tuple(recorder.ops), tuple(recorder.created.values()), tuple(recorder.findings)
    )


def find_escapes(
    program: Callable[[], object], statics: Iterable[torch.Tensor]
) -> tuple[Finding, ...]:
    """Run `program`, and report each tensor it made that somebody still holds afterwards."""
    watch = _EscapeWatch(statics)
    with torch.no_grad(), watch:
        program()
    return tuple(
        Finding(FindingKind.ESCAPED_TENSOR, f"{detail} is still held", where)
        for reference, detail, where in watch.made.values()
        if not reference.expired()
    )


class _Recorder(TorchDispatchMode):
    """Notes operations. While one runs, the mode is off: what it calls inside is not noted."""

    def __init__(self, statics: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[RecordedOp] = []
        self.created: dict[int, torch.Tensor] = {}
        self.findings: list[Finding] = []
        self._is_inside_op = False
        # Held, so that no memory can be given up and taken again under the same id.
        self._known = {storage_id(tensor): tensor for tensor in statics}

    def report(self, kind: FindingKind, detail: str, where: str | None = None) -> None:
        finding = Finding(kind, detail, caller() if where is None else where)
        if finding not in self.findings:
            self.findings.append(finding)

    def report_host_read(self, name: str) -> None:
        if not self._is_inside_op:  # where a kernel written in Python may do as it likes
            self.report(FindingKind.HOST_SYNC, name)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self._inspect(func, args, kwargs)
        held_args, held_kwargs = tree_map_only(
            torch.Tensor, torch.Tensor.detach, (tuple(args), dict(kwargs))
        )
        self._is_inside_op = True
        try:
            result = func(*args, **kwargs)
        finally:
            self._is_inside_op = False
        targets = self._adopt(args, kwargs, result)
        if self._has_effect(func, targets):
            self.ops.append(RecordedOp(func, held_args, held_kwargs, targets))
        return result

    def _inspect(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        kinds = list(complaints(func, args, kwargs))
        for kind in kinds:
            self.report(kind, op_name(func))
        for tensor in tensors_in((args, kwargs)):
            if storage_id(tensor) not in self._known:
                self._known[storage_id(tensor)] = tensor
                if FindingKind.HOST_CONSTANT not in kinds:  # which is the same, said better
                    detail = f"{op_name(func)} of a {_describe(tensor)}"
                    self.report(FindingKind.EXTERNAL_TENSOR, detail)

    def _adopt(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> tuple[torch.Tensor | None, ...]:
        """Take new memory into the pool.

        Judged by the memory and not by the schema: some operations, as `reshape`, return a view
        or a copy as it happens.
        """
        given = {storage_id(tensor) for tensor in tensors_in((args, kwargs))}
        targets: list[torch.Tensor | None] = []
        for leaf in tree_leaves(result):
            if not isinstance(leaf, torch.Tensor) or storage_id(leaf) in given:
                targets.append(None)
                continue
            held = leaf.detach()
            targets.append(held)
            if storage_id(held) not in self._known:
                self._known[storage_id(held)] = held
                self.created[storage_id(held)] = held
        return tuple(targets)

    def _has_effect(self, func: OpOverload, targets: tuple[torch.Tensor | None, ...]) -> bool:
        if leaves_memory_unset(func) or torch.Tag.inplace_view in func.tags:
            return False
        return func._schema.is_mutable or any(target is not None for target in targets)


class _EscapeWatch(TorchDispatchMode):
    """Notes new memory by weak references, so that it is given up as if nobody watched."""

    def __init__(self, statics: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, tuple[StorageWeakRef, str, str]] = {}
        self._statics = {storage_id(tensor) for tensor in statics}

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given = {storage_id(tensor) for tensor in tensors_in((args, kwargs))} | self._statics
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            if storage_id(tensor) not in given:
                reference = StorageWeakRef(tensor.untyped_storage())
                detail = f"a {_describe(tensor)} of {op_name(func)}"
                self.made[storage_id(tensor)] = (reference, detail, caller())
        return result


def _describe(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} tensor"
