"""Metrics for Prometheus, through `prometheus_client` (an optional package), fed by a recorder.

    with serve(port=9100) as metrics, Recorder(llm, sinks=[metrics]):
        ...                                # http://127.0.0.1:9100/metrics

or, with a registry that the app serves itself, `Recorder(llm, sinks=[Metrics(registry)])`.
Labels are few and bounded: no request ids. Names follow Prometheus' rules: base units, `_total`
for counters. A metric of a sensor is there from its first reading on: what is not measured is
missing, and not 0.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from telemetry.errors import TelemetryError
from telemetry.records import Value

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

# A small model decodes in a few milliseconds: buckets that begin at 10 ms, as elsewhere, see
# nothing.
ITL_BUCKETS_S = (
    0.0005, 0.001, 0.0015, 0.002, 0.0025, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05,
    0.1, 0.25,
)  # fmt: skip
TTFT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

_THROTTLE = "nvml.throttled_by_"

# Gauges: sensor, metric, its text, and what becomes its label "kind".
_LEVELS = {
    "nvml.memory_used_bytes": ("gpu_memory_bytes", "GPU memory", "used"),
    "nvml.memory_free_bytes": ("gpu_memory_bytes", "GPU memory", "free"),
    "nvml.memory_reserved_bytes": ("gpu_memory_bytes", "GPU memory", "reserved"),
    "host.rss_bytes": ("process_memory_bytes", "Memory of the process", "resident"),
}

# Counters: sensor, metric, its text, and what takes it to base units.
_RISING = {
    "nvml.energy_mj": ("gpu_energy_joules", "Energy since the first reading", 1e-3),
    "host.energy_uj": ("cpu_energy_joules", "Energy of the machine's processors likewise", 1e-6),
    "host.cpu_ns": ("process_cpu_seconds", "Processor time since the first reading", 1e-9),
}


class Metrics:
    """The metrics of one engine.

    Args:
        registry: Where they are registered; the client's default one if None.
        prefix: First word of every name; two engines on one registry need two.

    Raises:
        TelemetryError: `prometheus_client` is not installed, or the prefix is taken.
    """

    def __init__(
        self, registry: "CollectorRegistry | None" = None, *, prefix: str = "nanovllm"
    ) -> None:
        client = _client()
        registry = client.REGISTRY if registry is None else registry

        def metric(kind: Any, name: str, text: str, labels: Sequence[str] = (), **more: Any) -> Any:
            try:
                return kind(f"{prefix}_{name}", text, labels, registry=registry, **more)
            except ValueError as error:
                raise TelemetryError(
                    f"`prefix` is {prefix!r}, and the registry refuses {prefix}_{name}: {error}. "
                    "Give each engine a prefix of its own, of letters, digits and _."
                ) from error

        counter, gauge, histogram = client.Counter, client.Gauge, client.Histogram
        self._itl = metric(
            histogram, "inter_token_latency_seconds", "Gap between tokens of one request, by token",
            buckets=ITL_BUCKETS_S,
        )  # fmt: skip
        self._ttft = metric(
            histogram, "time_to_first_token_seconds", "Arrival to first token",
            buckets=TTFT_BUCKETS_S,
        )  # fmt: skip
        self._steps = metric(counter, "steps", "Steps by how they ran", ("mode",))
        self._tokens = metric(counter, "generated_tokens", "Tokens sampled")
        self._prompt = metric(counter, "prompt_tokens", "Prompt tokens computed")
        self._requests = metric(counter, "requests", "Requests that ended", ("finish_reason",))
        self._preemptions = metric(counter, "preemptions", "Sequences that lost their blocks")
        self._replays = metric(counter, "graph_replays", "Replays of captured steps", ("bucket",))
        self._pads = metric(
            counter,
            "graph_padding_tokens",
            "Pads computed by replays",
            ("bucket",),
        )
        self._sequences = metric(gauge, "sequences", "Sequences after the last step", ("state",))
        self._blocks = metric(gauge, "kv_blocks", "K/V blocks after the last step", ("state",))
        self._cached = metric(
            gauge, "kv_blocks_cached", "K/V blocks with a known prefix, in use or free"
        )
        self._hits = metric(counter, "prefix_cache_hit_tokens", "Prompt tokens found cached")
        self._lookups = metric(counter, "prefix_cache_lookup_tokens", "Prompt tokens looked up")
        self._sample = metric(counter, "telemetry_sample_seconds", "Time inside of sensors' reads")
        # With labels, so that there is nothing to see before the first reading.
        texts = {name: text for name, text, _ in _LEVELS.values()}
        self._levels = {name: metric(gauge, name, text, ("kind",)) for name, text in texts.items()}
        self._throttled = metric(
            counter, "gpu_throttled_seconds", "Time held back since the first reading", ("reason",)
        )
        self._rising: dict[str, Any] = {}
        self._new_counter: Callable[[str, str], Any] = lambda name, text: metric(
            counter, name, text
        )
        self._last_s: dict[int, float] = {}  # sequence -> when its last token came
        self._counters: dict[str, float] = {}  # sensor -> its last reading

    def on_steps(self, steps: Sequence[Any]) -> None:
        """Take in step records of the engine, in order, at least one; see `telemetry.feed`."""
        for step in steps:
            self._time_tokens(step)
            for request in step.finished:
                self._finish(request)
        for mode, num_steps in Counter(step.mode for step in steps).items():
            self._steps.labels(mode).inc(num_steps)
        num_computed = sum(step.num_prefill_tokens for step in steps)
        num_hits = sum(step.num_prefix_hit_tokens for step in steps)
        self._tokens.inc(sum(len(step.sampled) for step in steps))
        self._prompt.inc(num_computed)
        self._hits.inc(num_hits)
        self._lookups.inc(num_hits + num_computed)
        self._preemptions.inc(sum(step.num_preempted for step in steps))
        replays = [step for step in steps if step.bucket is not None]
        for bucket, num_replays in Counter(step.bucket for step in replays).items():
            num_computed = sum(
                step.num_decode_tokens + step.num_prefill_tokens
                for step in replays
                if step.bucket == bucket
            )
            self._replays.labels(bucket).inc(num_replays)
            self._pads.labels(bucket).inc(bucket * num_replays - num_computed)
        last = steps[-1]
        self._sequences.labels("waiting").set(last.num_waiting)
        self._sequences.labels("running").set(last.num_running)
        self._blocks.labels("used").set(last.num_used_blocks)
        self._blocks.labels("free").set(last.num_free_blocks)
        self._cached.set(last.num_cached_blocks)

    def on_sample(self, values: Mapping[str, Value], *, duration_s: float) -> None:
        """Take in sensors' readings by name, and how long reading them took."""
        self._sample.inc(duration_s)
        for name, value in values.items():
            if value is None:
                continue
            if name in _LEVELS:
                metric, _, kind = _LEVELS[name]
                self._levels[metric].labels(kind).set(value)
            elif name in _RISING:
                self._rise(name, value)
            elif name.startswith(_THROTTLE):
                reason = name.removeprefix(_THROTTLE).removesuffix("_ns")
                self._throttled.labels(reason).inc(self._moved(name, value) / 1e9)

    def _time_tokens(self, step: Any) -> None:
        for seq_id, num_tokens in Counter(step.sampled).items():
            last_s = self._last_s.get(seq_id)
            if last_s is not None:
                for _ in range(num_tokens):
                    self._itl.observe((step.end_s - last_s) / num_tokens)
            self._last_s[seq_id] = step.end_s

    def _rise(self, sensor: str, value: float) -> None:
        name, text, factor = _RISING[sensor]
        if sensor not in self._rising:
            self._rising[sensor] = self._new_counter(name, text)
        self._rising[sensor].inc(self._moved(sensor, value) * factor)

    def _finish(self, request: Any) -> None:
        for seq_id in request.seq_ids:
            self._last_s.pop(seq_id, None)
        self._requests.labels(request.finish_reason).inc()
        if request.first_token_s is not None:
            self._ttft.observe(request.first_token_s - request.arrival_s)

    def _moved(self, name: str, value: float) -> float:
        """By how much a counter moved since its last reading; nothing if it was reset."""
        last, self._counters[name] = self._counters.get(name, value), value
        return max(0.0, value - last)


@contextmanager
def serve(port: int, *, prefix: str = "nanovllm") -> Iterator[Metrics]:
    """Metrics on a registry of their own, answered at http://127.0.0.1:`port`/metrics.

    Raises:
        TelemetryError: `prometheus_client` is not installed, or the port can't be had.
    """
    client = _client()
    registry = client.CollectorRegistry()
    metrics = Metrics(registry, prefix=prefix)
    try:
        # Bound to this machine: figures of an app are no business of the network's.
        server, thread = client.start_http_server(port, addr="127.0.0.1", registry=registry)
    except OSError as error:
        raise TelemetryError(
            f"`port` is {port}, which can't be had on 127.0.0.1 ({error}); give another one."
        ) from error
    try:
        yield metrics
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _client() -> Any:
    try:
        import prometheus_client  # optional: only for those who scrape
    except ImportError as error:
        raise TelemetryError(
            "Metrics for Prometheus need `prometheus_client`: pip install prometheus-client."
        ) from error
    return prometheus_client
