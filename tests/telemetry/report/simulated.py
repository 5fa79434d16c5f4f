"""Runs made up step by step from a seed: what an engine and its sensors could have recorded."""

import random
from array import array

import attrs

from telemetry.records import (
    SCHEMA_VERSION,
    Anchor,
    Event,
    Ledger,
    LedgerRow,
    Overhead,
    Request,
    RunInfo,
    Sensor,
    Step,
    Window,
)
from telemetry.run import Run, Series, StepTable

START_NS = 1_000_000_000_000
WALL_NS = 1_796_000_000_000_000_000
MS = 1_000_000
BUCKETS = (1, 2, 4, 8, 16, 32)
NUM_BLOCKS = 2048
GIB = 1 << 30


def fast(name, unit, source, kind="gauge", scope="device", **more):
    return Sensor(name, unit, source, kind, scope, period_s=0.1, cost_us=3.0, **more)


def slow(name, unit, source, kind="gauge", scope="device", **more):
    return Sensor(name, unit, source, kind, scope, "slow", period_s=1.0, cost_us=40.0, **more)


NVML_SENSORS = (
    fast("nvml.memory_used_bytes", "bytes", "nvmlDeviceGetMemoryInfo_v2"),
    fast("nvml.power_mw", "mW", "field 186, power now"),
    fast("nvml.energy_mj", "mJ", "field 83", "counter"),
    fast("nvml.sm_clock_mhz", "MHz", "nvmlDeviceGetClockInfo(SM)"),
    fast("nvml.clock_event_reasons_bits", "bits", "nvmlDeviceGetCurrentClocksEventReasons"),
    slow("nvml.temperature_c", "C", "nvmlDeviceGetTemperatureV"),
    Sensor(
        "nvml.gpu_utilization_percent",
        "%",
        "nvmlDeviceGetUtilizationRates",
        reason="not supported by this device",
    ),
    slow("nvml.throttled_by_power_cap_ns", "ns", "field 74", "counter"),
)
HOST_SENSORS = (
    fast("host.rss_bytes", "bytes", "/proc/self/statm", scope="process"),
    fast("host.cpu_ns", "ns", "time.process_time_ns", "counter", "process"),
    slow(
        "host.energy_uj",
        "uJ",
        "RAPL",
        "counter",
        "machine",
        reason="no energy counter of the processor",
    ),
)


def simulated_run(*, seconds=20.0, on_gpu=True, seed=7, load=6.0, ended=True):
    """A run of so many seconds under `load` requests per second, on a GPU with captured graphs or
    on a CPU without.
    """
    return _Simulation(seconds, on_gpu, seed, load).run(ended)


@attrs.define
class _Sequence:
    seq_id: int
    arrival_ns: int
    num_prompt_tokens: int
    num_prefix_hit_tokens: int
    num_left: int
    first_scheduled_ns: int | None = None
    first_token_ns: int | None = None
    num_generated: int = 0


