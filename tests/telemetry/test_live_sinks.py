"""Sinks of an app that get what is recorded: Prometheus over HTTP, and sinks that fail."""

import socket
import time
import urllib.request

import pytest

from telemetry import Recorder, read_run
from telemetry.feed import NUM_STEPS, Feed
from telemetry.sinks.prometheus import Metrics, serve
from tests.engines import greedy, random_prompts, tiny_llm
from tests.telemetry.fake_engine import FakeEngine
from tests.telemetry.nvml_stub.library import GIB

STUB_GPU = {
    "type": "cuda",
    "index": 0,
    "uuid": "00000000-0000-4000-8000-000000000000",
    "name": "Stub GPU",
}
ENERGY = "nanovllm_gpu_energy_joules_total"
THROTTLED = 'nanovllm_gpu_throttled_seconds_total{reason="power_cap"}'
RESIDENT = 'nanovllm_process_memory_bytes{kind="resident"}'


class Kept:
    """A sink that keeps what it gets."""

    def __init__(self):
        self.steps, self.samples, self.sizes = [], [], []

    def on_steps(self, steps):
        self.sizes.append(len(steps))
        self.steps += steps

    def on_sample(self, values, *, duration_s):
        self.samples.append(values)


class Fails(Kept):
    def on_steps(self, steps):
        super().on_steps(steps)
        raise KeyError("no such metric")


@pytest.fixture
def port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def scrape(port):
    """Name with labels -> value, as Prometheus would read them."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def scrape_until(port, recorder, condition):
    deadline = time.monotonic() + 30
    while True:
        recorder.run()  # drains, as the writer does each second
        found = scrape(port)
        if condition(found):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.02)


def test_an_engine_is_scraped_while_it_is_recorded(port):
    pytest.importorskip("prometheus_client")
    with tiny_llm() as llm, serve(port) as metrics, Recorder(llm, sinks=[metrics]) as recorder:
        llm.generate(random_prompts(4), greedy(8))
        found = scrape_until(port, recorder, lambda found: RESIDENT in found)

    assert found["nanovllm_generated_tokens_total"] == 4 * 8
    assert found["nanovllm_inter_token_latency_seconds_count"] == 4 * 7
    assert found["nanovllm_time_to_first_token_seconds_count"] == 4
    assert found['nanovllm_requests_total{finish_reason="length"}'] == 4
    assert found[RESIDENT] > 1e7
    # What this machine does not have is not 0 but missing.
    assert not [name for name in found if "gpu" in name]


def test_a_gpus_sensors_are_scraped_without_a_line_of_glue(port, stub):
    pytest.importorskip("prometheus_client")
    engine = FakeEngine(device=STUB_GPU)
    with serve(port) as metrics, Recorder(engine, sinks=[metrics], period_s=0.01) as recorder:
        found = scrape_until(port, recorder, lambda found: ENERGY in found)
        assert found[ENERGY] == 0  # since the first reading
        stub.update({"field.83": 2_003_000})  # mJ; it was 2,000,000
        found = scrape_until(port, recorder, lambda found: found[ENERGY] > 0)
        found = scrape_until(port, recorder, lambda found: THROTTLED in found)

    assert found['nanovllm_gpu_memory_bytes{kind="used"}'] == 40 * GIB
    assert found[ENERGY] == 3.0
    assert found[THROTTLED] == 0
    assert found["nanovllm_telemetry_sample_seconds_total"] > 0


def test_a_sink_gets_every_step_once_and_a_few_at_a_time(tmp_path):
    engine, kept = FakeEngine(), Kept()
    with Recorder(engine, tmp_path / "run.jsonl", mode="edges", sinks=[kept]):
        for _ in range(3 * NUM_STEPS + 1):
            engine.step()

    assert [step.index for step in kept.steps] == list(range(3 * NUM_STEPS + 1))
    assert max(kept.sizes) <= NUM_STEPS
    assert kept.samples == []


def test_a_sink_that_raises_is_dropped_and_the_run_says_so(tmp_path):
    engine, fails, kept = FakeEngine(), Fails(), Kept()
    path = tmp_path / "run.jsonl"
    with Recorder(engine, path, mode="edges", sinks=[fails, kept]) as recorder:
        for _ in range(40):
            engine.step()
        recorder.run()
        engine.step()
    run = read_run(path)
    (event,) = [event for event in run.events if event.kind == "sink_off"]

    assert len(run.steps) == len(kept.steps) == 41
    assert len(fails.sizes) == 1
    assert event.data == {"sink": "Fails", "reason": "KeyError: 'no such metric'"}


def test_nothing_is_queued_for_nobody():
    feed = Feed(())
    feed.add_steps([object()] * 100)
    feed.add_sample(["a"], [1], 1)

    assert not feed.hand_on()


def test_metrics_on_an_apps_own_registry():
    client = pytest.importorskip("prometheus_client")
    registry, engine = client.CollectorRegistry(), FakeEngine()
    with Recorder(engine, mode="edges", sinks=[Metrics(registry)]):
        engine.step(sampled=(1, 2))

    assert registry.get_sample_value("nanovllm_generated_tokens_total") == 2
