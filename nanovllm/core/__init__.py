"""The pure core: sequences, blocks and schedules as values, and functions from value to value.

The law of this folder: no torch, no clock, no randomness, no I/O, no logging, no global state, no
change to a value once it was returned. Ids, times and drawn tokens come in as arguments. Equal
inputs give equal outputs, so a schedule can be replayed, inspected in flight, and tested by
properties.

    state, plan = schedule(state, limits)
    batch = build_batch(plan)                 # host integers for a model step
    state, outputs = postprocess(state, plan, token_ids)

Snapshots are safe to read from any thread; the transitions of one state belong to one thread at a
time, since successive snapshots share an append-only token log.
"""

from nanovllm.core.admission import abort, admit, expire, reset_prefix_cache
from nanovllm.core.batch import Batch, build_batch
from nanovllm.core.blocks import BlockPool
from nanovllm.core.invariants import BrokenLawError, check
from nanovllm.core.lookahead import advance, settle
from nanovllm.core.postprocess import SequenceOutput, postprocess
from nanovllm.core.schedule import schedule
from nanovllm.core.sequence import FinishReason, Sequence, SequenceStatus
from nanovllm.core.state import EngineState, SchedulerLimits, StepPlan

__all__ = [
    "Batch",
    "BlockPool",
    "BrokenLawError",
    "EngineState",
    "FinishReason",
    "SchedulerLimits",
    "Sequence",
    "SequenceOutput",
    "SequenceStatus",
    "StepPlan",
    "abort",
    "admit",
    "advance",
    "build_batch",
    "check",
    "expire",
    "postprocess",
    "reset_prefix_cache",
    "schedule",
    "settle",
]
