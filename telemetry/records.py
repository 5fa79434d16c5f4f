"""What a run is made of, as values: facts, sensors, samples, steps, requests, windows, ledgers.

Units are in the names. Times are integers in nanoseconds on the clock of `time.perf_counter_ns`
unless a name says `wall`. None means "not available", and the `Sensor` or row that a value belongs
to says why: no figure is ever a zero that stands for "unknown".
"""

from collections.abc import Mapping
from typing import Any, Literal

import attrs

SCHEMA_VERSION = 1

Value = int | float | None
Facts = Mapping[str, Any]


@attrs.frozen
class Anchor:
    """One instant on two clocks.

    Attributes:
        mono_ns: `time.perf_counter_ns`.
        wall_ns: Nanoseconds since 1970.
    """

    mono_ns: int
    wall_ns: int


@attrs.frozen
class RunInfo:
    """What was measured, where and how.

    Attributes:
        v: Version of the schema.
        run_id: Names the run; random.
        start_wall_ns: Begin in nanoseconds since 1970.
        start_mono_ns: The same instant on the run's clock.
        mode: "edges" or "live".
        period_s: Time between two samples of the fast sensors, in seconds.
        engine: Name and version, as the engine describes itself.
        model: Name, architecture, sizes.
        device: "type" ("cpu", "cuda"), "index", "uuid", "name"; the driver's facts beside them
            under "driver_version", "cuda_version", "power_limit_w" and the like where known.
        config: The options that the engine runs with.
        memory: "weights_bytes", "kv_cache_bytes", as the engine counts them.
        graphs: "captures": what each captured graph cost, and "degraded": why there is none.
        host: The machine and the process: cores, Python, operating system, pid.
    """

    v: int
    run_id: str
    start_wall_ns: int
    start_mono_ns: int
    mode: str
    period_s: float
    engine: Facts = attrs.field(factory=dict)
    model: Facts = attrs.field(factory=dict)
    device: Facts = attrs.field(factory=dict)
    config: Facts = attrs.field(factory=dict)
    memory: Facts = attrs.field(factory=dict)
    graphs: Facts = attrs.field(factory=dict)
    host: Facts = attrs.field(factory=dict)


@attrs.frozen
class Sensor:
    """One figure that is read again and again, or why it is not.

    Attributes:
        name: Provider and figure, with the unit at its end: "nvml.power_mw".
        unit: "bytes", "mW", "mJ", "MHz", "C", "%", "ns", "uJ", "bits" or "count".
        source: The call or file that it comes from.
        kind: "gauge": a level; "counter": only differences mean something.
        scope: Whom it counts: "process", "device", "MIG slice", "whole GPU" (of which the process
            has a slice only), "control group" or "machine".
        tier: When it is read: "fast", "slow", "edges" (begin and end of windows) or "manual".
        period_s: Time between reads in seconds; None when it is not read on a schedule.
        cost_us: Median duration of its read in microseconds, measured when the run began. Sensors
            of one read carry the cost of all of it.
        reason: Why it is not available, else None.
        num_gaps: Reads that failed.
    """

    name: str
    unit: str
    source: str
    kind: Literal["gauge", "counter"] = "gauge"
    scope: str = "device"
    tier: str = "fast"
    period_s: float | None = None
    cost_us: float | None = None
    reason: str | None = None
    num_gaps: int = 0

    @property
    def available(self) -> bool:
        """Whether it is read."""
        return self.reason is None


