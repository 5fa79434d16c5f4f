"""Metrics for Prometheus, scraped as Prometheus would."""

import sys
import urllib.error
import urllib.request

import attrs
import pytest

from telemetry import TelemetryError
from telemetry.sinks.prometheus import ITL_BUCKETS_S, Metrics, serve

prometheus_client = pytest.importorskip("prometheus_client")


@attrs.frozen
class Request:
    seq_ids: tuple = (1,)
    arrival_s: float = 0.0
    first_token_s: float | None = 0.02
    finish_reason: str = "stop"


@attrs.frozen
class Step:
    end_s: float
    sampled: tuple = ()
    num_rows: int = 0
    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_free_blocks: int = 10
    num_used_blocks: int = 0
    num_cached_blocks: int = 0
    num_preempted: int = 0
    mode: str = "native"
    bucket: int | None = None
    finished: tuple = ()


@pytest.fixture
def registry():
    return prometheus_client.CollectorRegistry()


@pytest.fixture
def metrics(registry):
    return Metrics(registry)


@pytest.fixture
def sample(registry):
    def read(name, **labels):
        return registry.get_sample_value(f"nanovllm_{name}", labels)

    return read


def test_the_gap_between_two_tokens_falls_into_its_bucket(metrics, sample):
    metrics.on_steps([Step(1.0, sampled=(1, 2))])
    metrics.on_steps([Step(1.0018, sampled=(1,))])

    assert sample("inter_token_latency_seconds_count") == 1
    assert sample("inter_token_latency_seconds_bucket", le="0.0015") == 0
    assert sample("inter_token_latency_seconds_bucket", le="0.002") == 1
    assert sample("generated_tokens_total") == 3


def test_several_tokens_of_a_step_share_the_gap(metrics, sample):
    metrics.on_steps([Step(1.0, sampled=(1,))])
    metrics.on_steps([Step(1.009, sampled=(1, 1, 1))])

    assert sample("inter_token_latency_seconds_count") == 3
    assert sample("inter_token_latency_seconds_sum") == pytest.approx(0.009)


def test_the_buckets_see_a_model_that_decodes_in_a_millisecond():
    assert sum(bound <= 0.0025 for bound in ITL_BUCKETS_S) >= 5


def test_a_request_that_ended_gives_its_time_to_first_token_and_is_forgotten(metrics, sample):
    metrics.on_steps([Step(1.0, sampled=(1,))])
    metrics.on_steps([Step(1.1, finished=(Request(), Request(seq_ids=(9,), first_token_s=None)))])
    metrics.on_steps([Step(99.0, sampled=(1,))])

    assert sample("time_to_first_token_seconds_count") == 1
    assert sample("requests_total", finish_reason="stop") == 2
    assert sample("inter_token_latency_seconds_count") == 0


def test_replays_count_their_padding_by_bucket(metrics, sample):
    metrics.on_steps([Step(1.0, num_decode_tokens=3, mode="replay", bucket=4)])
    metrics.on_steps([Step(1.1, num_decode_tokens=4, mode="replay", bucket=4)])
    metrics.on_steps([Step(1.2, num_decode_tokens=9, mode="eager")])
    # Of a step with prompts a bucket counts positions.
    prompts = {"num_prefill_tokens": 20, "num_decode_tokens": 2, "num_rows": 3}
    metrics.on_steps([Step(1.3, **prompts, mode="replay", bucket=32)])

    assert sample("graph_replays_total", bucket="4") == 2
    assert sample("graph_padding_tokens_total", bucket="4") == 1
    assert sample("graph_padding_tokens_total", bucket="32") == 10
    assert sample("steps_total", mode="eager") == 1


def test_a_block_is_used_or_free_and_may_be_cached_in_either_state(metrics, sample):
    metrics.on_steps([Step(1.0, num_free_blocks=10, num_cached_blocks=12, num_used_blocks=6)])

    assert [sample("kv_blocks", state=state) for state in ("used", "free")] == [6, 10]
    assert sample("kv_blocks_cached") == 12


def test_counters_of_sensors_only_ever_rise(metrics, sample):
    for millijoules in (5_000, 9_000, 1_000, 2_000):  # the driver was reset in between
        metrics.on_sample({"nvml.energy_mj": millijoules}, duration_s=0.001)
    metrics.on_sample({"nvml.throttled_by_power_cap_ns": 0}, duration_s=0.001)
    metrics.on_sample({"nvml.throttled_by_power_cap_ns": 10**9, "x": None}, duration_s=0.001)

    assert sample("gpu_energy_joules_total") == 5.0
    assert sample("gpu_throttled_seconds_total", reason="power_cap") == 1.0
    assert sample("telemetry_sample_seconds_total") == pytest.approx(0.006)


def test_two_engines_on_one_registry_need_two_prefixes(registry):
    Metrics(registry)
    with pytest.raises(TelemetryError, match="prefix of its own"):
        Metrics(registry)
    Metrics(registry, prefix="other")


def test_no_label_can_grow_with_the_number_of_requests(metrics, registry):
    for i in range(50):
        finished = (Request(seq_ids=(i,)),)
        metrics.on_steps([Step(float(i), sampled=(i,), finished=finished)])
    labels = {name for family in registry.collect() for s in family.samples for name in s.labels}

    assert labels <= {"mode", "bucket", "state", "finish_reason", "kind", "reason", "le"}


def test_the_server_answers_on_this_machine_only_and_ends_with_its_block(free_port):
    url = f"http://127.0.0.1:{free_port}/metrics"
    with serve(free_port) as metrics:
        metrics.on_steps([Step(1.0, sampled=(1,))])
        text = urllib.request.urlopen(url, timeout=10).read().decode()

    assert "nanovllm_generated_tokens_total 1.0" in text
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=10)


def test_a_port_that_is_taken_is_named(free_port):
    with serve(free_port), pytest.raises(TelemetryError, match=str(free_port)), serve(free_port):
        pass


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)

    with pytest.raises(TelemetryError, match="pip install prometheus-client"):
        Metrics()


@pytest.fixture
def free_port():
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]
