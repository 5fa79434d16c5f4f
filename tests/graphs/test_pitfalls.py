"""Faults that engines met in the field, each put into a toy decode program and found on a CPU.

What is covered here and beside, by the number of the pitfall:

     1  largest bucket below the limit          test_plan.py
     2  block table one column short            test_layout.py (a wider table is refused)
     3  stale padding rows                      here, test_layout.py
     4  stale columns of a block table          here, test_layout.py
     5  a slot of -1 used as an index           here
     6  padding that attends to nothing         here
     7  outputs left in the shared pool         here, test_tape.py
     8  Python branches on device values        here, test_tape.py, test_audit.py
     9  shapes made of device values            here, test_tape.py, test_audit.py
    10  host constants, mixed devices           here, test_tape.py, test_audit.py
    11  tensors that are not static             here, test_tape.py
    12  static buffers that are replaced        here, test_backend.py, test_tape.py, test_cuda.py
    13  staging refilled in flight              test_ring.py
    14  plans made of live lengths              here, test_splits.py
    16  kernels unloaded under a graph          test_cuda.py
    17  captures disturbed                      test_cuda.py
    18  other streams in a program              test_cuda.py (one side stream; none elsewhere)
    19  captures that fail                      test_cuda.py
    20  graphs given up alone                   test_backend.py, test_cuda.py
    22  bucket views read as dense              here, test_layout.py
    23  random draws                            here
    27  memory extrapolated                     test_cuda.py
    28  small graphs first                      test_backend.py, test_cuda.py
    30  outputs by weak reference               here (7: outputs are static)
    31  metadata for live rows only             here
    32  NaN of a freed page times 0             here

The others belong to kernels (15, 21, 33), to the host loop (24, 25, 26), or need a GPU (29, 34).
"""

import ast
from pathlib import Path

import pytest
import torch

import graphs
from graphs import GraphKey, StaticTensors
from graphs.churn import ChurnRow
from graphs.findings import FindingKind
from graphs.tape import TapeBackend
from graphs.verdict import MismatchKind
from tests.graphs import toy
from tests.graphs.toy import Fault

DIFFERS = {MismatchKind.OUTPUT, MismatchKind.CACHE}


@pytest.mark.parametrize("seed", range(3))
def test_the_program_without_faults_is_safe_to_replay(seed):
    report = toy.verify_toy(seed=seed)

    assert report.ok, report


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault.OUTPUT_IN_POOL, FindingKind.ESCAPED_TENSOR),
        (Fault.TENSOR_RETURNED, FindingKind.ESCAPED_TENSOR),
        (Fault.BRANCH_ON_VALUE, FindingKind.HOST_SYNC),
        (Fault.LIST_OF_VALUES, FindingKind.HOST_SYNC),
        (Fault.BOOLEAN_INDEX, FindingKind.DYNAMIC_SHAPE),
        (Fault.HOST_CONSTANT, FindingKind.HOST_CONSTANT),
        (Fault.EXTERNAL_TENSOR, FindingKind.EXTERNAL_TENSOR),
        (Fault.STATIC_REPLACED, FindingKind.STATIC_MOVED),
        (Fault.TORCH_RNG, FindingKind.TORCH_RNG),
    ],
)
def test_capturing_finds(fault, kind):
    assert kind in {finding.kind for finding in toy.verify_toy(fault).findings}


@pytest.mark.parametrize(
    ("fault", "kinds"),
    [
        (Fault.STALE_PAD_ROWS, {MismatchKind.CACHE}),
        (Fault.SLOT_AS_INDEX, {MismatchKind.CANARY}),
        (Fault.PADS_REACH_SHARED_STATE, {MismatchKind.OUTPUT, MismatchKind.NOT_FINITE}),
        (Fault.OUTPUT_IN_POOL, {MismatchKind.NOT_FINITE}),
        (Fault.BRANCH_ON_VALUE, DIFFERS),
        (Fault.LIST_OF_VALUES, DIFFERS),
        (Fault.LENGTH_AT_CAPTURE, DIFFERS),
        (Fault.TABLE_READ_AS_DENSE, {MismatchKind.NOT_FINITE}),
        (Fault.TORCH_RNG, {MismatchKind.OUTPUT}),
        (Fault.TAIL_NOT_WRITTEN, {MismatchKind.RAISED}),
        (Fault.VALUES_NOT_MASKED, {MismatchKind.NOT_FINITE}),
        (Fault.UNSET_MEMORY, {MismatchKind.NOT_FINITE}),
    ],
)
def test_replaying_beside_the_reference_shows(fault, kinds):
    report = toy.verify_toy(fault)

    assert kinds <= {mismatch.kind for mismatch in report.mismatches}, report