class _Simulation:
    def __init__(self, seconds, on_gpu, seed, load):
        self.rng = random.Random(seed)
        self.on_gpu = on_gpu
        self.load = load
        self.now = START_NS + 200 * MS
        self.end = START_NS + int(seconds * 1e9)
        self.waiting, self.running = [], []
        self.steps, self.requests, self.events = [], [], []
        self.next_id = 0
        self.next_arrival = self.now

    def run(self, ended):
        while self.now < self.end:
            self._arrive()
            if not self.waiting and not self.running:
                self.now = self.next_arrival
                continue
            self._step()
        steps = StepTable()
        for step in self.steps:
            for field in attrs.fields(StepTable):
                getattr(steps, field.name).append(getattr(step, field.name))
        series = self._series()
        last_ns = max(self.now, self.end)
        warm = START_NS + (self.end - START_NS) // 4
        return Run(
            info=self._info(),
            sensors=(*(NVML_SENSORS if self.on_gpu else ()), *HOST_SENSORS),
            steps=steps,
            requests=tuple(self.requests),
            series=series,
            events=tuple(self.events),
            windows=(
                Window(0, "run", START_NS, last_ns if ended else None, None),
                Window(1, "warm-up", START_NS, warm, 0),
                Window(2, "measured", warm, last_ns if ended else None, 0),
            ),
            ledgers=(self._ledger(),),
            anchors=(Anchor(START_NS, WALL_NS),),
            overhead=Overhead(
                num_ticks=len(series["host.rss_bytes"]), in_call_ns=80 * MS, worst_tick_ns=2 * MS,
                sampler_cpu_ns=40 * MS, writer_cpu_ns=90 * MS, hook_ns=900,
                num_steps=len(steps), num_bytes=1_234_567,
            ),
            observer_effect=None,
            last_ns=last_ns,
            ended=ended,
            notes=() if ended else ("The last line, 42, is torn and was left out.",),
        )  # fmt: skip

    def _arrive(self):
        while self.next_arrival <= self.now:
            prompt = self.rng.randint(16, 512)
            hit = prompt // 64 * 64 if self.rng.random() < 0.4 else 0
            self.waiting.append(
                _Sequence(self.next_id, self.next_arrival, prompt, hit, self.rng.randint(8, 200))
            )
            self.next_id += 1
            self.next_arrival += int(self.rng.expovariate(self.load) * 1e9)

    def _step(self):
        prefilled = self.waiting[:1]
        del self.waiting[:1]
        decoding = self.running[:]
        num_prefill = sum(s.num_prompt_tokens - s.num_prefix_hit_tokens for s in prefilled)
        num_rows = len(decoding) + len(prefilled)
        missed = self.on_gpu and not prefilled and self.rng.random() < 0.002
        replayed = self.on_gpu and not prefilled and not missed
        bucket = next((b for b in BUCKETS if b >= num_rows), None) if replayed else None
        scale = 1.0 if self.on_gpu else 5.0
        duration = int((2.2 + 0.02 * num_rows + 0.03 * num_prefill) * scale * MS)
        duration = int(duration * self.rng.lognormvariate(0, 0.04)) + (9 * MS if missed else 0)
        if self.rng.random() < 0.003:
            pause = self.rng.randint(2, 12) * MS
            data = {"duration_ns": pause, "generation": 2}
            self.events.append(Event(self.now + duration // 2, "gc", data))
            duration += pause
        start, self.now = self.now, self.now + duration
        preempted = 0
        if len(decoding) > 24:
            preempted = 1
            self.waiting.insert(0, self.running.pop())
        for sequence in prefilled:
            sequence.first_scheduled_ns = sequence.first_scheduled_ns or start
        got = [*(s for s in decoding if s in self.running), *prefilled]
        for sequence in got:
            sequence.first_token_ns = sequence.first_token_ns or self.now
            sequence.num_generated += 1
            sequence.num_left -= 1
        self.running += prefilled
        for sequence in [s for s in self.running if s.num_left <= 0]:
            self.running.remove(sequence)
            self.requests.append(self._request(sequence))
        used = min(NUM_BLOCKS, sum(20 + s.num_generated // 16 for s in self.running))
        self.steps.append(
            Step(
                index=len(self.steps), t0_ns=start, t1_ns=self.now, num_rows=num_rows,
                num_decode_tokens=len(decoding), num_prefill_tokens=num_prefill,
                num_prefix_hit_tokens=sum(s.num_prefix_hit_tokens for s in prefilled),
                num_waiting=len(self.waiting), num_running=len(self.running),
                num_free_blocks=NUM_BLOCKS - used, num_used_blocks=used,
                num_cached_blocks=min(NUM_BLOCKS, used - num_rows + len(self.requests) * 9),
                num_preempted=preempted,
                mode="replay" if bucket else "eager" if self.on_gpu else "native",
                bucket=bucket, fallback="block table wider than captured" if missed else None,
                schedule_ns=40_000, execute_ns=duration - 100_000, postprocess_ns=60_000,
                pack_ns=20_000 if self.on_gpu else 0, submit_ns=15_000 if self.on_gpu else 0,
                wait_ns=duration - 200_000 if self.on_gpu else 0,
                sampled=tuple(s.seq_id for s in got),
            )
        )  # fmt: skip
        self.now += self.rng.randint(5_000, 30_000)

    def _request(self, sequence):
        return Request(
            request_id=f"r{sequence.seq_id}", seq_ids=(sequence.seq_id,),
            arrival_ns=sequence.arrival_ns, first_scheduled_ns=sequence.first_scheduled_ns,
            first_token_ns=sequence.first_token_ns, finished_ns=self.now,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_prefix_hit_tokens=sequence.num_prefix_hit_tokens,
            num_generated_tokens=sequence.num_generated, num_preemptions=0,
            finish_reason="length",
        )  # fmt: skip

    def _series(self):
        rng = random.Random(1)
        fast = array("q", range(START_NS, self.end, 100 * MS))
        slow = array("q", range(START_NS, self.end, 1000 * MS))
        middle = (START_NS + self.end) // 2
        hot = [middle < t < middle + (self.end - START_NS) // 8 for t in fast]
        power = [410_000 + rng.randint(-30_000, 30_000) - 60_000 * h for h in hot]
        energy, total = [], 55_000_000
        for milliwatts in power:
            energy.append(total)
            total += milliwatts // 10
        resident = [2 * GIB + 300_000 * min(i, 60) for i in range(len(fast))]
        series = {
            "host.rss_bytes": Series(fast, resident),
            "host.cpu_ns": Series(fast, [i * 120 * MS for i in range(len(fast))]),
        }  # fmt: skip
        if self.on_gpu:
            series |= {
                "nvml.memory_used_bytes": Series(fast, [42 * GIB] * len(fast)),
                "nvml.power_mw": Series(fast, power),
                "nvml.energy_mj": Series(fast, energy),
                "nvml.sm_clock_mhz": Series(fast, [1605 if h else 1980 for h in hot]),
                "nvml.clock_event_reasons_bits": Series(fast, [4 if h else 0 for h in hot]),
                "nvml.temperature_c": Series(slow, [45 + min(25, i) for i in range(len(slow))]),
                "nvml.throttled_by_power_cap_ns": Series(
                    slow, [max(0, min(t - middle, (self.end - START_NS) // 8)) for t in slow]
                ),
            }
        return series

    def _info(self):
        gpu = {
            "type": "cuda", "index": 0, "uuid": "GPU-0", "name": "NVIDIA H200",
            "driver_version": "570.86", "cuda_version": "12.8", "power_limit_w": 700.0,
        }  # fmt: skip
        cpu = {"type": "cpu", "index": None, "uuid": None, "name": "AMD EPYC 9554, 2 cores"}
        captures = [
            {
                "bucket": b, "variant": "decode", "warmup_ms": 12.0, "capture_ms": 48.5,
                "pool_bytes": b << 21, "driver_bytes": 6 << 20,
            }
            for b in reversed(BUCKETS)
        ]  # fmt: skip
        return RunInfo(
            v=SCHEMA_VERSION, run_id="simulated", start_wall_ns=WALL_NS, start_mono_ns=START_NS,
            mode="live", period_s=0.1,
            engine={"name": "nanovllm", "version": "0.1.0"},
            model={"name": "Qwen/Qwen3-0.6B", "architecture": "qwen3", "num_layers": 28},
            device=gpu if self.on_gpu else cpu,
            config={"max_num_seqs": 32, "dtype": "bfloat16", "notes": ["one note", "another"]},
            memory={"weights_bytes": 1_192_099_840, "kv_cache_bytes": 38 * GIB},
            graphs={"captures": captures if self.on_gpu else [], "degraded": None},
            host={"python": "3.11.7", "num_cpus": 2},
        )  # fmt: skip

    def _ledger(self):
        total = 140 * GIB if self.on_gpu else 64 * GIB
        rows = [
            ("weights", "Weights", 1_192_099_840, "unique storages of the parameters"),
            ("kv_cache", "K/V cache", (38 if self.on_gpu else 1) * GIB, "the cache's tensors"),
        ]
        if self.on_gpu:
            rows += [
                ("driver_reserved", "Driver", 600 << 20, "nvmlDeviceGetMemoryInfo_v2, reserved"),
                *((f"graph_pool_{b}", f"Graph pool, {b} rows", b << 21, "increment at capture")
                  for b in BUCKETS),
                ("activations", "Activations, peak", 900 << 20, "allocated peak less the above"),
                ("allocator_slack", "Allocator slack", 210 << 20, "reserved - allocated"),
                ("context", "CUDA context", 1500 << 20, "process - torch reserved"),
            ]  # fmt: skip
        else:
            rows.append(("python", "Python and libraries", 700 << 20, "resident - the above"))
        rows.append(("other_processes", "Other processes", 2 * GIB, "used - ours"))
        free = (95 if self.on_gpu else 58) * GIB
        rows.append(("free", "Free", free, "free"))
        residual = total - sum(size for _, _, size, _ in rows)
        rows.append(("residual", "Not explained", residual, "total - the rows above"))
        return Ledger(
            START_NS,
            "cuda" if self.on_gpu else "cpu",
            total,
            "nvmlDeviceGetMemoryInfo_v2" if self.on_gpu else "MemTotal",
            tuple(LedgerRow(*row) for row in rows),
        )