@attrs.frozen
class Step:
    """One step of the engine; the fields are those of its step record, times in nanoseconds.

    Attributes:
        index: Counts the engine's steps from 0.
        t0_ns: Begin.
        t1_ns: End: when its tokens were known.
        num_rows: Sequences in it.
        num_decode_tokens: Rows that decoded, one position each.
        num_prefill_tokens: Prompt positions computed.
        num_prefix_hit_tokens: Prompt positions found cached by sequences that started in it.
        num_waiting: Sequences waiting after it.
        num_running: Sequences running after it.
        num_free_blocks: K/V blocks free after it.
        num_used_blocks: K/V blocks held by sequences after it.
        num_cached_blocks: K/V blocks that hold a known prefix after it, in use or free.
        num_preempted: Sequences that lost their blocks in it.
        mode: "replay" (a captured graph), "eager" or "native".
        bucket: Rows that the captured program ran, or positions of a step with prompts, pads
            included; None when not a replay.
        fallback: Why a decode step on a device with graphs was not a replay.
        schedule_ns: Part that planned it.
        execute_ns: Part that ran the model and the sampler.
        postprocess_ns: Part that took in its tokens.
        pack_ns: Part of `execute_ns` that wrote the inputs; 0 where not known.
        submit_ns: Part of `execute_ns` that submitted the work; 0 where not known.
        wait_ns: Part of `execute_ns` that waited for the device; 0 where not known.
        sampled: Ids of the sequences that got a token, in order of rows.
    """

    index: int
    t0_ns: int
    t1_ns: int
    num_rows: int = 0
    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_free_blocks: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0
    num_preempted: int = 0
    mode: str = "eager"
    bucket: int | None = None
    fallback: str | None = None
    schedule_ns: int = 0
    execute_ns: int = 0
    postprocess_ns: int = 0
    pack_ns: int = 0
    submit_ns: int = 0
    wait_ns: int = 0
    sampled: tuple[int, ...] = ()


@attrs.frozen
class Request:
    """A request that ended; of its first completion where there are several.

    Attributes:
        request_id: The engine's name for it.
        seq_ids: Its sequences, as `Step.sampled` names them.
        arrival_ns: It was queued.
        first_scheduled_ns: Its first step began.
        first_token_ns: Its first token was known.
        finished_ns: It ended.
        num_prompt_tokens: Tokens of its prompt.
        num_prefix_hit_tokens: Prompt tokens found cached.
        num_generated_tokens: Tokens it got.
        num_preemptions: How often it lost its blocks.
        finish_reason: "stop", "length", "abort" or "error".
    """

    request_id: str
    seq_ids: tuple[int, ...]
    arrival_ns: int
    first_scheduled_ns: int | None
    first_token_ns: int | None
    finished_ns: int
    num_prompt_tokens: int
    num_prefix_hit_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    finish_reason: str


@attrs.frozen
class Event:
    """Something that happened at one time.

    Attributes:
        t_ns: When (for what lasts: when it began).
        kind: "gc" (data: "duration_ns", "generation"), "pause", "resume", "device_lost" (data:
            "reason"), "sensor_off" (data: "sensor", "reason"), "late" (data: "num_ticks": samples
            skipped because the thread was not run in time), "dropped" (data: "what", "num"),
            "sink_off" (data: "sink", "reason": it raised, and gets nothing more).
        data: What else is known.
    """

    t_ns: int
    kind: str
    data: Facts = attrs.field(factory=dict)


@attrs.frozen
class Window:
    """A named stretch of the run; the run itself is the window with id 0.

    Attributes:
        id: Counts windows from 0 in order of their begins.
        name: As the user named it.
        t0_ns: Begin.
        t1_ns: End; None if the run was cut off inside of it.
        parent: Id of the window around it; None for the run.
        begin: Sensor's name -> value read at the begin, of every tier but "manual".
        end: The same at the end.
    """

    id: int
    name: str
    t0_ns: int
    t1_ns: int | None
    parent: int | None
    begin: Mapping[str, Value] = attrs.field(factory=dict)
    end: Mapping[str, Value] = attrs.field(factory=dict)

    def change(self, sensor: str) -> Value:
        """By how much a counter moved inside; None if unknown or if it went backwards."""
        begin, end = self.begin.get(sensor), self.end.get(sensor)
        if begin is None or end is None or end < begin:
            return None
        return end - begin


