"""A long recording: what it costs while it goes on, and what its report costs afterwards.

    python -m bench.telemetry_soak --minutes 20
    python -m bench.telemetry_soak --minutes 20 --keep run.jsonl

A tiny model with random weights serves a few requests at a time at a fixed pace, with a rest now
and then, so that a run of this length leaves the machine to others. Each minute it prints the size
of the file, steps, what was dropped, and the resident memory, which must stay where it is.
"""

import argparse
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from bench.tiny_model import VOCAB_SIZE, write_tiny_model
from nanovllm import LLM, SamplingParams
from telemetry import Recorder

STEPS_PER_S = 100
BURST_S, REST_S = 20.0, 2.0
MAX_REQUESTS = 6

_REPORT = """
import sys, time
from pathlib import Path
from telemetry import read_run
from telemetry.report import build_report
begin = time.perf_counter()
run = read_run(sys.argv[1])
read = time.perf_counter()
report = build_report(run)
built = time.perf_counter()
report.to_html(sys.argv[2])
page = time.perf_counter()
# Not `ru_maxrss`, which begins at what the parent had.
status = Path("/proc/self/status").read_text().split()
peak = int(status[status.index("VmHWM:") + 1]) / 1024
print(f"report: read {read - begin:.2f} s, build {built - read:.2f} s, "
      f"page {page - built:.2f} s, peak memory {peak:.0f} MiB")
print(f"notes: {list(run.notes)}")
print(report.verdict)
"""


class Traffic:
    """Keeps a few requests alive, with common beginnings and lengths at random."""

    def __init__(self, llm: LLM, seed: int = 0) -> None:
        self._llm = llm
        self._rng = random.Random(seed)
        self._heads = [self._rng.choices(range(VOCAB_SIZE), k=64) for _ in range(4)]
        self._num_requests = 0

    def add(self) -> None:
        """Add requests until there are enough; how many is enough changes."""
        wanted = self._rng.randint(1, MAX_REQUESTS)
        state = self._llm.state
        for _ in range(wanted - len(state.waiting) - len(state.running)):
            head = self._rng.choice(self._heads)
            tail = self._rng.choices(range(VOCAB_SIZE), k=self._rng.randint(1, 64))
            params = SamplingParams(
                temperature=0, max_tokens=self._rng.randint(8, 200), ignore_eos=True
            )
            self._llm.add_request(head + tail, params, request_id=f"r{self._num_requests}")
            self._num_requests += 1


def serve(llm: LLM, recorder: Recorder, path: Path, minutes: float) -> None:
    """Step at the pace until the time is up, and print a line each minute."""
    traffic, process = Traffic(llm), psutil.Process()
    begin = time.perf_counter()
    due, next_line, rest_at = begin, begin + 60, begin + BURST_S
    while (now := time.perf_counter()) < begin + minutes * 60:
        if now >= next_line:
            next_line += 60
            print(line(recorder, path, process, now - begin), flush=True)
        if now >= rest_at and not llm.has_unfinished_requests():
            rest_at = now + BURST_S + REST_S
            due = now + REST_S
        elif now < rest_at:
            traffic.add()
        time.sleep(max(0.0, due - time.perf_counter()))
        due = max(due, time.perf_counter() - 0.1) + 1 / STEPS_PER_S
        llm.step()
    while llm.has_unfinished_requests():
        llm.step()
    print(line(recorder, path, process, time.perf_counter() - begin), flush=True)


def line(recorder: Recorder, path: Path, process: psutil.Process, seconds: float) -> str:
    """What recording has cost so far."""
    cost = recorder.overhead()
    dropped = cost.num_steps_dropped + cost.num_samples_dropped + cost.num_events_dropped
    return (
        f"{seconds / 60:5.1f} min: file {path.stat().st_size / 1e6:6.2f} MB, "
        f"{cost.num_steps:7} steps, {dropped} dropped, {cost.num_late_ticks} late ticks, "
        f"resident {process.memory_info().rss / 2**20:.1f} MiB, "
        f"sampler {cost.sampler_cpu_ns / 1e7 / seconds:.2f} % of a core, "
        f"writer {cost.writer_cpu_ns / 1e7 / seconds:.2f} %, "
        f"worst tick {cost.worst_tick_ns / 1e3:.0f} us, chunk {cost.worst_chunk_ns / 1e3:.0f} us"
    )


def main() -> None:
    """Record, and then report in a process of its own, whose peak memory is that of the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--keep", type=Path, help="write the run here, and the page beside it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.keep or Path(folder) / "run.jsonl"
        with (
            LLM(
                write_tiny_model(Path(folder) / "tiny"),
                device="cpu",
                dtype="float32",
                skip_tokenizer_init=True,
                max_model_len=512,
                max_num_seqs=MAX_REQUESTS,
                num_kvcache_blocks=256,
                kvcache_block_size=16,
            ) as llm,
            Recorder(llm, path) as recorder,
        ):
            serve(llm, recorder, path, options.minutes)
        page = path.with_suffix(".html")
        subprocess.run([sys.executable, "-c", _REPORT, path, page], check=True)
        print(f"page: {page.stat().st_size / 1e3:.0f} kB; file: {path.stat().st_size / 1e6:.2f} MB")
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(f"processor time of the recording: {used.ru_utime + used.ru_stime:.0f} s")


if __name__ == "__main__":
    main()
