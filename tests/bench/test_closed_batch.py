import pytest

from nanovllm.workloads.bandwidth import Bandwidth, decode_step_bytes, measure_read_bandwidth
from nanovllm.workloads.closed_batch import BatchShape, run_batches
from nanovllm.workloads.prompts import random_prompt
from tests.engines import is_idle, tiny_llm


@pytest.fixture(scope="module")
def llm():
    with tiny_llm(attention_backend="torch") as engine:
        yield engine


def test_only_the_timed_runs_count_and_each_is_of_fresh_prompts(llm):
    report = run_batches(llm, BatchShape(3, 40, 5), num_runs=4, num_warmup_runs=2)

    assert report.call.num_samples == 4
    assert report.ttft.num_samples == 4 * 3
    assert report.itl.num_samples == 4 * 3 * 4
    # All three prompts fit in one step, and the first token comes with it.
    assert report.decode_step.num_samples == 4 * 4
    assert report.prefix_hit_rate == 0
    assert report.modes == {"eager": 4 * 5}
    assert is_idle(llm)


def test_equal_batches_of_another_size_are_not_found_cached_either(llm):
    for batch in (1, 2):
        report = run_batches(llm, BatchShape(batch, 40, 2), num_runs=2, num_warmup_runs=0)
        assert report.prefix_hit_rate == 0


def test_the_share_of_the_bandwidth_is_the_shortest_step_over_the_measured_one(llm):
    report = run_batches(llm, BatchShape(1, 8, 4), num_runs=2, num_warmup_runs=1)
    bandwidth = Bandwidth(bytes_per_s=2e9, buffer_bytes=1)

    data = report.as_data(bandwidth)

    assert data["decode_limit_s"] == report.decode_bytes / 2e9
    assert data["bandwidth_share"] == data["decode_limit_s"] / report.decode_step.median_s
    assert data["output_tokens_per_s"] == pytest.approx(4 / report.call.median_s)


def test_a_decode_step_reads_every_weight_and_the_context_of_every_row(llm):
    facts = llm.describe()
    per_token = 2 * 2 * 2 * 64 * 4  # K and V, 2 layers, 2 heads of 64, float32

    one = decode_step_bytes(llm, batch=1, num_context_tokens=10)
    three = decode_step_bytes(llm, batch=3, num_context_tokens=20)

    assert three - one == (3 * 20 - 10) * per_token
    # torch has packed the embedding as output projection too, and the model holds both; norms and
    # rope's table are the little that is not counted.
    held = facts["memory"]["weights_bytes"] - 320 * 128 * 4
    assert one - 10 * per_token == pytest.approx(held, rel=0.005)


def test_bandwidth_is_positive_and_the_best_of_two_is_the_faster():
    measured = measure_read_bandwidth("cpu", buffer_bytes=2**20, num_reads=3)
    impossible = Bandwidth(1e15, 1)

    assert 1e6 < measured.bytes_per_s < 1e15
    assert measured.buffer_bytes == 2**20
    assert measured.best(impossible) is impossible.best(measured) is impossible


def test_a_prompt_is_determined_by_its_seed():
    prompt = random_prompt(20, vocab_size=7, seed="a")

    assert prompt == random_prompt(20, vocab_size=7, seed="a")
    assert prompt != random_prompt(20, vocab_size=7, seed="b")
    assert len(prompt) == 20
    assert set(prompt) <= set(range(7))
