import sys

import pytest

from nanovllm import CompletionOutput, RequestOutput
from nanovllm.outputs import RequestMetrics
from nanovllm.records import EngineStats, StepRecord
from nanovllm.run_summary import RunSummary, StepLog, peak_memory_bytes

STATS = EngineStats(
    num_steps=9,
    num_requests=2,
    num_prompt_tokens=50,
    num_prefix_hit_tokens=32,
    num_generated_tokens=7,
    num_preemptions=0,
    num_waiting=0,
    num_running=0,
    num_blocks=100,
    num_used_blocks=0,
    num_cached_blocks=5,
    peak_used_blocks=40,
)


def step(end_s, *, decodes=1, prefills=0):
    """A step that took 0.5 s in three parts."""
    return StepRecord(
        index=0,
        start_s=end_s - 0.5,
        end_s=end_s,
        num_rows=1,
        num_decode_tokens=decodes,
        num_prefill_tokens=prefills,
        num_prefix_hit_tokens=0,
        num_waiting=0,
        num_running=0,
        num_free_blocks=0,
        num_used_blocks=1,
        num_cached_blocks=0,
        num_preempted=0,
        mode="eager",
        bucket=None,
        fallback=None,
        schedule_s=0.125,
        execute_s=0.25,
        postprocess_s=0.125,
        pack_s=0.0,
        submit_s=0.0,
        wait_s=0.0,
        sampled=(0,),
        finished=(),
    )


def output(arrival_s, first_token_s, finished_s, *num_tokens):
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=(1,),
        outputs=tuple(CompletionOutput(i, "", (5,) * n) for i, n in enumerate(num_tokens)),
        finished=finished_s is not None,
        num_cached_tokens=0,
        metrics=RequestMetrics(
            arrival_s=arrival_s, first_token_s=first_token_s, finished_s=finished_s
        ),
    )


def summary(outputs=(), steps=(), *, load_s=1.5):
    log = StepLog()
    for record in steps:
        log(record)
    return RunSummary.of(list(outputs), log, STATS, load_s=load_s)


def rows(*args, **kwargs):
    return dict(summary(*args, **kwargs).rows())


def decodes_with_gaps(gaps):
    ends = [100.0]
    for gap in gaps:
        ends.append(ends[-1] + gap)
    return [step(end_s) for end_s in ends]


# Requests


def test_the_time_to_the_first_token_is_the_median_of_those_that_had_one():
    outputs = [
        output(10.0, 10.5, 12.0, 3),
        output(10.0, 11.0, 12.0, 3),
        output(10.0, 13.0, 14.0, 3),
        output(10.0, None, 11.0, 0),
    ]

    assert summary(outputs).ttft_s == 1.0
    assert rows(outputs)["time to first token"] == "1000.0 ms"


def test_tokens_are_those_of_every_completion_over_the_whole_run():
    outputs = [output(10.0, 10.5, 12.0, 3, 4), output(8.0, 9.0, 11.0, 5)]

    made = summary(outputs)

    assert made.num_generated_tokens == 12
    assert made.generate_s == 4.0
    assert rows(outputs)["tokens"] == "12, 3.0 a second"


# Steps


def test_a_time_between_tokens_is_that_between_the_ends_of_steps():
    made = summary(steps=decodes_with_gaps([0.25, 2.0, 1.0]))

    assert made.itls_s == (0.25, 1.0, 2.0)


def test_no_time_between_tokens_spans_a_step_that_only_reads_prompts():
    steps = [
        step(1.0, decodes=0, prefills=8),
        step(2.0),
        step(4.0),
        step(100.0, decodes=0, prefills=8),
        step(150.0, decodes=0, prefills=8),
        step(200.0),
        step(201.0),
    ]

    assert summary(steps=steps).itls_s == (1.0, 2.0)


def test_a_step_that_decodes_and_reads_prompts_counts_like_one_that_decodes():
    steps = [step(1.0), step(1.5, decodes=2, prefills=100), step(3.5)]

    assert summary(steps=steps).itls_s == (0.5, 2.0)


@pytest.mark.parametrize(
    ("gaps_ms", "mean", "p99"),
    [
        ([8], "8.0", "8.0"),
        ([8, 16], "12.0", "16.0"),
        (range(1, 100), "50.0", "99.0"),
        (range(1, 101), "50.5", "99.0"),  # 99 of 100 are no longer than the 99th
        (range(1, 102), "51.0", "100.0"),
        (range(1, 201), "100.5", "198.0"),
        (range(1, 202), "101.0", "199.0"),
        ([1] * 990 + [50] * 10, "1.5", "1.0"),
        ([1] * 989 + [50] * 11, "1.5", "50.0"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_p99_is_the_smallest_time_that_99_percent_do_not_exceed(gaps_ms, mean, p99):
    steps = decodes_with_gaps(gap / 1000 for gap in reversed(gaps_ms))

    assert rows(steps=steps)["time between tokens"] == f"mean {mean} ms, p99 {p99} ms"


# Edges


def test_a_run_without_prompts_has_the_figures_of_the_engine_only():
    made = summary()

    assert made.ttft_s is None
    assert made.itls_s == ()
    assert (made.num_generated_tokens, made.generate_s) == (0, 0.0)
    assert [name for name, _ in made.rows()] == [
        "load",
        "peak memory",
        "K/V blocks used",
        "prefix-hit tokens",
    ]


def test_a_run_without_tokens_has_no_times_of_tokens():
    made = rows([output(10.0, None, 12.0, 0)], [step(11.0, decodes=0, prefills=5)])

    assert "time to first token" not in made
    assert "time between tokens" not in made
    assert made["tokens"] == "0, 0.0 a second"


def test_one_decode_has_no_time_between_tokens():
    assert summary(steps=[step(1.0, decodes=0, prefills=3), step(2.0)]).itls_s == ()


def test_the_figures_of_the_engine_are_shown_as_they_are():
    made = rows()

    assert made["load"] == "1.50 s"
    assert made["K/V blocks used"] == "40 of 100"
    assert made["prefix-hit tokens"] == "32"


def test_the_peak_of_memory_is_in_bytes_and_never_falls():
    before = peak_memory_bytes()
    block = bytearray(64 * 2**20)
    block[:: 2**12] = b"x" * (len(block) // 2**12)
    during = peak_memory_bytes()
    del block

    assert 2**20 < before <= during <= peak_memory_bytes() < 2**44
    if sys.platform == "linux":
        assert summary().peak_memory_bytes >= during
