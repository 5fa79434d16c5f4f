"""`Request` as a whole: when it is finished, what it reports, and its times."""

import pytest

from nanovllm import SamplingParams
from nanovllm.core import FinishReason
from nanovllm.outputs import RequestMetrics
from nanovllm.request import Completion, Request


def request(num_completions=1):
    made = [Completion(i, i, 0, SamplingParams(), None) for i in range(num_completions)]
    return Request("name", "text", (1, 2, 3), made, arrival_s=10.0)


def run(made, tokens, *, start_s=12.0):
    """Give out tokens, a second a step: for each step, what each completion gets, or nothing."""
    for step, of_each in enumerate(tokens):
        for completion, reason in zip(made.completions, of_each, strict=True):
            if reason != "-":
                completion.append(5, None, FinishReason(reason) if reason else None)
        made.note_progress(start_s + step)
    return made.metrics


def test_a_new_request_has_nothing_yet():
    output = request(2).output()

    assert (output.request_id, output.prompt, output.prompt_token_ids) == (
        "name",
        "text",
        (1, 2, 3),
    )
    assert not output.finished
    assert output.error is None
    assert output.num_cached_tokens == 0
    assert output.metrics == RequestMetrics(arrival_s=10.0)
    assert output.metrics.ttft_s is output.metrics.mean_itl_s is None


def test_it_is_finished_when_all_its_completions_are():
    made = request(2)

    run(made, [("", ""), ("length", "")])
    assert not made.finished
    assert made.metrics.finished_s is None

    run(made, [("-", "stop")], start_s=20.0)
    assert made.finished
    assert made.output().finished
    assert made.metrics.finished_s == 20.0


def test_the_first_error_is_the_requests():
    made = request(3)
    made.completions[1].end(FinishReason.ERROR, "no weights")
    made.completions[2].end(FinishReason.ERROR, "no cheese")

    assert made.output().error == "no weights"


def test_the_time_to_the_first_token_counts_from_its_arrival():
    metrics = run(request(), [("",), ("",), ("length",)])

    assert (metrics.first_token_s, metrics.finished_s) == (12.0, 14.0)
    assert metrics.ttft_s == 2.0
    assert metrics.mean_itl_s == 1.0
    assert metrics.num_tokens == 3


def test_one_token_has_no_time_between_tokens():
    metrics = run(request(), [("length",)])

    assert metrics.ttft_s == 2.0
    assert metrics.mean_itl_s is None


def test_a_request_that_ends_before_its_first_token_has_no_times_of_tokens():
    made = request()
    made.completions[0].end(FinishReason.ABORT)
    made.note_progress(15.0)

    assert made.metrics.finished_s == 15.0
    assert made.metrics.ttft_s is made.metrics.mean_itl_s is None


@pytest.mark.parametrize(
    "tokens",
    [
        [("", ""), ("stop", ""), ("-", ""), ("-", ""), ("-", "length")],
        [("", ""), ("", "stop"), ("", "-"), ("", "-"), ("length", "-")],
    ],
    ids=["the first ends first", "the second ends first"],
)
def test_the_time_between_tokens_is_that_of_each_completion(tokens):
    """Each has a token a second while it runs, so that is the mean whichever ends first."""
    assert run(request(2), tokens).mean_itl_s == 1.0


def test_the_time_between_tokens_ends_with_the_last_token():
    made = request()
    run(made, [("",), ("",), ("",)])
    made.completions[0].end(FinishReason.ABORT)
    made.note_progress(100.0)  # nobody asked for more until then

    assert made.metrics.finished_s == 100.0
    assert made.metrics.mean_itl_s == 1.0


def test_shortcuts_are_those_of_the_first_completion():
    made = request(2)
    run(made, [("length", "-")])
    made.completions[1].end(FinishReason.ABORT)

    output = made.output()

    assert output.token_ids == output["token_ids"] == output.outputs[0].token_ids == (5,)
    assert output.text == output["text"] == ""
    assert output.finish_reason == "length"
    with pytest.raises(KeyError, match="'prompt'; an output has 'text' and 'token_ids'"):
        output["prompt"]


def test_what_is_noted_at_its_first_step_stays():
    made = request()

    made.note_scheduled(11.0, 2)
    made.note_preempted()
    made.note_scheduled(13.0, 0)  # its prompt is computed again
    made.note_preempted()

    assert made.output().num_cached_tokens == 2
    assert made.metrics.first_scheduled_s == 11.0
    assert made.metrics.num_preemptions == 2
