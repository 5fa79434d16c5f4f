"""Tokens beside other engines, on the same work, in turn.

    python -m bench.peers                                      # ours, and what is installed here
    python -m bench.peers --python llama.cpp=VENV/bin/python   # a peer in its own environment
    python -m bench.peers --engines nanovllm-int8 llama.cpp-q8 # ours in int8 beside a peer in int8

Every engine gets seeded random prompts of token ids, generates exactly as many tokens as asked,
greedily and past the end of the text, with prefix caching off. Each engine is a process of its own,
the runs of all of them alternate, and what is printed are medians over the rounds and the ratio of
the first engine to each. All run the built-in model's weights. OpenVINO wants them as `optimum-cli
export openvino` writes them, in folders named `fp16` and `int8` in `NANOVLLM_OPENVINO`.
"""

import argparse
import importlib.util
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from bench.peer_engines import ENGINES, Generate

CASES = ((1, 32, 64), (2, 32, 64), (4, 128, 64), (8, 128, 64), (1, 128, 8), (1, 512, 8))
"""(batch, prompt tokens, new tokens)."""

RUNS = 3  # timed, each time, after one to warm up
PAUSE_S = 0.5  # for the others on the machine, after each time without them
RESULT = "result: "  # begins a worker's line that is none of the library's
FIRST_ID, END_ID = 17, 49152  # the ids below are special tokens


def _set_policy(policy: int, priority: int) -> None:
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setscheduler(int(thread), policy, os.sched_param(priority))


@contextmanager
def _undisturbed(wanted: bool) -> Iterator[None]:
    """Give the threads of this process the cores to themselves, where the system is Linux."""
    if wanted:
        _set_policy(os.SCHED_FIFO, 1)
    try:
        yield
    finally:
        if wanted:
            _set_policy(os.SCHED_OTHER, 0)
            time.sleep(PAUSE_S)


def run_case(
    generate: Generate, case: tuple[int, int, int], *, real_time: bool = False
) -> dict[str, float]:
    """Milliseconds to the first token (median over the prompts) and between tokens (median)."""
    batch, length, num_tokens = case
    rng = np.random.default_rng(0)
    firsts, gaps = [], []
    for run in range(1 + RUNS):
        prompts = rng.integers(FIRST_ID, END_ID, (batch, length)).tolist()
        with _undisturbed(real_time):
            start = time.perf_counter()
            times = generate(prompts, num_tokens)
        start = max(start, getattr(generate, "start", start))
        assert all(len(mine) == num_tokens for mine in times), [len(mine) for mine in times]
        if run == 0:
            continue
        firsts.append(statistics.median(mine[0] - start for mine in times))
        gaps += [b - a for mine in times for a, b in itertools.pairwise(mine)]
    return {"ttft": statistics.median(firsts) * 1e3, "itl": statistics.median(gaps) * 1e3}


class Worker:
    """A process that runs one engine, one case after the other."""

    def __init__(self, python: str, engine: str, threads: int, *, real_time: bool) -> None:
        """Start it; loading its weights goes on while others start."""
        self._engine = engine
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # lives as long as the process
        command = [python, "-m", "bench.peers", "--one", engine, "--threads", str(threads)]
        command += ["--weights", ENGINES[engine].weights()]
        self._process = subprocess.Popen(
            [*command, *(["--real-time"] if real_time else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=Path(__file__).parent.parent,
            start_new_session=True,  # so that whatever it starts can be stopped with it
            env={
                **os.environ,
                **ENGINES[engine].environment(python),
                "OMP_NUM_THREADS": str(threads),
                "HF_HUB_OFFLINE": "1",
            },
        )

    def wait_until_loaded(self) -> None:
        """Wait for its weights, and for whatever it compiles first; then stop it."""
        self._result()
        os.killpg(self._process.pid, signal.SIGSTOP)

    def measure(self, case: tuple[int, int, int]) -> dict[str, float]:
        """Run one case and wait for its result.

        Before and after it is stopped: idle threads that look for work would take a core's time.
        """
        os.killpg(self._process.pid, signal.SIGCONT)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            print(json.dumps(case), file=self._process.stdin, flush=True)
        result = self._result()
        os.killpg(self._process.pid, signal.SIGSTOP)
        return result

    def end(self) -> None:
        """Let it go."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _result(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(RESULT):
                result: dict[str, float] = json.loads(line.removeprefix(RESULT))
                return result
        self._errors.seek(0)
        sys.exit(f"{self._engine} failed:\n{self._errors.read()[-2000:]}")


def serve(engine: str, threads: int, weights: str, *, real_time: bool) -> None:
    """What a worker does: an empty result once it has loaded, then one for each line, a case."""
    generate = ENGINES[engine].make(threads, weights)
    print(RESULT + "{}", flush=True)
    for line in sys.stdin:
        result = run_case(generate, tuple(json.loads(line)), real_time=real_time)
        print(RESULT + json.dumps(result), flush=True)


def main() -> None:
    """Start the engines, and compare them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PYTHON")
    parser.add_argument("--cases", type=int, nargs="+", default=range(len(CASES)), metavar="N")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, help="default: all there are")
    parser.add_argument(
        "--real-time",
        action="store_true",
        help="time at real-time priority, on a machine that others use too (Linux, root)",
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--weights", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        serve(options.one, options.threads, options.weights, real_time=options.real_time)
        return
    pythons = dict(one.split("=", 1) for one in options.python)
    engines = [
        name
        for name, engine in ENGINES.items()
        if (options.engines is None or name in options.engines)
        and (name in pythons or importlib.util.find_spec(engine.module) is not None)
    ]
    print(f"engines: {', '.join(engines)}; {options.threads} threads, {options.rounds} rounds")
    workers = {
        name: Worker(
            pythons.get(name, sys.executable), name, options.threads, real_time=options.real_time
        )
        for name in engines
    }
    try:
        compare(workers, [CASES[place] for place in options.cases], options.rounds)
    finally:
        for worker in workers.values():
            worker.end()


def compare(workers: dict[str, Worker], cases: list[tuple[int, int, int]], rounds: int) -> None:
    """Measure every engine on every case in turn; print medians and ratios to the first."""
    engines = list(workers)
    for worker in workers.values():  # what is timed below has the machine to itself
        worker.wait_until_loaded()
    for case in cases:
        results: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
        for _ in range(rounds):
            for name in engines:
                results[name].append(workers[name].measure(case))
        print("batch {}, {} prompt tokens, {} new tokens".format(*case), flush=True)
        for what, unit in (("itl", "ms between tokens"), ("ttft", "ms to the first token")):
            base = statistics.median(one[what] for one in results[engines[0]])
            for name in engines:
                values = sorted(one[what] for one in results[name])
                middle = statistics.median(values)
                spread = f"{values[0]:.1f} to {values[-1]:.1f}"
                print(
                    f"  {name:13s} {middle:8.2f} {unit} ({spread}); "
                    f"{engines[0]} / it {base / middle:.2f}"
                )


if __name__ == "__main__":
    main()
