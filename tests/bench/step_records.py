"""Records of steps that never ran, for arithmetic on times that are known."""

from nanovllm.records import RequestRecord, StepRecord


def step(index=0, start_s=0.0, end_s=0.01, *, sampled=(), finished=(), **fields):
    """A step whose other fields are those of an engine with nothing to say."""
    counts = dict.fromkeys(
        (
            *("num_rows", "num_decode_tokens", "num_prefill_tokens", "num_prefix_hit_tokens"),
            *("num_waiting", "num_running", "num_free_blocks", "num_used_blocks"),
            *("num_cached_blocks", "num_preempted"),
        ),
        0,
    )
    times = dict.fromkeys(
        ("schedule_s", "execute_s", "postprocess_s", "pack_s", "submit_s", "wait_s"), 0.0
    )
    given = {"mode": "eager", "bucket": None, "fallback": None, **counts, **times, **fields}
    return StepRecord(
        index=index,
        start_s=start_s,
        end_s=end_s,
        sampled=tuple(sampled),
        finished=tuple(finished),
        **given,
    )


def request(request_id="r", seq_ids=(0,), arrival_s=0.0, first_token_s=0.5, **fields):
    given = {
        "first_scheduled_s": arrival_s,
        "finished_s": 1.0,
        "num_prompt_tokens": 4,
        "num_prefix_hit_tokens": 0,
        "num_generated_tokens": 2,
        "num_preemptions": 0,
        "finish_reason": "length",
        **fields,
    }
    return RequestRecord(
        request_id=request_id,
        seq_ids=tuple(seq_ids),
        arrival_s=arrival_s,
        first_token_s=first_token_s,
        **given,
    )
