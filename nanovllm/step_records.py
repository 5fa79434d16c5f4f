"""From a step that was taken in to the record of it."""

import time

from nanovllm.core import EngineState
from nanovllm.records import RequestRecord, StepRecord
from nanovllm.step_loop import Stepped


def make_record(
    stepped: Stepped, state: EngineState, *, index: int, finished: tuple[RequestRecord, ...]
) -> StepRecord:
    """Describe a step.

    Args:
        stepped: The step.
        state: The state after it.
        index: Counts the engine's steps from 0.
        finished: Requests that ended since the record before.
    """
    step, plan, trace, pool = stepped.step, stepped.step.plan, stepped.trace, state.pool
    end_s = time.perf_counter()
    return StepRecord(
        index=index,
        start_s=step.start_s,
        end_s=end_s,
        num_rows=len(plan.scheduled),
        num_decode_tokens=plan.num_decode_tokens,
        num_prefill_tokens=plan.num_prefill_tokens,
        num_prefix_hit_tokens=sum(num_tokens for _, num_tokens in plan.prefix_hits),
        num_waiting=len(state.waiting),
        num_running=len(state.running),
        num_free_blocks=pool.num_free,
        num_used_blocks=pool.num_used,
        num_cached_blocks=pool.num_cached,
        num_preempted=len(plan.preempted),
        mode=trace.mode,
        bucket=trace.bucket,
        fallback=trace.fallback,
        schedule_s=step.submit_s - step.start_s,
        execute_s=stepped.executed_s - step.submit_s,
        postprocess_s=end_s - stepped.executed_s,
        pack_s=trace.pack_s,
        submit_s=trace.submit_s,
        wait_s=trace.wait_s,
        sampled=tuple(
            plan.scheduled[row].seq_id
            for row, token_id in zip(step.sampled_rows, stepped.token_ids, strict=True)
            if token_id is not None
        ),
        finished=finished,
    )
