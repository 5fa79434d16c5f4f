"""The audit: counts that follow from the program, and an end where it would read a value."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from graphs.audit import audit, has_fake_accelerator
from graphs.findings import FindingKind
from tests.graphs import toy
from tests.graphs.toy import Fault

ROOT = Path(__file__).parent.parent.parent


def toy_audit(*faults, bucket=6):
    def make(device):
        return toy.ToyWorld(*faults, device=device).program(toy.KEYS[toy.PLAN.sizes.index(bucket)])

    return audit(make)


def small(function, *shape):
    """Audit a function of one tensor."""

    def make(device):
        x = torch.zeros(shape, device=device)
        return lambda: function(x)

    return audit(make)


def test_counts_operations_views_and_bytes():
    counted = small(lambda x: (x.view(8, 2).t() @ x.view(8, 2)).add_(1), 4, 4)

    assert counted.ops == {"aten::mm": 1, "aten::add_": 1}
    assert counted.num_ops == 2 and counted.num_views == 3
    # Of x 64 bytes, read once though it is both factors; then the [2, 2] product, read and written.
    assert counted.read_bytes == 64 + 16
    assert counted.written_bytes == 16 + 16
    assert counted.is_complete and not counted.findings and not counted.copies


def test_does_not_count_what_an_expanded_tensor_repeats():
    assert small(lambda x: x.expand(1000, 4) + 1, 4).read_bytes == 16


def test_counts_custom_operations_by_namespace():
    assert toy_audit().custom_ops == {"graphs_toy": {"store": 1}}


def test_counts_do_not_depend_on_the_bucket_but_bytes_do():
    large, small_one = toy_audit(bucket=6), toy_audit(bucket=1)

    assert large.ops == small_one.ops
    assert large.written_bytes > small_one.written_bytes


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault.BRANCH_ON_VALUE, FindingKind.HOST_SYNC),
        (Fault.LIST_OF_VALUES, FindingKind.HOST_SYNC),
        (Fault.BOOLEAN_INDEX, FindingKind.DYNAMIC_SHAPE),
        (Fault.TORCH_RNG, FindingKind.TORCH_RNG),
    ],
)
def test_finds(fault, kind):
    counted = toy_audit(fault)

    assert [finding.kind for finding in counted.findings] == [kind]
    assert counted.findings[0].where.startswith("toy.py:")
    assert counted.is_complete is (kind is FindingKind.TORCH_RNG)  # no value is needed to go on
    assert counted.num_syncs == (kind is FindingKind.HOST_SYNC)


def test_a_broken_program_is_an_error_and_not_a_finding():
    with pytest.raises(RuntimeError, match="reduction dim"):
        small(lambda x: x @ torch.zeros(5, 5, device=x.device), 4, 4)


def test_lays_out_a_table():
    lines = str(toy_audit(Fault.BRANCH_ON_VALUE)).splitlines()

    assert "operations on meta" in lines[0] and "1 syncs" in lines[0]
    assert any(line.split() == ["1", "graphs_toy::store"] for line in lines)
    assert lines[-2].startswith("   wrong  aten::_local_scalar_dense at toy.py:")
    assert lines[-1] == "   the run ended there"


FAKE_DEVICE = """
import torch
from graphs.audit import audit, fake_accelerator
from tests.graphs.toy import KEYS, Fault, ToyWorld

def run(device, *faults):
    return audit(lambda device: ToyWorld(*faults, device=device).program(KEYS[-1]), device)

def upload(device):
    x, host = torch.zeros(4, device=device), torch.zeros(4)
    return lambda: x.copy_(host) and None

with fake_accelerator() as device:
    good = run(device)
    assert good.is_complete and not good.findings and not good.copies, good
    assert good.device == "gpu" and good.custom_ops == {"graphs_toy": {"store": 1}}
    for fault in (Fault.BRANCH_ON_VALUE, Fault.BOOLEAN_INDEX, Fault.HOST_CONSTANT):
        (finding,) = run(device, fault).findings
        print(fault.name, finding.kind.name, finding.where.split(":")[0])
    for name, program in {
        "up": lambda x, host: x.copy_(host),
        "down": lambda x, host: host.copy_(x),
        "to": lambda x, host: host.to(x.device),
        "mix": lambda x, host: x.index_select(0, host.long()),
    }.items():
        x, host = torch.zeros(4, device=device), torch.zeros(4)
        counted = audit(lambda device: lambda: program(x, host), device)
        print(name, *{finding.kind.name for finding in counted.findings}, len(counted.copies))
"""


def test_a_made_up_device_shows_copies_between_devices():
    """In a process of its own: the device stays registered for the life of one."""
    if not has_fake_accelerator():
        pytest.skip("this torch has no Python interface for made-up devices")
    run = subprocess.run(
        [sys.executable, "-c", FAKE_DEVICE], capture_output=True, text=True, check=False, cwd=ROOT
    )

    assert run.stdout.splitlines() == [
        "BRANCH_ON_VALUE HOST_SYNC toy.py",
        "BOOLEAN_INDEX DYNAMIC_SHAPE toy.py",
        "HOST_CONSTANT HOST_CONSTANT toy.py",
        "up MIXED_DEVICES 1",
        "down MIXED_DEVICES 1",
        "to MIXED_DEVICES 1",
        "mix MIXED_DEVICES 0",
    ], run.stderr
