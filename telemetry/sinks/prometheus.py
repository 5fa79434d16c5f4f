"""Metrics for Prometheus, fed by the step hook, through `prometheus_client` (an optional package).

    metrics = Metrics(registry=registry)              # the app's own registry
    remove = llm.subscribe(metrics.on_step)

or, for an app without one, `with serve(port=9100) as metrics`, which answers on 127.0.0.1 only.
Labels are few and bounded: no request ids. Names follow Prometheus' rules: base units, `_total`
for counters.
"""

from collections.abc import Iterator, Mapping
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

        def metric(
            kind: Any, name: str, text: str, labels: tuple[str, ...] = (), **more: Any
        ) -> Any:
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
            counter, "graph_padding_tokens", "Rows computed for nothing by replays", ("bucket",)
        )
        self._sequences = metric(gauge, "sequences", "Sequences after the last step", ("state",))
        self._blocks = metric(gauge, "kv_blocks", "K/V blocks after the last step", ("state",))
        self._hits = metric(counter, "prefix_cache_hit_tokens", "Prompt tokens found cached")
        self._lookups = metric(counter, "prefix_cache_lookup_tokens", "Prompt tokens looked up")
        self._memory = metric(gauge, "gpu_memory_bytes", "GPU memory", ("kind",))
        self._energy = metric(counter, "gpu_energy_joules", "Energy since the first reading")
        self._throttled = metric(
            counter, "gpu_throttled_seconds", "Time held back since the first reading", ("reason",)
        )
        self._sample = metric(counter, "telemetry_sample_seconds", "Time inside of sensors' reads")
        self._last_s: dict[int, float] = {}  # sequence -> when its last token came
        self._counters: dict[str, float] = {}  # sensor -> its last reading

    def on_step(self, step: Any) -> None:
        """Take in a step record of the engine; a hook for `subscribe`.

        Records come from one thread at a time.
        """
        per_sequence: dict[int, int] = {}
        for seq_id in step.sampled:
            per_sequence[seq_id] = per_sequence.get(seq_id, 0) + 1
        for seq_id, num_tokens in per_sequence.items():
            last_s = self._last_s.get(seq_id)
            if last_s is not None:
                for _ in range(num_tokens):
                    self._itl.observe((step.end_s - last_s) / num_tokens)
            self._last_s[seq_id] = step.end_s
        self._steps.labels(step.mode).inc()
        self._tokens.inc(len(step.sampled))
        self._prompt.inc(step.num_prefill_tokens)
        self._hits.inc(step.num_prefix_hit_tokens)
        self._lookups.inc(step.num_prefix_hit_tokens + step.num_prefill_tokens)
        self._preemptions.inc(step.num_preempted)
        if step.bucket is not None:
            self._replays.labels(step.bucket).inc()
            self._pads.labels(step.bucket).inc(step.bucket - step.num_rows)
        self._sequences.labels("waiting").set(step.num_waiting)
        self._sequences.labels("running").set(step.num_running)
        # Cached blocks are free ones too: each block counts once.
        self._blocks.labels("used").set(step.num_used_blocks)
        self._blocks.labels("cached").set(step.num_cached_blocks)
        self._blocks.labels("free").set(step.num_free_blocks - step.num_cached_blocks)
        for request in step.finished:
            self._finish(request)

    def on_sample(self, values: Mapping[str, Value], *, duration_s: float) -> None:
        """Take in sensors' readings by name, and how long reading them took."""
        self._sample.inc(duration_s)
        for kind in ("used", "free", "reserved"):
            num_bytes = values.get(f"nvml.memory_{kind}_bytes")
            if num_bytes is not None:
                self._memory.labels(kind).set(num_bytes)
        for name, value in values.items():
            if value is None:
                continue
            if name == "nvml.energy_mj":
                self._energy.inc(self._moved(name, value) / 1e3)
            elif name.startswith(_THROTTLE):
                reason = name.removeprefix(_THROTTLE).removesuffix("_ns")
                self._throttled.labels(reason).inc(self._moved(name, value) / 1e9)

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
