"""What the engine tells of itself: a record per step for a hook, and totals."""

import attrs


@attrs.frozen
class StepRecord:
    """What one step did, for an `on_step` hook.

    Attributes:
        index: Counts the engine's steps from 0.
        start_s: Begin of the step on the clock of `time.perf_counter`.
        num_decode_tokens: Rows that decoded.
        num_prefill_tokens: Prompt positions computed.
        num_waiting: Sequences waiting after the step.
        num_running: Sequences running after it.
        num_free_blocks: Free K/V blocks after it.
        num_preempted: Sequences that lost their blocks in it.
        schedule_s: Time to plan it and to lay out the batch.
        execute_s: Time of the model and the sampler, the wait for the device included.
        postprocess_s: Time to take in its tokens, detokenizing included.
    """

    index: int
    start_s: float
    num_decode_tokens: int
    num_prefill_tokens: int
    num_waiting: int
    num_running: int
    num_free_blocks: int
    num_preempted: int
    schedule_s: float
    execute_s: float
    postprocess_s: float


@attrs.frozen
class EngineStats:
    """Totals since the engine was made, and what is there now."""

    num_steps: int
    num_requests: int
    num_prompt_tokens: int
    num_prefix_hit_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    num_waiting: int
    num_running: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    peak_used_blocks: int
