"""Host cost of one decode step: what the CPU does around the model, with no model.

    python -m bench.host_step                       # ours
    python -m bench.host_step --nano-vllm CHECKOUT  # beside nano-vllm's scheduler, in turn

Sequences of 1,024 prompt tokens decode in a step of `schedule`, `build_batch` and `postprocess`.
nano-vllm's step is its scheduler's `schedule` and `postprocess`, and between them the lists and
tensors that its model runner makes of the plan, without pinning them or copying them to a device.
Each run is a process of its own, and the runs of both alternate.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from typing import Any

from nanovllm.core import (
    EngineState,
    SchedulerLimits,
    Sequence,
    admit,
    build_batch,
    postprocess,
    schedule,
)
from nanovllm.sampling_params import SamplingParams

BLOCK_SIZES = (256, 16)
BATCH_SIZES = (1, 16, 64, 256)
NUM_PROMPT_TOKENS = 1024
NUM_STEPS = 400


def make_prompts(num_seqs: int) -> list[list[int]]:
    """Prompts of random tokens that share nothing."""
    rng = random.Random(0)
    return [[rng.randrange(50000) for _ in range(NUM_PROMPT_TOKENS)] for _ in range(num_seqs)]


def num_blocks(num_seqs: int, block_size: int) -> int:
    """Enough blocks that nothing is ever preempted."""
    return num_seqs * ((NUM_PROMPT_TOKENS + NUM_STEPS) // block_size + 2)


class HostLoop:
    """Our core with every sequence in decode; each call is one step."""

    def __init__(self, num_seqs: int, block_size: int) -> None:
        self.num_seqs = num_seqs
        self.limits = SchedulerLimits(num_seqs, 10**9, 10**7)
        self.state = EngineState.create(num_blocks(num_seqs, block_size), block_size)
        params = SamplingParams(max_tokens=NUM_STEPS - 1, ignore_eos=True)
        prompts = make_prompts(num_seqs)
        self.waiting = [Sequence.create(i, prompt, params) for i, prompt in enumerate(prompts)]
        self.num_steps_left = NUM_STEPS - 20  # well before the sequences end

    def admit(self) -> None:
        """Queue every prompt and take in its prefill: the first step of a batch."""
        for seq in self.waiting:
            self.state = admit(self.state, seq, self.limits)
        self.state, plan = schedule(self.state, self.limits)
        self.state, _ = postprocess(self.state, plan, [1] * self.num_seqs)

    def step(self) -> None:
        """One decode step."""
        self.num_steps_left -= 1
        self.state, plan = schedule(self.state, self.limits)
        build_batch(plan)
        self.state, _ = postprocess(self.state, plan, [5] * self.num_seqs)


class NanoLoop:
    """The same through nano-vllm's scheduler, imported from a checkout of it."""

    def __init__(self, num_seqs: int, block_size: int, checkout: str) -> None:
        modules = _import_nano(checkout)
        modules.sequence.Sequence.block_size = block_size
        self.block_size = block_size
        self.num_seqs = num_seqs
        config = argparse.Namespace(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=10**9,
            eos=-1,
            kvcache_block_size=block_size,
            num_kvcache_blocks=num_blocks(num_seqs, block_size),
        )
        self.scheduler = modules.scheduler.Scheduler(config)
        params = modules.sampling_params.SamplingParams(max_tokens=10**9)
        self.waiting = [modules.sequence.Sequence(p, params) for p in make_prompts(num_seqs)]

    def admit(self) -> None:
        """Queue every prompt and take in its prefill."""
        for seq in self.waiting:
            self.scheduler.add(seq)
        seqs, is_prefill = self.scheduler.schedule()
        self.scheduler.postprocess(seqs, [1] * self.num_seqs, is_prefill)

    def step(self) -> None:
        """One decode step, with the inputs that a model runner needs."""
        import torch

        seqs, is_prefill = self.scheduler.schedule()
        size = self.block_size
        width = max(len(seq.block_table) for seq in seqs)
        lens = [len(seq) for seq in seqs]
        slots = [seq.block_table[-1] * size + seq.last_block_num_tokens - 1 for seq in seqs]
        tables = [seq.block_table + [-1] * (width - len(seq.block_table)) for seq in seqs]
        torch.tensor([seq.last_token for seq in seqs])
        torch.tensor([length - 1 for length in lens])
        for values in (slots, lens, tables):
            torch.tensor(values, dtype=torch.int32)
        torch.tensor([seq.temperature for seq in seqs])
        self.scheduler.postprocess(seqs, [5] * self.num_seqs, is_prefill)


def _import_nano(checkout: str) -> Any:
    """nano-vllm's modules under their own name, which is ours too: only in a process of its own."""
    import importlib
    import types

    for name in [name for name in sys.modules if name.split(".")[0] == "nanovllm"]:
        del sys.modules[name]
    package = types.ModuleType("nanovllm")  # without its __init__, which needs flash-attn
    package.__path__ = [f"{checkout}/nanovllm"]
    sys.modules["nanovllm"] = package
    return argparse.Namespace(
        scheduler=importlib.import_module("nanovllm.engine.scheduler"),
        sequence=importlib.import_module("nanovllm.engine.sequence"),
        sampling_params=importlib.import_module("nanovllm.sampling_params"),
    )


def measure(loop: HostLoop | NanoLoop) -> dict[str, float]:
    """Microseconds: admission with the first step, and median and p99 of a decode step."""
    start = time.perf_counter()
    loop.admit()
    admission = time.perf_counter() - start
    durations = []
    for _ in range(NUM_STEPS - 20):
        start = time.perf_counter()
        loop.step()
        durations.append(time.perf_counter() - start)
    durations.sort()
    return {
        "admission": admission * 1e6,
        "step": statistics.median(durations) * 1e6,
        "p99": durations[len(durations) * 99 // 100] * 1e6,
    }


def _measure_all(checkout: str | None) -> dict[str, dict[str, float]]:
    """One round: `measure` for every block size and batch size."""
    results = {}
    for block_size in BLOCK_SIZES:
        for num_seqs in BATCH_SIZES:
            loop = (
                HostLoop(num_seqs, block_size)
                if checkout is None
                else NanoLoop(num_seqs, block_size, checkout)
            )
            results[f"{block_size:3d} {num_seqs:3d}"] = measure(loop)
    return results


def _in_own_process(*arguments: str) -> dict[str, dict[str, float]]:
    command = [sys.executable, "-m", "bench.host_step", "--one-round", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    results: dict[str, dict[str, float]] = json.loads(run.stdout)
    return results


def main() -> None:
    """Measure, and print medians over the rounds and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--nano-vllm", metavar="CHECKOUT", help="measure nano-vllm beside it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one-round", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_round:
        json.dump(_measure_all(options.nano_vllm), sys.stdout)
        return
    ours, theirs = [], []
    for _ in range(options.rounds):
        ours.append(_in_own_process())
        if options.nano_vllm:
            theirs.append(_in_own_process("--nano-vllm", options.nano_vllm))
    print(f"microseconds, medians of {options.rounds} rounds; ratio: ours / nano-vllm")
    for key in ours[0]:
        cells = []
        for what in ("admission", "step", "p99"):
            mine = statistics.median(one[key][what] for one in ours)
            cell = f"{what} {mine:8.1f}"
            if theirs:
                other = statistics.median(one[key][what] for one in theirs)
                cell += f" : {other:8.1f} = {mine / other:4.2f}"
            cells.append(cell)
        print(f"block size, sequences {key}   " + "   ".join(cells))


if __name__ == "__main__":
    main()
