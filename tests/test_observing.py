"""What an engine tells those who watch it: records of steps and requests, and its facts."""

import itertools
import json

import pytest

from nanovllm import SamplingParams
from tests.engines import greedy, random_prompts, tiny_llm


@pytest.fixture
def watched():
    records = []
    with tiny_llm(on_step=records.append, max_num_batched_tokens=8, max_num_seqs=4) as llm:
        yield llm, records


def tokens_of(records, seq_id):
    return sum(record.sampled.count(seq_id) for record in records)


def test_every_token_of_a_request_is_named_by_a_record(watched):
    llm, records = watched
    outputs = llm.generate(random_prompts(6), greedy(7))

    finished = [request for record in records for request in record.finished]
    assert sorted(request.request_id for request in finished) == sorted(
        output.request_id for output in outputs
    )
    by_id = {request.request_id: request for request in finished}
    for output in outputs:
        request = by_id[output.request_id]
        (seq_id,) = request.seq_ids
        assert tokens_of(records, seq_id) == len(output.token_ids) == 7
        assert request.num_generated_tokens == 7
        assert request.num_prompt_tokens == len(output.prompt_token_ids)
        assert request.num_prefix_hit_tokens == output.num_cached_tokens
        assert request.finish_reason == output.finish_reason
        assert request.first_token_s == output.metrics.first_token_s
        assert request.finished_s == output.metrics.finished_s


def test_records_add_up_to_the_totals_of_the_engine(watched):
    llm, records = watched
    llm.generate(random_prompts(6), greedy(5))
    llm.generate(random_prompts(6), greedy(5))

    stats = llm.stats()
    assert [record.index for record in records] == list(range(stats.num_steps))
    assert sum(len(record.sampled) for record in records) == stats.num_generated_tokens
    assert sum(record.num_prefix_hit_tokens for record in records) == stats.num_prefix_hit_tokens
    assert sum(record.num_preempted for record in records) == stats.num_preemptions
    assert records[-1].num_cached_blocks == stats.num_cached_blocks
    for record in records:
        assert record.num_used_blocks + record.num_free_blocks == stats.num_blocks
        assert record.num_rows <= record.num_decode_tokens + record.num_prefill_tokens


def test_the_parts_of_a_step_make_up_its_time(watched):
    llm, records = watched
    llm.generate(random_prompts(3), greedy(4))

    for record in records:
        parts_s = record.schedule_s + record.execute_s + record.postprocess_s
        assert parts_s == pytest.approx(record.end_s - record.start_s)
    assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(records))


def test_a_request_aborted_between_steps_is_told_with_the_next_step(watched):
    llm, records = watched
    llm.add_request([1, 2, 3], greedy(9), request_id="left")
    llm.add_request([4, 5, 6], greedy(9), request_id="stays")
    llm.step()
    llm.abort("left")
    assert not any(record.finished for record in records)
    llm.step()

    (request,) = records[-1].finished
    assert (request.request_id, request.finish_reason) == ("left", "abort")


def test_completions_of_one_request_are_told_as_one_request(watched):
    llm, records = watched
    llm.generate([1, 2, 3], SamplingParams(n=3, max_tokens=4, ignore_eos=True))

    (request,) = [request for record in records for request in record.finished]
    assert len(request.seq_ids) == 3
    assert request.num_generated_tokens == 12


def test_a_hook_may_come_and_go_at_any_time():
    first, second = [], []
    with tiny_llm() as llm:
        llm.generate([1, 2], greedy(2))
        leave_first = llm.subscribe(first.append)
        leave_second = llm.subscribe(second.append)
        llm.generate([1, 2], greedy(2))
        leave_first()
        leave_first()  # twice is no error
        llm.generate([1, 2], greedy(2))
        leave_second()
        llm.generate([1, 2], greedy(2))

    assert [record.index for record in first] == [2, 3]
    assert [record.index for record in second] == [2, 3, 4, 5]


def test_a_hook_may_leave_from_within_itself():
    calls = []
    with tiny_llm() as llm:
        leave = llm.subscribe(lambda record: (calls.append(record), leave()))
        llm.generate([1, 2], greedy(5))

    assert len(calls) == 1


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_facts_are_plain_values_and_count_every_byte_of_the_weights_once(backend):
    if backend == "native":
        pytest.importorskip("numba")
    with tiny_llm(attention_backend=backend) as llm:
        facts = llm.describe()
        config = llm.config
    facts = json.loads(json.dumps(facts))

    shape = facts["model"]
    assert shape["architecture"] == "LlamaForCausalLM"
    assert facts["device"]["type"] == "cpu"
    assert facts["config"]["num_kvcache_blocks"] == config.num_kvcache_blocks
    assert facts["memory"]["kv_cache_bytes"] == config.kv_cache_bytes
    heads = (shape["num_heads"] + 2 * shape["num_kv_heads"]) * shape["head_dim"]
    per_layer = shape["hidden_size"] * (
        heads
        + shape["num_heads"] * shape["head_dim"]
        + 3 * shape["intermediate_size"]
        + 2  # the norms
    )
    embeddings = shape["vocab_size"] * shape["hidden_size"]
    # oneDNN's packed copy of a shared embedding is a second one.
    num_embeddings = 1 if shape["tie_word_embeddings"] and backend == "native" else 2
    values = shape["num_layers"] * per_layer + num_embeddings * embeddings + shape["hidden_size"]
    rope_bytes = shape["head_dim"] // 2 * 4
    assert facts["memory"]["weights_bytes"] == values * 4 + rope_bytes
