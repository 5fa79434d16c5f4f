"""Small runs compared state by state with what was read and agreed to once."""

import pytest

from tests.core.golden_traces import read_traces, replay

TRACES = read_traces()


@pytest.mark.parametrize("name", TRACES)
def test_every_state_of_a_small_run_is_as_recorded(name):
    trace = TRACES[name]

    assert replay(trace["config"]) == trace["events"]


def test_a_prompt_of_8_tokens_with_a_budget_of_3_runs_in_its_third_step():
    events = [event for event in TRACES["chunked_prefill"]["events"] if event["after"] != "admit"]
    chunks = [event["num_prefill_tokens"] for event in events if event["after"] == "schedule"]
    running = [bool(event["running"]) for event in events if event["after"] == "schedule"]
    appended = [event["outputs"][0][1] for event in events if event["after"] == "postprocess"]

    assert chunks == [3, 3, 2]
    assert running == [False, False, True]
    assert appended == [None, None, 9]


def test_the_second_block_is_taken_in_the_step_that_needs_it():
    events = TRACES["finish_releases_blocks"]["events"]
    in_flight = [event["running"][0] for event in events if event["after"] == "schedule"]
    ended = events[-1]["finished"][0]

    assert [seq["num_cached_tokens"] for seq in in_flight] == [0, 3, 4]
    assert [seq["num_scheduled_tokens"] for seq in in_flight] == [3, 1, 1]
    assert [len(seq["block_table"]) for seq in in_flight] == [1, 1, 2]
    assert [len(seq["token_ids"]) for seq in in_flight] == [3, 4, 5]
    assert ended["block_table"] == [] and ended["num_cached_tokens"] == 0
    assert ended["token_ids"] == [1, 2, 3, 5, 6, 7]
