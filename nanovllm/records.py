"""What the engine tells of itself: a record per step for hooks, and totals."""

from collections.abc import Callable

import attrs


@attrs.frozen
class RequestRecord:
    """A request that ended. Times in seconds on the clock of `time.perf_counter`.

    Attributes:
        request_id: Its name.
        seq_ids: Its sequences, one per completion: what `StepRecord.sampled` names.
        arrival_s: When it was queued.
        first_scheduled_s: When its first step began; None if it never had one.
        first_token_s: When its first token came; None if none did.
        finished_s: When it ended.
        num_prompt_tokens: Tokens of its prompt.
        num_prefix_hit_tokens: Of these, found in the cache when it started.
        num_generated_tokens: Tokens of all its completions.
        num_preemptions: How often it lost its blocks.
        finish_reason: Of its first completion.
    """

    request_id: str
    seq_ids: tuple[int, ...]
    arrival_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    finished_s: float
    num_prompt_tokens: int
    num_prefix_hit_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    finish_reason: str


@attrs.frozen
class StepRecord:
    """What one step did. Times in seconds on the clock of `time.perf_counter`.

    Attributes:
        index: Counts the engine's steps from 0.
        start_s: When it began.
        end_s: When its tokens were taken in.
        num_rows: Sequences in it.
        num_decode_tokens: Rows that decoded, one position each.
        num_prefill_tokens: Prompt positions computed.
        num_prefix_hit_tokens: Prompt positions that sequences starting in it found cached.
        num_waiting: Sequences waiting after it.
        num_running: Sequences running after it.
        num_free_blocks: Free K/V blocks after it.
        num_used_blocks: K/V blocks in use after it.
        num_cached_blocks: Blocks after it that hold a known prefix, in use or free.
        num_preempted: Sequences that lost their blocks in it.
        mode: "replay" of a captured graph, "eager", or "native" on a CPU.
        bucket: Rows that the captured graph ran, or positions of a step with prompts, pads
            included; None if it was no replay.
        fallback: Why a step on a device with graphs was no replay; None if it was, or has none.
        schedule_s: Time to plan it.
        execute_s: Time from laying out the batch to its tokens, the wait for the device included.
        postprocess_s: Time to take in its tokens, detokenizing included.
        pack_s: Part of `execute_s`: filling the device's inputs. 0 where it is not known.
        submit_s: Part of `execute_s`: handing the work to the device. 0 where it is not known.
        wait_s: Part of `execute_s`: waiting for the tokens. 0 where it is not known.
        sampled: Ids of the sequences that got a token, in the order of rows.
        finished: Requests that ended in it, or since the step before it.
    """

    index: int
    start_s: float
    end_s: float
    num_rows: int
    num_decode_tokens: int
    num_prefill_tokens: int
    num_prefix_hit_tokens: int
    num_waiting: int
    num_running: int
    num_free_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_preempted: int
    mode: str
    bucket: int | None
    fallback: str | None
    schedule_s: float
    execute_s: float
    postprocess_s: float
    pack_s: float
    submit_s: float
    wait_s: float
    sampled: tuple[int, ...]
    finished: tuple[RequestRecord, ...]


StepHook = Callable[[StepRecord], None]
"""Called after a step, on the thread that ran it, when the engine is free for other callers."""


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