def test_every_fault_is_tried():
    tried = {
        case[0]
        for test in (test_capturing_finds, test_replaying_beside_the_reference_shows)
        for mark in test.pytestmark
        for case in mark.args[1]
    }

    assert set(Fault) - tried == {Fault.STALE_TABLE_COLUMNS, Fault.NOISE_BY_ROW}  # below


class TestStaleTableColumns:
    """Harmless behind a mask. Where values are only weighted by 0, a freed page is not."""

    def kinds(self, *faults):
        # Scratch pages keep their finite values here: only a stale column leads to a NaN.
        report = toy.verify_toy(Fault.VALUES_NOT_MASKED, *faults, scratch_pages=())
        return {mismatch.kind for mismatch in report.mismatches}

    def test_lead_to_freed_pages(self):
        assert MismatchKind.NOT_FINITE in self.kinds(Fault.STALE_TABLE_COLUMNS)

    def test_are_the_only_way_to_them(self):
        assert toy.verify_toy(scratch_pages=()).ok
        assert toy.verify_toy(Fault.STALE_TABLE_COLUMNS, scratch_pages=()).ok


class TestDraws:
    """One request, in every bucket that holds it and on every row, with the same seed."""

    def tokens(self, *faults):
        world = toy.ToyWorld(*faults)
        drawn = set()
        statics = StaticTensors(world.named_tensors())
        with toy.one_thread(), TapeBackend().session(statics) as session:
            for key in graphs.capture_order(toy.KEYS):
                graph = session.capture(
                    key, world.program(key), reset=lambda key=key: world.reset(key)
                )
                for row in range(key.bucket):
                    rows = [
                        ChurnRow(
                            request=9 if index == row else 40 + index,
                            position=0,
                            pages=(index,),
                            previous_row=None,
                        )
                        for index in range(row + 1)
                    ]
                    world.fill(key, row + 1, toy.step_inputs(rows))
                    graph.replay()
                    drawn.add(world.tokens[row].item())
        return drawn

    def test_depend_on_seed_and_position_only(self):
        assert len(self.tokens()) == 1

    @pytest.mark.parametrize("fault", [Fault.NOISE_BY_ROW, Fault.TORCH_RNG])
    def test_with_this_fault_depend_on_more(self, fault):
        assert len(self.tokens(fault)) > 1


class TestStaleRows:
    """A request leaves and its row becomes padding: the last thing it did must not happen again."""

    def mismatches(self, *faults, page_of_row_0):
        """Four requests, then three, in one bucket; the first of them goes on in a new page."""
        four = [ChurnRow(n, 2, (n,), None) for n in range(4)]
        three = [ChurnRow(0, 3, (0, page_of_row_0), 0)] + [
            ChurnRow(n, 2, (n,), None) for n in (1, 2)
        ]
        steps = [
            toy.VerifyStep(GraphKey(4), 4, toy.step_inputs(four)),
            toy.VerifyStep(GraphKey(4), 3, toy.step_inputs(three), [3 + toy.FIRST_PAGE]),
        ]
        report = toy.verify_toy(*faults, steps=steps)
        return [(one.step, one.kind, one.detail) for one in report.mismatches]

    @pytest.mark.parametrize("page", [3, 10])
    def test_are_cleared(self, page):
        assert self.mismatches(page_of_row_0=page) == []

    @pytest.mark.parametrize("page", [3, 10])
    def test_write_to_the_page_of_the_request_that_left_whoever_owns_it_now(self, page):
        found = self.mismatches(Fault.STALE_PAD_ROWS, page_of_row_0=page)

        assert found == [(1, MismatchKind.CACHE, f"`cache` pages [{3 + toy.FIRST_PAGE}]")]


def test_only_the_driver_touches_streams_and_graphs_of_cuda():
    """Pitfall 18: work on a second stream that is not joined ends a capture."""
    folder = Path(graphs.__file__).parent
    users = {
        path.name
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr == "cuda"
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    }

    assert users == {"cuda_driver.py"}


def test_torch_needs_no_gradients_for_any_of_this():
    assert torch.is_grad_enabled()
    toy.verify_toy(num_steps=2)
    assert torch.is_grad_enabled()
