"""`audit`: what a step program asks of a device, counted without one. Needs torch.

    def make(device):                       # the buffers and the program, on any device
        world = DecodeWorld(device)
        return lambda: world.step()

    print(audit(make))                      # operations, custom kernels, bytes

On the "meta" device tensors have shapes and no values, so a program runs in no time and without
memory, and cannot read a value: that ends the audit with a finding. What "meta" does not notice
are copies from the host. `fake_accelerator` does: a made-up device beside the CPU, where torch
offers it.

Operations that torch composes of others count as those others here, which can be more than a
device would launch: hold budgets against custom operations, or against earlier audits.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

from graphs.backend import Program
from graphs.findings import Finding, FindingKind
from graphs.inspection import (
    HostReads,
    caller,
    complaints,
    devices_of,
    line_of,
    op_name,
    tensors_in,
)
from graphs.statics import storage_id

_SET_UP = "_setup_privateuseone_for_python_backend"
_TORCH_NAMESPACES = frozenset({"aten", "prims", "prim"})


@attrs.frozen
class Audit:
    """What one run of a program asked for.

    Attributes:
        device: Where it ran.
        ops: How often each operation that does something ran, by name, as "aten::mm".
        num_views: Operations that only look at memory in another way, not counted in `ops`.
        read_bytes: What operations read, each input once per operation.
        written_bytes: What they wrote.
        copies: Operations over two kinds of devices, as "cpu and gpu: aten::copy_".
        findings: What keeps the program from being captured.
        is_complete: False if the program had to read a value, which ended the run.
    """

    device: str
    ops: Mapping[str, int]
    num_views: int
    read_bytes: int
    written_bytes: int
    copies: tuple[str, ...]
    findings: tuple[Finding, ...]
    is_complete: bool

    @property
    def num_ops(self) -> int:
        """Operations that do something."""
        return sum(self.ops.values())

    @property
    def custom_ops(self) -> Mapping[str, Mapping[str, int]]:
        """Operations that are not torch's own, by namespace and name."""
        found: dict[str, dict[str, int]] = {}
        for full_name, count in self.ops.items():
            namespace, _, name = full_name.partition("::")
            if namespace not in _TORCH_NAMESPACES:
                found.setdefault(namespace, {})[name] = count
        return found

    @property
    def num_syncs(self) -> int:
        """Reads of device values by the host."""
        return sum(finding.kind is FindingKind.HOST_SYNC for finding in self.findings)

    def __str__(self) -> str:
        """Lay it out as a table."""
        head = (
            f"{self.num_ops} operations on {self.device}, {self.num_views} views, "
            f"{self.read_bytes / 1e6:.2f} MB read, {self.written_bytes / 1e6:.2f} MB written, "
            f"{len(self.copies)} copies, {self.num_syncs} syncs"
        )
        by_count = sorted(self.ops.items(), key=lambda item: (-item[1], item[0]))
        lines = [head, *(f"{count:8d}  {name}" for name, count in by_count)]
        lines += [f"    copy  {copy}" for copy in self.copies]
        lines += [f"   wrong  {finding}" for finding in self.findings]
        return "\n".join([*lines, *([] if self.is_complete else ["   the run ended there"])])


def audit(
    make_program: Callable[[torch.device], Program], device: torch.device | str = "meta"
) -> Audit:
    """Run a program once and count.

    Args:
        make_program: Allocates on the given device and makes the program. Not counted.
        device: "meta", or what `fake_accelerator` gives.
    """
    device = torch.device(device)
    with torch.no_grad():
        program = make_program(device)
        counter = _Counter()
        is_complete = True
        try:
            with HostReads(counter.report_host_read), counter:
                program()
        except RuntimeError as error:  # which `NotImplementedError` is, too
            if "aten::empty_strided" in str(error):
                # What a made-up device says when asked for a tensor of host numbers.
                counter.report(FindingKind.HOST_CONSTANT, "torch.tensor", line_of(error))
            if not counter.findings:
                raise  # not for want of a value: the program is broken
            is_complete = False
    return Audit(
        device.type,
        dict(counter.ops),
        counter.num_views,
        counter.read_bytes,
        counter.written_bytes,
        tuple(counter.copies),
        tuple(counter.findings),
        is_complete,
    )


def has_fake_accelerator() -> bool:
    """Whether this torch can make up a device (its interface for that is experimental)."""
    return _SET_UP in vars(backend_registration)


@contextlib.contextmanager
def fake_accelerator(name: str = "gpu") -> Iterator[torch.device]:
    """Make up a device that is not the CPU, for `audit`; `has_fake_accelerator` must hold.

    The name is registered with torch for the life of the process, and only one can be.
    """
    if torch._C._get_privateuse1_backend_name() != name:
        vars(backend_registration)[_SET_UP](name)
    with FakeTensorMode():
        yield torch.device(name)


class _Counter(TorchDispatchMode):
    """Counts operations. While one runs, the mode is off: what it calls inside is not counted."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: Counter[str] = Counter()
        self.num_views = 0
        self.read_bytes = 0
        self.written_bytes = 0
        self.copies: list[str] = []
        self.findings: list[Finding] = []

    def report(self, kind: FindingKind, detail: str, where: str) -> None:
        """Note a finding, unless one of its kind was noted at that line: one cause, one finding."""
        if (kind, where) not in {(finding.kind, finding.where) for finding in self.findings}:
            self.findings.append(Finding(kind, detail, where))

    def report_host_read(self, name: str) -> None:
        self.report(FindingKind.HOST_SYNC, name, caller())

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for kind in complaints(func, args, kwargs):
            self.report(kind, op_name(func), caller())
        result = func(*args, **kwargs)
        devices = devices_of(args, kwargs, result)
        if len(devices) > 1:
            self.copies.append(f"{' and '.join(sorted(devices))}: {op_name(func)} at {caller()}")
            # Reported again, as `to` has only its result elsewhere.
            self.report(FindingKind.MIXED_DEVICES, op_name(func), caller())
        self._count(func, args, kwargs, result)
        return result

    def _count(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        given = {storage_id(tensor): tensor for tensor in tensors_in((args, kwargs))}
        made = [tensor for tensor in tensors_in(result) if storage_id(tensor) not in given]
        changed = _changed(func, args, kwargs)
        if not made and not changed:
            self.num_views += 1
            return
        self.ops[op_name(func)] += 1
        self.read_bytes += sum(_num_bytes(tensor) for tensor in given.values())
        self.written_bytes += sum(_num_bytes(tensor) for tensor in (*made, *changed))


def _changed(
    func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """The arguments that an operation writes to."""
    if torch.Tag.inplace_view in func.tags:
        return []
    changed: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            changed += tensors_in(given)
    return changed


def _num_bytes(tensor: torch.Tensor) -> int:
    """Of a view, without what it repeats by a stride of 0."""
    num_elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        num_elements *= size if stride != 0 else 1
    return num_elements * tensor.element_size() if tensor.numel() else 0
