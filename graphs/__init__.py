"""Leaf library: capture and replay of one step program per decode batch size.

It replays any callable over fixed buffers and does not know that `nanovllm` exists. Read in this
order: `plan` (which batch sizes), `layout` and `packing` (the inputs of a step as one vector),
`ring` (whose turn it is to write them), `backend` (what a backend offers), then the backends:

    graphs.eager   EagerBackend    calls the program
    graphs.cuda    CudaBackend     CUDA graphs
    graphs.tape    TapeBackend     proves on a CPU that a program is safe to replay
    graphs.verify  verify          ... over a schedule of steps, against an eager reference
    graphs.audit   audit           counts operations, bytes and copies without running anything

Importing this package does not load torch; the modules that need it are imported by their names.
"""

from graphs.backend import (
    CaptureInfo,
    Event,
    EventKind,
    GraphBackend,
    GraphCaps,
    GraphKey,
    GraphSession,
    Program,
    Replayable,
    SessionInfo,
    capture_order,
)
from graphs.eager import EagerBackend
from graphs.errors import (
    CaptureError,
    GraphsError,
    LayoutError,
    PlanError,
    RingError,
    SessionError,
    StaticsError,
)
from graphs.fit import expected_cost, fit_buckets, interpolate_costs
from graphs.layout import KEEP, ZERO, Column, Fill, Scalar, StepLayout, Table
from graphs.packing import StepBuffer
from graphs.plan import BucketPlan, plan_buckets
from graphs.ring import SlotState, StagingRing
from graphs.splits import plan_splits, tokens_per_split
from graphs.statics import Statics, StaticTensors

__all__ = [
    "KEEP",
    "ZERO",
    "BucketPlan",
    "CaptureError",
    "CaptureInfo",
    "Column",
    "EagerBackend",
    "Event",
    "EventKind",
    "Fill",
    "GraphBackend",
    "GraphCaps",
    "GraphKey",
    "GraphSession",
    "GraphsError",
    "LayoutError",
    "PlanError",
    "Program",
    "Replayable",
    "RingError",
    "Scalar",
    "SessionError",
    "SessionInfo",
    "SlotState",
    "StagingRing",
    "StaticTensors",
    "Statics",
    "StaticsError",
    "StepBuffer",
    "StepLayout",
    "Table",
    "capture_order",
    "expected_cost",
    "fit_buckets",
    "interpolate_costs",
    "plan_buckets",
    "plan_splits",
    "tokens_per_split",
]
