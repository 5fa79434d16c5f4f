"""From the start of a process to its first token, by phase, with every cache warm.

    python -m bench.startup                    # the built-in model, 5 processes
    python -m bench.startup --model FOLDER --rounds 9

Each round is a process of its own that stamps what it does. Wall time is what a user waits for; CPU
time, of all threads, is what the work takes where others share the machine.
"""

import argparse
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

PHASES = {
    "find_device": "device",
    "find_model": "model files",
    "open_checkpoint": "checkpoint's header",
    "load_tokenizer": "tokenizer",
    "read_device_facts": "device's facts, import of Numba",
    "_load": "weights",
    "read_facts": "model's facts",
    "_make_executor": "K/V cache and kernels",
    "StructureCompiler": "structured output",
}
"""Functions of `nanovllm.build` that take their time, in order, and what they do."""


class Stamps:
    """Seconds by phase: wall and CPU."""

    def __init__(self, start_s: float) -> None:
        self.phases: dict[str, list[float]] = {}
        self._last = (start_s, 0.0)  # CPU time counts from the start of the process

    def end(self, phase: str) -> None:
        """What passed since the last stamp was this phase."""
        now = (time.perf_counter(), time.process_time())
        wall_s, cpu_s = self.phases.setdefault(phase, [0.0, 0.0])
        self.phases[phase] = [wall_s + now[0] - self._last[0], cpu_s + now[1] - self._last[1]]
        self._last = now

    def around(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """The function, as a phase of its own."""

        @functools.wraps(function)
        def stamped(*args: Any, **kwargs: Any) -> Any:
            self.end("the rest of construction")
            try:
                return function(*args, **kwargs)
            finally:
                self.end(phase)

        return stamped


def run_once(model: str, start_s: float) -> dict[str, list[float]]:
    """Start an engine in this process and take its first token; seconds by phase."""
    stamps = Stamps(start_s)
    stamps.end("interpreter")
    from nanovllm import LLM, SamplingParams

    stamps.end("import nanovllm")
    import torch  # noqa: F401  # to time it

    stamps.end("import torch")
    from nanovllm import build

    stamps.end("import the rest")
    for name, phase in PHASES.items():
        setattr(build, name, stamps.around(getattr(build, name), phase))
    llm = LLM(model)
    stamps.end("the rest of construction")
    next(llm.stream("The capital of France is", SamplingParams(temperature=0, max_tokens=4)))
    stamps.end("first token")
    return stamps.phases


def in_own_process(model: str) -> dict[str, list[float]]:
    """The same in a new process; its start counts."""
    # The clock is the system's, so that a child may go on where its parent began.
    command = [sys.executable, "-m", "bench.startup", "--model", model, "--since"]
    run = subprocess.run(
        [*command, repr(time.perf_counter())], capture_output=True, text=True, check=True
    )
    phases: dict[str, list[float]] = json.loads(run.stdout)
    return phases


def table(rounds: list[dict[str, list[float]]]) -> str:
    """Medians over the rounds, and the sum of each round's phases."""
    lines = [f"{'phase':34} {'wall s':>8} {'CPU s':>8}"]
    for phase in rounds[0]:
        wall_s, cpu_s = (statistics.median(one[phase][i] for one in rounds) for i in (0, 1))
        lines.append(f"{phase:34} {wall_s:8.3f} {cpu_s:8.3f}")
    totals = [[sum(phase[i] for phase in one.values()) for one in rounds] for i in (0, 1)]
    picks: dict[str, Callable[[list[float]], float]] = {"median": statistics.median, "least": min}
    for name, pick in picks.items():
        wall_s, cpu_s = pick(totals[0]), pick(totals[1])
        lines.append(f"{'in all, ' + name:34} {wall_s:8.3f} {cpu_s:8.3f}")
    return "\n".join(lines)


def main() -> None:
    """Measure some processes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--since", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.since is not None:
        json.dump(run_once(options.model, options.since), sys.stdout)
        return
    in_own_process(options.model)  # to warm every cache
    print(table([in_own_process(options.model) for _ in range(options.rounds)]))


if __name__ == "__main__":
    main()