@attrs.frozen
class LedgerRow:
    """One part of the memory.

    Attributes:
        name: Stable key, such as "weights", "kv_cache", "graph_pool_8", "free", "residual".
        label: For people.
        num_bytes: Its size; None if unknown. Only the residual can be negative: then other rows
            count something twice.
        source: Where the figure comes from, or how it was derived.
        reason: Why there is no figure, else None.
        estimate: Whether it was derived under an assumption (which `source` names).
    """

    name: str
    label: str
    num_bytes: int | None
    source: str
    reason: str | None = None
    estimate: bool = False


@attrs.frozen
class Ledger:
    """Where a device's memory was at one time; the rows sum to the total exactly.

    Attributes:
        t_ns: When.
        device: "cuda" or "cpu".
        total_bytes: All there is; None if unknown, and then there is no residual.
        total_source: Where the total comes from, or why it is unknown.
        rows: In order of display; the last is the residual.
    """

    t_ns: int
    device: str
    total_bytes: int | None
    total_source: str
    rows: tuple[LedgerRow, ...]

    def row(self, name: str) -> LedgerRow | None:
        """The row of that name."""
        return next((row for row in self.rows if row.name == name), None)


@attrs.frozen
class Overhead:
    """What the recorder itself did, so far.

    Attributes:
        num_ticks: Ticks of the sampler.
        num_late_ticks: Ticks that it skipped because it was not run in time.
        in_call_ns: Time inside of the providers' reads, all ticks.
        worst_tick_ns: Longest tick.
        sampler_cpu_ns: Processor time of the sampler's thread.
        writer_cpu_ns: Processor time of the writer's thread.
        worst_chunk_ns: Longest stretch of processor time that the writer took without a pause.
        hook_ns: Duration of the step hook, measured on this machine when the run began.
        num_steps: Steps recorded.
        num_steps_dropped: Steps lost because the writer did not keep up.
        num_samples_dropped: Samples lost likewise.
        num_events_dropped: Events lost likewise.
        num_lines_dropped: Lines lost from the bounded memory of a run without a file.
        num_bytes: Size of what was written.
    """

    num_ticks: int = 0
    num_late_ticks: int = 0
    in_call_ns: int = 0
    worst_tick_ns: int = 0
    sampler_cpu_ns: int = 0
    writer_cpu_ns: int = 0
    worst_chunk_ns: int = 0
    hook_ns: int = 0
    num_steps: int = 0
    num_steps_dropped: int = 0
    num_samples_dropped: int = 0
    num_events_dropped: int = 0
    num_lines_dropped: int = 0
    num_bytes: int = 0


@attrs.frozen
class ObserverEffect:
    """What measuring changed: blocks of one workload with the recorder paused and live, in turn.

    Attributes:
        num_blocks: Blocks, half of them live.
        num_off: Latencies measured in paused blocks.
        num_live: Latencies measured in live blocks.
        p50_off_ns: Median of the paused blocks.
        p50_live_ns: Median of the live blocks.
        p99_off_ns: 99th percentile likewise.
        p99_live_ns: 99th percentile likewise.
        max_off_ns: Longest likewise.
        max_live_ns: Longest likewise.
        in_call_ns: Time inside of the providers' reads during the live blocks.
        worst_tick_ns: Longest tick of the sampler.
    """

    num_blocks: int
    num_off: int
    num_live: int
    p50_off_ns: int
    p50_live_ns: int
    p99_off_ns: int
    p99_live_ns: int
    max_off_ns: int
    max_live_ns: int
    in_call_ns: int
    worst_tick_ns: int

    @property
    def p50_change(self) -> float:
        """Live over off, less one: 0.01 is one percent slower."""
        return self.p50_live_ns / self.p50_off_ns - 1

    @property
    def p99_change(self) -> float:
        """The same for the 99th percentile."""
        return self.p99_live_ns / self.p99_off_ns - 1
